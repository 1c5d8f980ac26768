"""What a layer keeps for its backward pass, against the memory that the running program keeps on CPU.

On CPU RoPE keeps nothing, the float32 of a norm's row lies in numpy's memory, and attention keeps its probabilities;
everything else is kept as on a GPU. For the dense attention of DCMHA and for experts, which keep small indices too, the
terms are within a hundredth of what is measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base import core

from tests.plan.recipes import DCMHA, GROUPED, GVA, MFA, MLA, VHA, small_recipe
from vha_paddle.config import Recipe
from vha_paddle.model.microbatch import Microbatch
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.plan import activations
from vha_paddle.plan.terms import STATISTIC

BATCH, SEQUENCE, HEAD_DIM = 2, 64, 16
TOKENS, QUERY_HEADS, KV_HEADS = BATCH * SEQUENCE, 8, 2
WIDE = {"head_dim": HEAD_DIM}
LATENT = MLA | {"kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
NARROW = {"postmix": "none", "postmix_rank": None, "physical_head_dim": 8, "premix_init": "orthogonal"}
KINDS = {
    "vha": VHA | WIDE,
    "vha_in_weight_space": VHA | WIDE | {"postmix_space": "weight"},
    "vha_gate": VHA | WIDE | {"output_gate": "before_postmix"},
    "vha_postmix_gate": VHA | WIDE | {"premix": "none", "output_gate": "after_postmix"},
    "vha_silu": VHA | WIDE | {"premix": "silu", "postmix": "silu"},
    "vha_narrow_premix": VHA | WIDE | NARROW,
    "grouped": GROUPED | WIDE,
    "grouped_gate": GROUPED | WIDE | {"output_gate": True},
    "grouped_without_norm": GROUPED | WIDE | {"qk_norm": False},
    "grouped_bias": GROUPED | WIDE | {"attention_bias": True},
    "vha_bias_without_norm": VHA | WIDE | {"attention_bias": True, "qk_norm": False},
    "vha_bias_in_weight_space": VHA | WIDE | {"attention_bias": True, "postmix_space": "weight"},
    "mla": LATENT,
    "mla_latent_queries": LATENT | {"q_lora_rank": 24},
    "mfa": MFA | WIDE | {"q_lora_rank": 40},
    "gva": GVA | WIDE | {"qk_rope_head_dim": 8},
}
# Rows of a token that go through a norm inside attention, before the core and in it.
NORMED_ROWS = {"mla": (0, 1), "mla_latent_queries": (1, 1), "mfa": (1, 0), "gva": (0, 0)}
NORMED_ROWS |= dict.fromkeys(("grouped_without_norm", "vha_bias_without_norm"), (0, 0))


def recipe_with(
    attention: dict[str, Any], recompute: str, layers: int, parallel: dict[str, Any], **changes: Any
) -> Recipe:
    model = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 192} | changes
    data = {"sequence_length": SEQUENCE, "micro_batch_size": BATCH}
    return small_recipe(attention, parallel=parallel, recompute=recompute, model=model, data=data)


def recipe_of(kind: str, recompute: str = "none", layers: int = 4, **parallel: Any) -> Recipe:
    return recipe_with(KINDS[kind], recompute, layers, parallel)


def allocated() -> int:
    return core.host_memory_stat_current_value("Allocated", 0)


def kept_by_forward(recipe: Recipe) -> int:
    model = build_model(recipe, Mesh(), "float32")
    tokens_BS = paddle.zeros([BATCH, SEQUENCE], "int64")
    model.forward_backward([Microbatch(tokens_BS, tokens_BS, np.arange(BATCH), None)], 1.0)  # makes the rotary tables
    before = allocated()
    loss_BS = model.loss(tokens_BS, tokens_BS)
    after = allocated()
    del loss_BS
    return after - before


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_on_cpu_what_the_terms_say(kind: str, recompute: str) -> None:
    found = (kept_by_forward(recipe_of(kind, recompute, 4)) - kept_by_forward(recipe_of(kind, recompute, 2))) / 2
    recipe = recipe_of(kind, recompute)
    heads = recipe.model.attention.num_attention_heads
    outside, inside = NORMED_ROWS.get(kind, (0, QUERY_HEADS + KV_HEADS))
    expected = activations.layer_kept(recipe)
    if recompute != "full":
        expected -= (2 + outside) * TOKENS * STATISTIC
    if recompute == "none":
        expected -= activations.layer_terms(recipe)["heads inside RoPE"]
        expected -= (inside + heads) * TOKENS * STATISTIC
        expected += heads * TOKENS * SEQUENCE * 4
    assert found == expected


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["dcmha", "experts"])
def test_dense_scores_and_experts_are_within_a_hundredth(name: str, recompute: str) -> None:
    attention = DCMHA | WIDE if name == "dcmha" else KINDS["gva"]
    changes = {} if name == "dcmha" else {"intermediate_size": None, "experts": EXPERTS}
    four, two = (recipe_with(attention, recompute, layers, {}, **changes) for layers in (4, 2))
    found = (kept_by_forward(four) - kept_by_forward(two)) / 2
    expected = activations.layer_kept(four)
    if recompute == "none":
        expected -= activations.layer_terms(four)["heads inside RoPE"]
        if name == "dcmha":
            expected -= 2 * QUERY_HEADS * TOKENS * STATISTIC  # of QK-norm
        else:  # its attention has a kernel
            expected += QUERY_HEADS * TOKENS * (SEQUENCE * 4 - STATISTIC)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_half_the_width_take_half_the_bytes_and_statistics_stay(kind: str) -> None:
    recipe = recipe_of(kind)
    half = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "bfloat16"})})
    whole, halved = (sum(activations.layer_terms(one).values()) for one in (recipe, half))
    rows = sum(NORMED_ROWS.get(kind, (0, QUERY_HEADS + KV_HEADS))) + recipe.model.attention.num_attention_heads
    assert 2 * halved - whole == (2 + rows) * TOKENS * STATISTIC


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
