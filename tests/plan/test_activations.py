"""What a layer keeps for its backward pass, against the memory that the running program keeps on CPU.

On CPU RoPE keeps nothing, the float32 of a norm's row lies in numpy's memory, and attention keeps its probabilities;
everything else is kept as on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from tests.plan.recipes import GROUPED, VHA, small_recipe
from vha_paddle.config import Recipe
from vha_paddle.model.microbatch import Microbatch
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.plan import activations

BATCH, SEQUENCE, HEAD_DIM = 2, 64, 16
TOKENS, QUERY_HEADS, KV_HEADS = BATCH * SEQUENCE, 8, 2
KINDS = {
    "vha": VHA | {"head_dim": HEAD_DIM},
    "vha_in_weight_space": VHA | {"head_dim": HEAD_DIM, "postmix_space": "weight"},
    "grouped": GROUPED | {"head_dim": HEAD_DIM},
}


def recipe_of(kind: str, recompute: str = "none", layers: int = 4, **parallel: Any) -> Recipe:
    model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 192}
    data = {"sequence_length": SEQUENCE, "micro_batch_size": BATCH}
    return small_recipe(KINDS[kind], parallel=parallel, recompute=recompute, model=model, data=data)


def allocated() -> int:
    return core.host_memory_stat_current_value("Allocated", 0)


def kept_by_forward(kind: str, recompute: str, layers: int) -> int:
    model = build_model(recipe_of(kind, recompute, layers), Mesh(), "float32")
    tokens_BS = paddle.zeros([BATCH, SEQUENCE], "int64")
    model.forward_backward([Microbatch(tokens_BS, tokens_BS, np.arange(BATCH))], 1.0)  # makes the rotary tables
    before = allocated()
    loss_BS = model.loss(tokens_BS, tokens_BS)
    after = allocated()
    del loss_BS
    return after - before


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_on_cpu_what_the_terms_say(kind: str, recompute: str) -> None:
    found = (kept_by_forward(kind, recompute, 4) - kept_by_forward(kind, recompute, 2)) / 2
    recipe = recipe_of(kind, recompute)
    expected = activations.layer_kept(recipe)
    if recompute != "full":
        expected -= 2 * TOKENS * activations.STATISTIC
    if recompute == "none":
        expected -= activations.layer_terms(recipe)["heads inside RoPE"]
        expected -= (2 * QUERY_HEADS + KV_HEADS) * TOKENS * activations.STATISTIC
        expected += BATCH * QUERY_HEADS * SEQUENCE * SEQUENCE * 4
    assert found == expected


def test_a_recomputed_layer_comes_back_while_its_backward_pass_runs() -> None:
    terms = activations.layer_terms(recipe_of("vha"))
    assert activations.layer_recomputed(recipe_of("vha")) == 0
    assert activations.layer_recomputed(recipe_of("vha", "full")) == sum(terms.values())
    outside = ["inputs of the two norms", "inputs of q, k, v and of gate, up", "gate, up and their product"]
    inside = sum(terms.values()) - sum(terms[name] for name in outside)
    assert activations.layer_recomputed(recipe_of("vha", "selective")) == inside


def test_sequence_parallel_cuts_the_inputs_of_norms_and_tensor_parallel_heads_and_channels() -> None:
    whole, tensor = activations.layer_terms(recipe_of("vha")), activations.layer_terms(recipe_of("vha", tensor=2))
    cut = activations.layer_terms(recipe_of("vha", tensor=2, sequence=True))
    norms, projections = "inputs of the two norms", "inputs of q, k, v and of gate, up"
    assert (tensor[norms], cut[norms]) == (whole[norms], whole[norms] // 2)
    assert cut[projections] == tensor[projections] == whole[projections]
    for name in ("queries into attention", "heads into Premix", "gate, up and their product"):
        assert cut[name] == tensor[name] == whole[name] // 2
    assert cut["keys and values into attention"] == whole["keys and values into attention"]  # VHA's are whole


def test_ranks_beyond_the_kv_heads_keep_the_one_kv_head_that_they_compute() -> None:
    terms = activations.layer_terms(recipe_of("grouped", tensor=4))  # two query heads on a rank
    vector = TOKENS * HEAD_DIM * 4
    assert terms == {
        "inputs of the two norms": 2 * TOKENS * (64 * 4 + 4),
        "inputs of q, k, v and of gate, up": 2 * TOKENS * 64 * 4,
        "heads into QK-norm": 3 * (vector + TOKENS * 4),
        "heads inside RoPE": 2 * 3 * vector,
        "queries into attention": 2 * vector,
        "keys and values into attention": 2 * vector,
        "output of attention": 2 * (vector + TOKENS * 4),
        "gate, up and their product": 3 * TOKENS * (192 // 4) * 4,
    }


def test_context_parallel_cuts_all_but_the_keys_and_values_that_are_gathered() -> None:
    whole, cut = activations.layer_terms(recipe_of("vha")), activations.layer_terms(recipe_of("vha", context=2))
    gathered = "keys and values into attention"
    assert cut.pop("output of attention, its pieces joined") == TOKENS // 2 * QUERY_HEADS * HEAD_DIM * 4
    assert cut.pop(gathered) == whole.pop(gathered)
    assert {name: 2 * size for name, size in cut.items()} == whole


def test_the_loss_keeps_a_float32_softmax_of_the_vocabulary_part() -> None:
    recipe = small_recipe(VHA, {"tensor": 2}, compute="bfloat16")  # T = 8, D = 24, V / t = 28
    assert activations.end_kept(recipe) == 8 * (24 * 2 + 4) + 8 * 24 * 2 + 8 * 28 * 4
    assert activations.end_working(recipe) == 8 * 28 * (2 + 4)
    assert activations.end_working(small_recipe(VHA, {"tensor": 2})) == 8 * 28 * 4
