"""Every stock class: transformers gives the logits of the unfolded model; what has no class is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    small_model,
)
from tests.export.stock_directories import SPECIAL, hf_arrays, oracle_logits, their_logits, write_stock
from tests.tolerances import FLOAT32, assert_close, relative_error
from tests.weights import trained_weights
from vha_paddle.errors import UserError
from vha_paddle.export.config import hf_config
from vha_paddle.export.stock import partial_target, stock_class, stock_target, unfolded_target
from vha_paddle.names import expected_tensors, from_hf

BIASED = {"attention_bias": True}
NORMLESS = {"qk_norm": False}
WIDE_ENOUGH = {"hidden_size": 24}  # a multiple of the 6 heads
SMALL_LATENT = {
    "kind": "mla",
    "num_attention_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
}
LATENT_MODEL = {"rms_norm_eps": 1e-6, "hidden_size": 21}
LATENT_EXPERTS = SMALL_EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 24}
LATENT_MIXTURE = {"rms_norm_eps": 1e-6, "hidden_size": 24, "intermediate_size": None, "experts": LATENT_EXPERTS}
UNTIED = {"tie_word_embeddings": False}
TOKENS_BS = np.random.default_rng(1).integers(0, 330, (2, 11))

# Class, attention and other keys of the model.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3 with biases": ("Qwen3ForCausalLM", SMALL_VHA | BIASED, {}),
    "qwen3 with biases, hybrid": ("Qwen3ForCausalLM", SMALL_VHA | BIASED, SMALL_HYBRID | UNTIED),
    "qwen3 with biases, plain": ("Qwen3ForCausalLM", SMALL_GROUPED | BIASED, UNTIED),
    "qwen3-moe with biases": ("Qwen3MoeForCausalLM", SMALL_VHA | BIASED, SMALL_MIXTURE),
    "llama": ("LlamaForCausalLM", SMALL_VHA | NORMLESS, WIDE_ENOUGH),
    "llama, untied, biases": ("LlamaForCausalLM", SMALL_VHA | NORMLESS | BIASED, WIDE_ENOUGH | UNTIED),
    "llama, plain": ("LlamaForCausalLM", SMALL_GROUPED | NORMLESS, WIDE_ENOUGH),
    "deepseek-v3": ("DeepseekV3ForCausalLM", SMALL_LATENT, LATENT_MODEL),
    "deepseek-v3, untied": ("DeepseekV3ForCausalLM", SMALL_LATENT, LATENT_MODEL | UNTIED),
    "deepseek-v3, query latent": ("DeepseekV3ForCausalLM", SMALL_LATENT | {"q_lora_rank": 9}, LATENT_MODEL),
    "deepseek-v3, heads do not divide": (
        "DeepseekV3ForCausalLM",
        SMALL_LATENT | {"num_attention_heads": 5},
        LATENT_MODEL,
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", SMALL_LATENT | {"q_lora_rank": 9}, LATENT_MIXTURE),
    "deepseek-v2, untied, shared expert as wide as one": (
        "DeepseekV2ForCausalLM",
        SMALL_LATENT,
        LATENT_MIXTURE | UNTIED | {"experts": LATENT_EXPERTS | {"shared_expert_intermediate_size": 12}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_logits_of_the_unfolded_model(case: str, tmp_path: Path) -> None:
    architecture, attention, keys = CASES[case]
    model = small_model(attention, **keys)
    weights = trained_weights(model, seed=0)
    target = write_stock(tmp_path, model, weights)
    assert target.stock.architecture == architecture
    assert_close(their_logits(tmp_path, TOKENS_BS), oracle_logits(model, weights, TOKENS_BS), FLOAT32, case)


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_back_every_value_of_the_configuration(case: str, tmp_path: Path) -> None:
    _, attention, keys = CASES[case]
    written = hf_config(stock_target(small_model(attention, **keys), "test"), "float32", SPECIAL)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(tmp_path)
    for key in ("dtype", "torch_dtype", "architectures"):
        del written[key]
    assert {key: getattr(read, key) for key in written} == written


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("deepseek")])
def test_the_rotary_channels_come_back_in_our_order(case: str) -> None:
    _, attention, keys = CASES[case]
    model = small_model(attention, **keys)
    weights, target = trained_weights(model, seed=0), stock_target(model, "test")
    theirs = hf_arrays(model, weights, target)
    for name, shape in expected_tensors(model).items():
        back = from_hf(name, shape, theirs, target.naming)
        np.testing.assert_array_equal(back, weights[name].astype(np.float32), err_msg=name)


def test_the_data_can_see_the_order_of_rotary_channels(tmp_path: Path) -> None:
    """Rotary rows as they are here, which another model would be, give other logits."""
    model = small_model(SMALL_LATENT, **LATENT_MODEL)
    weights = trained_weights(model, seed=0)
    order = np.arange(8).reshape(4, 2).T.reshape(-1)  # undoes what is to be shown
    for layer in range(model.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"
        weights[name] = np.concatenate([weights[name][:, :10], weights[name][:, 10:][:, order]], axis=1)
    write_stock(tmp_path, model, weights)
    original = trained_weights(model, seed=0)
    assert relative_error(their_logits(tmp_path, TOKENS_BS), oracle_logits(model, original, TOKENS_BS)) > 1e-3


def test_a_tied_deepseek_has_its_embedding_twice() -> None:
    """vLLM's class ties nothing, and stops where it finds no output projection."""
    model = small_model(SMALL_LATENT, **LATENT_MODEL)
    target = stock_target(model, "test")
    theirs = hf_arrays(model, trained_weights(model, seed=0), target)
    np.testing.assert_array_equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])
    assert hf_config(target, "float32", SPECIAL)["tie_word_embeddings"] is False


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "experts without QK-norm": (
        SMALL_VHA | NORMLESS,
        SMALL_MIXTURE | WIDE_ENOUGH,
        ["model.attention.qk_norm=false with model.experts: Qwen3-MoE always has QK-norm; Mixtral"],
    ),
    "windows without QK-norm": (
        SMALL_VHA | NORMLESS,
        SMALL_HYBRID | WIDE_ENOUGH,
        ["model.attention.qk_norm=false with model.sliding_window: Llama, which has no QK-norm, has no windows"],
    ),
    "a Llama that transformers 5 does not take": (
        SMALL_VHA | NORMLESS,
        {},
        ["num_attention_heads=6: transformers 5 takes a Llama only where model.hidden_size=20 is a multiple of it"],
    ),
    "biases in sliding layers only": (
        SMALL_VHA,
        SMALL_HYBRID | {"sliding_window": {"window": 5, "full_every": 2, "attention": SMALL_GROUPED | BIASED}},
        ["model.sliding_window.attention: sliding layers have 6 query heads on 2 KV heads of width 8 with QK-norm and"],
    ),
    "mla with another eps": (
        SMALL_LATENT,
        {},
        ["kind=mla: DeepSeek's classes differ: model.rms_norm_eps=0.001, where transformers norms the latents with 1"],
    ),
    "a mixture like Qwen3-MoE's": (
        SMALL_LATENT | {"num_attention_heads": 2},
        LATENT_MODEL | SMALL_MIXTURE,
        [
            "norm_topk_prob=true, where DeepSeek-V2 leaves softmax probabilities as they are",
            "shared_expert_intermediate_size=0, where theirs is a multiple, not zero, of moe_intermediate_size=12",
            "num_attention_heads=2, where transformers 5 takes a DeepSeek-V2 only if model.hidden_size=21 is a mult",
        ],
    ),
    "a router's bias under mla": (
        SMALL_LATENT,
        LATENT_MIXTURE | {"experts": LATENT_EXPERTS | {"router_bias_update_rate": 0.001, "capacity_factor": 1.5}},
        [
            "experts were chosen with a bias on softmax probabilities, which DeepSeek-V2's router does not have",
            "no expert of DeepSeek-V2 is ever full",
        ],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_stock_class_computes_otherwise_is_listed(case: str) -> None:
    attention, keys, parts = REFUSED[case]
    with pytest.raises(UserError) as error:
        stock_class(small_model(attention, **keys), "somewhere")
    assert str(error.value).startswith("somewhere: ")
    for part in parts:
        assert part in str(error.value)


def test_a_model_of_our_own_class_has_all_its_tensors_or_what_does_not_fold() -> None:
    gated = small_model(SMALL_VHA | {"output_gate": "after_postmix"})
    assert unfolded_target(gated, "test").model == gated
    left = expected_tensors(partial_target(gated, "test").model)
    maps = {name.rpartition(".")[2] for name in expected_tensors(gated)} - {name.rpartition(".")[2] for name in left}
    assert maps == {"premix"}


@pytest.mark.parametrize(
    ("attention", "fault"),
    [
        (SMALL_VHA, "all of this model folds, into a stock class; leave out --allow-partial"),
        (SMALL_GROUPED, "nothing of this model folds; --no-fold writes it as it is"),
        (SMALL_VHA | {"premix": "silu", "postmix": "silu"}, "nothing of this model folds"),
    ],
    ids=["all", "plain", "silu"],
)
def test_a_partial_fold_is_for_what_folds_in_part(attention: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        partial_target(small_model(attention), "somewhere")


def test_biases_of_a_router_have_no_place_in_a_directory() -> None:
    model = small_model(SMALL_VHA, **SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"router_bias_update_rate": 1e-3}})
    with pytest.raises(UserError, match=r"router_bias_update_rate=0\.001: experts are chosen with biases"):
        unfolded_target(model, "somewhere")
