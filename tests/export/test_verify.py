"""What a verification says, and that its bounds tell the right fold from the wrong ones."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.oracles.decoder import decoder_logits
from tests.oracles.spec import OracleSpec, random_weights
from tests.tolerances import FLOAT32, FLOAT64
from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.export.verify import (
    BOUNDS,
    FOLDED_ATTENTION_BOUND,
    MAX_ROUNDING,
    MIN_EXPERT_AGREEMENT,
    AttentionErrors,
    Difference,
    Verification,
)
from vha_paddle.fold import fold_state

SMALL = Difference(max_abs=1e-6, mean_abs=1e-7, relative=1e-7, kl_mean=1e-12, kl_max=1e-11, top1_agreement=1.0)
GOOD = Verification(
    dtype="bfloat16",
    num_tokens=256,
    text="built in",
    num_text_tokens=128,
    scale=10.0,
    export=replace(SMALL, relative=1e-2, max_abs=0.1),
    fold=SMALL,
    storage=replace(SMALL, relative=1e-2, max_abs=0.1),
    cast=replace(SMALL, relative=1.1e-2, max_abs=0.11),
    attention=AttentionErrors(export=(1e-3, 2e-3), fold=(1e-15, 2e-15), cast=(1e-3, 2e-3)),
    largest_rounding=1.0,
    largest_rounding_tensor="model.norm.weight",
    checkpoint_loss=2.0,
    export_loss=2.001,
    expert_agreement=0.99,
)
NAN = float("nan")


def attention(**errors: Any) -> dict[str, Any]:
    return {"attention": replace(GOOD.attention, **errors)}


# What is changed, and what the fault must say, from the first that is looked at to the last.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "configuration": ({"config_differences": ("config.json: rope_theta is 1, the checkpoint's 2",)}, "rope_theta is 1"),
    "attention of the fold": (attention(fold=(0.0, 2e-10)), "the attention of layer 1 differs by 2.00e-10"),
    "no number": (attention(fold=(1.0, NAN)), "the attention of layer 1 differs by nan"),
    "logits of the fold": ({"fold": replace(SMALL, relative=1.1e-5)}, "before rounding, logits differ by 1.10e-05"),
    "a weight": ({"largest_rounding": 1.02}, "model.norm.weight: a weight is 1 times as far"),
    "a weight that is no number": ({"largest_rounding": NAN}, "model.norm.weight: a weight is nan times as far"),
    "logits": ({"export": replace(SMALL, relative=0.04)}, "the layers' attentions 1 differs most, by 2.00e-03"),
    "routers": ({"expert_agreement": 0.899}, "the routers choose 89.9% of the checkpoint's experts, at least 90%"),
}


def test_what_is_as_it_must_be_has_no_fault() -> None:
    assert GOOD.passed and GOOD.fault is None
    at_the_bounds = replace(
        GOOD,
        export=replace(SMALL, relative=BOUNDS["bfloat16"]),
        fold=replace(SMALL, relative=BOUNDS["float32"]),
        largest_rounding=MAX_ROUNDING,
        expert_agreement=MIN_EXPERT_AGREEMENT,
        **attention(fold=(FOLDED_ATTENTION_BOUND,) * 2, export=(1.0, 1.0)),
    )
    assert at_the_bounds.passed
    nothing_folded = replace(GOOD, fold=None, cast=None, expert_agreement=None, **attention(fold=None, cast=None))
    assert nothing_folded.passed


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_a_figure_beyond_its_bound_is_a_fault_of_its_own(change: dict[str, Any], message: str) -> None:
    found = replace(GOOD, **change)
    assert not found.passed and message in str(found.fault)


def test_the_fault_that_says_most_comes_first() -> None:
    changes = [change for change, _ in reversed(FAULTS.values()) if change != FAULTS["no number"][0]]
    found = GOOD
    for change in changes:
        found = replace(found, **change)
    assert "rope_theta" in str(found.fault)
    assert "attention of layer 1" in str(replace(found, config_differences=()).fault)


def test_figures_are_json_and_keep_the_short_keys() -> None:
    figures = json.loads(json.dumps(GOOD.figures(), allow_nan=False))
    flat = {"max_abs_difference": 0.1, "mean_abs_difference": 1e-7, "relative": 1e-2, "kl_mean": 1e-12, "kl_max": 1e-11}
    assert figures | flat == figures
    assert (figures["fold_relative"], figures["bound"], figures["passed"]) == (1e-7, BOUNDS["bfloat16"], True)
    assert figures["attention"] == {"export": [1e-3, 2e-3], "fold": [1e-15, 2e-15], "cast": [1e-3, 2e-3]}
    assert {"export", "storage", "fold", "cast", "checkpoint_loss", "export_loss", "text"} <= figures.keys()
    assert replace(GOOD, fold=None).figures()["fold_relative"] is None


def test_the_description_has_every_part_that_there_is() -> None:
    text = GOOD.describe()
    for part in ("export from checkpoint", "fold error", "storage error", "bfloat16 cast", "in layer 1", "built in"):
        assert part in text
    assert text.splitlines()[-1] == "passed: all bounds hold"
    assert "passed" not in replace(GOOD, largest_rounding=1.02).describe()
    bare = replace(GOOD, fold=None, cast=None, checkpoint_loss=None, expert_agreement=None).describe()
    assert not [part for part in ("fold error", "cast", "loss", "experts") if part in bare]


SPEC = OracleSpec(
    kind="vha",
    hidden_size=48,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    premix=True,
    postmix_rank=2,
    num_hidden_layers=4,
    intermediate_size=96,
    vocab_size=101,
    rope_theta=1e6,
)
MODEL = Model(
    vocab_size=SPEC.vocab_size,
    hidden_size=SPEC.hidden_size,
    intermediate_size=SPEC.intermediate_size,
    num_hidden_layers=SPEC.num_hidden_layers,
    tie_word_embeddings=True,
    attention=VirtualHeadAttention(
        kind="vha", num_attention_heads=8, num_key_value_heads=2, head_dim=16, postmix_rank=2
    ),
)
GROUPED = dataclasses.replace(SPEC, kind="grouped", premix=False, postmix_rank=0)
WEIGHTS = random_weights(SPEC, seed=4)
TOKENS_BS = np.random.default_rng(0).integers(0, SPEC.vocab_size, (2, 32))


def folded() -> dict[str, np.ndarray]:
    return dict(fold_state(WEIGHTS, MODEL, np.float64, "test"))


def transposed_postmix(weights: dict[str, np.ndarray]) -> None:
    for layer in range(SPEC.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        mix = np.eye(8) + WEIGHTS[f"{prefix}postmix_b"] @ WEIGHTS[f"{prefix}postmix_a"].T
        original = WEIGHTS[f"{prefix}o_proj.weight"].reshape(8, 16, 48)
        weights[f"{prefix}o_proj.weight"] = np.einsum("nm,mhd->nhd", mix, original).reshape(128, 48)


def head_major(weights: dict[str, np.ndarray]) -> None:
    for layer in range(SPEC.num_hidden_layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] = weights[name].reshape(48, 2, 4, 16).transpose(0, 2, 1, 3).reshape(48, 128)


def relative(weights: dict[str, np.ndarray]) -> float:
    expected, actual = decoder_logits(WEIGHTS, TOKENS_BS, SPEC), decoder_logits(weights, TOKENS_BS, GROUPED)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)],
)
def test_rounding_stays_within_the_bound_of_its_dtype(dtype: Any, numpy_dtype: type) -> None:
    rounded = {name: array.astype(numpy_dtype).astype(np.float64) for name, array in folded().items()}
    assert 0 < relative(rounded) <= BOUNDS[dtype]


@pytest.mark.parametrize("wrong", [transposed_postmix, head_major])
def test_a_wrong_fold_of_all_layers_exceeds_the_bounds_of_16_bits(wrong: Any) -> None:
    weights = folded()
    wrong(weights)
    assert relative(weights) > 2 * BOUNDS["bfloat16"]


def test_the_bounds_of_what_is_not_rounded_are_the_tolerances() -> None:
    assert (BOUNDS["float32"], FOLDED_ATTENTION_BOUND) == (FLOAT32, FLOAT64)
    assert BOUNDS["bfloat16"] < 0.07  # a norm before Premix, folded as if after it
