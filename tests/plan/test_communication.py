"""Conventions of a plan's volumes. The volumes themselves are counted in the running program: tests/distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.plan.recipes import GROUPED, VHA, small_recipe
from vha_paddle.plan.communication import Transfer, postmix_values, transfers


@pytest.mark.parametrize(
    ("kind", "ring"),
    [("all-reduce", 1500), ("all-gather", 750), ("reduce-scatter", 750), ("broadcast", 1000), ("send", 1000)],
)
def test_ring_bytes_of_a_payload_of_1000_on_4_ranks(kind: Any, ring: int) -> None:
    transfer = Transfer(axis="tensor", kind=kind, phase="step", purpose="", ranks=4, payload=1000)
    assert transfer.ring == ring


def by_kind(parallel: dict[str, Any], attention: dict[str, Any] = VHA) -> Counter[str]:
    found: Counter[str] = Counter()
    for transfer in transfers(small_recipe(attention, parallel), 0):
        if transfer.axis == "tensor" and transfer.phase != "step":
            found[transfer.kind] += transfer.payload
    return found


def test_sequence_parallel_moves_the_same_in_halves() -> None:
    plain, cut = by_kind({"tensor": 2}), by_kind({"tensor": 2, "sequence": True})
    assert cut["all-gather"] == cut["reduce-scatter"] == plain["all-reduce"] - cut["all-reduce"]


def test_one_process_communicates_nothing() -> None:
    assert transfers(small_recipe(VHA), 0) == []


def test_tensor_parallel_volume_adds_layers_ends_gradients_and_the_loss() -> None:
    planned = sum(transfer.payload for transfer in transfers(small_recipe(VHA, {"tensor": 2}), 0))
    # D = 24, R * H = 18; 4 layers, 64 tokens a step, 4 bytes
    layer = 2 * (24 + 24 + 18)  # both outputs and z; backward, both inputs and z again
    ends = 2 * 24  # forward, the embedding's output; backward, the entry of the head
    gradients = 2 * 288 + 72 + 12  # of k_proj and v_proj, Premix, and the two gains of QK-norm
    loss = 3  # per token
    assert planned == 4 * (64 * (4 * layer + ends + loss) + 4 * gradients)


def test_postmix_sums_512_channels_beside_the_two_outputs_at_1p7b() -> None:
    attention = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    model = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1}
    recipe = small_recipe(VHA | attention | {"postmix_rank": 4}, {"tensor": 2}, compute="bfloat16", model=model)
    found = {(transfer.phase, transfer.purpose): transfer.payload for transfer in transfers(recipe, 0)}
    per_token = {key: payload / recipe.tokens_per_step for key, payload in found.items()}
    stream = 2 * 2048  # bytes; beside the layer's two, one of the embedding's output and one of the head's input
    assert per_token["forward", "outputs of o_proj and down_proj"] == 2 * stream + stream
    assert per_token["backward", "inputs of attention and MLP"] == 2 * stream + stream
    assert per_token["forward", "Postmix"] == per_token["backward", "Postmix"] == 2 * 512


@pytest.mark.parametrize(
    ("attention", "tensor", "values"),
    [
        (VHA, 2, 2 * 288 + 72 + 12),
        (GROUPED, 2, 12),
        (GROUPED, 4, 2 * 288 + 12),  # more ranks than KV heads: each holds all of k_proj and v_proj
        (GROUPED | {"num_key_value_heads": 1}, 2, 2 * 144 + 12),
    ],
)
def test_gradients_of_tensors_held_whole_are_summed_once_per_step(
    attention: dict[str, Any], tensor: int, values: int
) -> None:
    found = transfers(small_recipe(attention, {"tensor": tensor}), 0)
    payloads = [transfer.payload for transfer in found if transfer.phase == "step"]
    assert payloads == [4 * 4 * values]


def test_recomputing_a_block_communicates_its_forward_pass_twice() -> None:
    def forward(mode: str) -> int:
        found = transfers(small_recipe(VHA, {"tensor": 2}, recompute=mode), 0)
        return sum(transfer.payload for transfer in found if transfer.phase == "forward")

    blocks = 4 * 64 * (2 * 24 + 3 * 6) * 4  # layers, tokens, both outputs and z, bytes
    assert forward("full") - forward("none") == blocks
    assert forward("selective") - forward("none") == 4 * 64 * 3 * 6 * 4


def test_grouped_attention_has_no_postmix() -> None:
    assert postmix_values(small_recipe(GROUPED)) is None


def test_postmix_adds_512_values_per_token_at_1p7b() -> None:
    found = postmix_values(small_recipe(VHA | {"head_dim": 128, "postmix_rank": 4}))
    assert found is not None and (found.per_token, found.per_pass) == (512, 0)
