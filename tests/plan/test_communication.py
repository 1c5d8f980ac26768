"""Conventions of a plan's volumes. The volumes themselves are counted in the running program: tests/distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.plan.recipes import DCMHA, GROUPED, GVA, MFA, MLA, VHA, small_recipe
from vha_paddle.config import Parallel, Recipe
from vha_paddle.plan.communication import Transfer, postmix_values, transfers
from vha_paddle.plan.stages import stage_tensors


@pytest.mark.parametrize(
    ("kind", "ring"),
    [
        ("all-reduce", 1500),
        ("all-gather", 750),
        ("reduce-scatter", 750),
        ("broadcast", 1000),
        ("send", 1000),
        ("all-to-all", 750),
    ],
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


@pytest.mark.parametrize(("mode", "passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_postmix_in_weight_space_is_summed_again_only_where_its_block_is_recomputed(mode: str, passes: int) -> None:
    found = transfers(small_recipe(VHA | {"postmix_space": "weight"}, {"tensor": 2}, recompute=mode), 0)
    forward = [transfer.payload for transfer in found if (transfer.phase, transfer.purpose) == ("forward", "Postmix")]
    assert forward == [passes * 4 * 8 * 3 * 6 * 24 * 4]  # layers, microbatches, R, H, D, bytes


def test_grouped_attention_has_no_postmix() -> None:
    assert postmix_values(small_recipe(GROUPED)) is None


def test_postmix_adds_512_values_per_token_at_1p7b() -> None:
    found = postmix_values(small_recipe(VHA | {"head_dim": 128, "postmix_rank": 4}))
    assert found is not None and (found.per_token, found.per_pass) == (512, 0)


EXPERTS: dict[str, Any] = {
    "intermediate_size": None,
    "experts": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
}


def payloads(recipe: Recipe) -> dict[tuple[str, str], int]:
    """Bytes by axis and purpose."""
    found: Counter[tuple[str, str]] = Counter()
    for transfer in transfers(recipe, 0):
        found[transfer.axis, transfer.purpose] += transfer.payload
    return dict(found)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_every_copy_of_a_token_goes_to_its_expert_and_back(recompute: str, passes: int) -> None:
    parallel = {"sharding": 2, "expert": 2}
    recipe = small_recipe(VHA, parallel, compute="bfloat16", recompute=recompute, model=EXPERTS)
    found = payloads(recipe)
    rows = 4 * 4 * 8 * 2 * 24 * 2  # layers, microbatches of a rank, tokens, experts of each, D, bytes
    assert found["expert", "rows to experts and back"] == passes * 2 * rows
    assert found["expert", "gradients of rows"] == 2 * rows


def test_gradients_of_experts_are_summed_where_the_same_ones_are_held() -> None:
    experts = 4 * 3 * 3 * 24 * 10  # layers, experts of a rank, matrices
    for stage in (1, 2, 3):
        recipe = small_recipe(VHA, {"sharding": 4, "sharding_stage": stage, "expert": 2}, model=EXPERTS)
        same = [
            transfer for transfer in transfers(recipe, 0) if "experts" in transfer.purpose and transfer.axis != "expert"
        ]
        assert {transfer.ranks for transfer in same} == {2}
        assert {(transfer.kind, transfer.payload) for transfer in same} == {
            ("all-reduce", 4 * experts),
            ("broadcast", 4 * experts),
        }
    alone = small_recipe(VHA, {"sharding": 2, "expert": 2}, model=EXPERTS)
    assert not [
        transfer for transfer in transfers(alone, 0) if "experts" in transfer.purpose and transfer.axis != "expert"
    ]


def test_a_shared_expert_enters_and_leaves_the_tensor_region_by_itself() -> None:
    shared = EXPERTS | {"experts": EXPERTS["experts"] | {"shared_expert_intermediate_size": 8}}

    def outputs(model: dict[str, Any]) -> int:
        return payloads(small_recipe(GROUPED, {"tensor": 2}, model=model))["tensor", "outputs of o_proj and down_proj"]

    stream = 64 * 24 * 4  # tokens of a step, D, bytes
    assert outputs(shared) - outputs(EXPERTS) == 4 * stream
    assert outputs(EXPERTS) == outputs({})


@pytest.mark.parametrize(
    ("attention", "values"),
    [
        (VHA, 2 * 2 * 6),
        (GROUPED, 2 * 1 * 6),
        (MLA, 10 + 2),
        (MFA, 2 * 6),
        (GVA, 1 * 6 + 2),
        (DCMHA, 2 * 4 * 6 + 2 * 4 * 5),
    ],
)
def test_context_ranks_gather_what_is_cached_of_a_tensor_ranks_heads(attention: dict[str, Any], values: int) -> None:
    found = payloads(small_recipe(attention, {"tensor": 2, "context": 2}))
    assert found["context", "keys and values"] == 4 * 64 * values * 4  # layers, tokens of a step, bytes


def test_gradients_cross_in_float32_and_weights_in_their_own_dtype() -> None:
    recipe = small_recipe(VHA, {"sharding": 2, "sharding_stage": 2}, compute="bfloat16")
    found = payloads(recipe)
    replicas = payloads(small_recipe(VHA, {"data": 2, "pipeline": 2}, compute="bfloat16"))
    size = sum(tensor.size for tensor in stage_tensors(recipe.model, recipe.parallel, 0))
    assert found["sharding", "gradients to their owners"] == 4 * size * 4  # microbatches, bytes
    assert found["sharding", "weights from their owners"] == size * 2
    first = stage_tensors(recipe.model, Parallel(pipeline=2), 0)
    assert replicas["data", "gradients"] == sum(tensor.size for tensor in first) * 4
    assert replicas["pipeline", "gradient of the tied embedding"] == 56 * 24 * 4
    halves = payloads(small_recipe(VHA, {"tensor": 2, "pipeline": 2}, compute="bfloat16"))
    assert halves["pipeline", "gradient of the tied embedding"] == 56 // 2 * 24 * 4


def test_postmix_of_a_hybrid_is_summed_for_the_layers_that_have_it() -> None:
    hybrid = {"sliding_window": {"window": 3, "full_every": 4, "attention": GROUPED}}
    found = payloads(small_recipe(VHA, {"tensor": 2}, model=hybrid))
    assert 4 * found["tensor", "Postmix"] == payloads(small_recipe(VHA, {"tensor": 2}))["tensor", "Postmix"]
