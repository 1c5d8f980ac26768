"""The fold of layers whose projections have biases, and of layers without QK-norm, against the numpy oracle.

As in test_fold.py, wrong folds are computed too and must be far off on the same data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.checkpoints import forward_spec
from tests.oracles import forward
from tests.test_fold import (
    GATED,
    GROUPED,
    POSTMIX_ONLY,
    PREMIX_ONLY,
    SLIDING,
    WIDE,
    Arrays,
    assert_visible,
    fold,
    layer_of,
    model_of,
    run_layer,
    vha,
)
from tests.tolerances import FLOAT64_FOLD, assert_close
from tests.weights import trained_weights
from vha_paddle.config import Model
from vha_paddle.counts import folded
from vha_paddle.fold import fold_state
from vha_paddle.names import expected_tensors

BIAS, NO_NORM = {"attention_bias": True}, {"qk_norm": False}
LAYERS = {
    "biases": model_of(vha(**BIAS)),
    "no norms": model_of(vha(**NO_NORM)),
    "biases and no norms": model_of(vha(**BIAS, **NO_NORM)),
    "biases, premix only": model_of(vha(**BIAS, **PREMIX_ONLY)),
    "biases, postmix only": model_of(vha(**BIAS, **POSTMIX_ONLY)),
    "biases, wide physical heads, gate": model_of(vha(**BIAS, **WIDE, **GATED)),
    "biases, paper 1.7B": model_of(vha(**BIAS, num_attention_heads=16, head_dim=128, postmix_rank=4), hidden_size=2048),
}
DECODERS = {
    "biases": model_of(vha(**BIAS, **NO_NORM), tie_word_embeddings=False),
    "biases in the sliding layers": model_of(
        GROUPED, num_hidden_layers=3, sliding_window=SLIDING | {"attention": vha(**BIAS)}
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_folded_layer_equals_the_vha_layer(case: str) -> None:
    model = LAYERS[case]
    weights, x = layer_of(model)
    assert ("q_proj.bias" in weights, "q_norm.weight" in weights) == ("biases" in case, "no norms" not in case)
    expected, actual = run_layer(x, weights, model), run_layer(x, fold(weights, model), folded(model))
    assert_close(actual, expected, FLOAT64_FOLD, "output")


@pytest.mark.parametrize("case", DECODERS)
def test_a_folded_decoder_is_the_served_model(case: str) -> None:
    model = DECODERS[case]
    weights = trained_weights(model, seed=1)
    served = dict(fold_state(weights, model, np.float64, "state"))
    assert {name: array.shape for name, array in served.items()} == expected_tensors(folded(model))
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 7))
    expected = forward.logits(weights, tokens, forward_spec(model))
    assert_close(forward.logits(served, tokens, forward_spec(folded(model))), expected, FLOAT64_FOLD, "logits")


@pytest.mark.parametrize("keys", [{}, WIDE], ids=["square", "wide physical heads"])
def test_a_virtual_heads_bias_is_its_physical_heads_through_its_groups_premix(keys: dict[str, object]) -> None:
    weights, _ = layer_of(model_of(vha(**BIAS, **keys)))
    width = len(weights["q_proj.bias"]) // 3
    result = fold(weights, model_of(vha(**BIAS, **keys)))["q_proj.bias"].reshape(6, 6)
    for n in range(6):
        group, physical = divmod(n, 3)
        own = weights["q_proj.bias"][physical * width :][:width]
        assert_close(result[n], own @ weights["premix"][group], FLOAT64_FOLD, f"virtual head {n}")


def test_the_other_biases_are_copied() -> None:
    weights, _ = layer_of(LAYERS["biases"])
    result = fold(weights, LAYERS["biases"])
    assert all(result[f"{part}_proj.bias"] is weights[f"{part}_proj.bias"] for part in "kvo")
    only_postmix, _ = layer_of(LAYERS["biases, postmix only"])
    assert fold(only_postmix, LAYERS["biases, postmix only"])["q_proj.bias"] is only_postmix["q_proj.bias"]


# Wrong folds


def without_premix(weights: Arrays, model: Model) -> Arrays:
    """Each virtual head has its physical head's bias as it is."""
    return {**fold(weights, model), "q_proj.bias": np.tile(weights["q_proj.bias"], model.attention.num_key_value_heads)}


def head_major(weights: Arrays, model: Model) -> Arrays:
    attention, folded_bias = model.attention, fold(weights, model)["q_proj.bias"]
    by_group = folded_bias.reshape(attention.num_key_value_heads, -1, attention.head_dim)
    return {**fold(weights, model), "q_proj.bias": by_group.swapaxes(0, 1).reshape(-1)}


def transposed_premix(weights: Arrays, model: Model) -> Arrays:
    transposed = fold({**weights, "premix": np.ascontiguousarray(weights["premix"].swapaxes(1, 2))}, model)
    return {**fold(weights, model), "q_proj.bias": transposed["q_proj.bias"]}


def value_bias_mixed(weights: Arrays, model: Model) -> Arrays:
    """The values' bias passes through the attention unchanged, but not through Postmix: W_O has that already."""
    attention = model.attention
    mix_NN = np.eye(attention.num_attention_heads) + weights["postmix_b"] @ weights["postmix_a"].T
    heads = np.repeat(weights["v_proj.bias"].reshape(-1, attention.head_dim), attention.num_physical_heads, axis=0)
    mixed = (mix_NN @ heads).reshape(attention.num_key_value_heads, -1, attention.head_dim).mean(axis=1)
    return {**fold(weights, model), "v_proj.bias": mixed.reshape(-1)}


WRONG_BIASES: dict[str, Callable[[Arrays, Model], Arrays]] = {
    "q bias not through Premix": without_premix,
    "q bias head-major": head_major,
    "q bias through Premix transposed": transposed_premix,
    "v bias through Postmix": value_bias_mixed,
}


@pytest.mark.parametrize("case", ["biases", "biases and no norms", "biases, paper 1.7B"])
@pytest.mark.parametrize("fault", WRONG_BIASES)
def test_a_wrong_fold_of_a_bias_is_visible(fault: str, case: str) -> None:
    assert_visible(WRONG_BIASES[fault], LAYERS[case])
