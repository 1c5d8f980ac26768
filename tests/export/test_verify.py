"""The comparison of logits, and that its bounds tell the right fold from the wrong ones."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from tests.oracles.decoder import decoder_logits
from tests.oracles.spec import OracleSpec, random_weights
from tests.tolerances import FLOAT32
from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.errors import RunError
from vha_paddle.export.verify import (
    BOUNDS,
    MIN_EXPERT_AGREEMENT,
    Logits,
    Verification,
    random_tokens,
    verify_logits,
)
from vha_paddle.fold import fold_state

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
TOKENS_BS = random_tokens(SPEC.vocab_size, 32)


def folded() -> dict[str, np.ndarray]:
    return dict(fold_state(WEIGHTS, MODEL, np.float64, "test"))


def model(weights: dict[str, np.ndarray], spec: OracleSpec) -> Logits:
    return lambda tokens_BS: decoder_logits(weights, tokens_BS, spec)


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


def compare(weights: dict[str, np.ndarray], dtype: str) -> Verification:
    return verify_logits(model(WEIGHTS, SPEC), model(weights, GROUPED), TOKENS_BS, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)],
)
def test_the_right_fold_passes_in_every_dtype(dtype: str, numpy_dtype: type) -> None:
    rounded = {name: array.astype(numpy_dtype).astype(np.float64) for name, array in folded().items()}
    result = compare(rounded, dtype)
    assert result.passed and result.relative > 0
    assert result.top1_agreement > 0.9


@pytest.mark.parametrize("wrong", [transposed_postmix, head_major])
def test_a_wrong_fold_exceeds_the_widest_bound(wrong) -> None:  # noqa: ANN001
    weights = folded()
    wrong(weights)
    result = compare(weights, "bfloat16")
    assert not result.passed and result.relative > 2 * max(BOUNDS.values())


def test_every_bound_is_below_the_smallest_error_of_a_wrong_fold() -> None:
    assert BOUNDS["float32"] == FLOAT32
    assert max(BOUNDS.values()) < 0.07  # a norm before Premix, folded as if after it


def test_the_figures_are_those_of_the_logits() -> None:
    reference = np.array([[[1.0, -4.0, 2.0], [0.5, 0.25, 0.0]]])
    exported = np.array([[[2.0, -4.5, 1.0], [0.25, 0.5, 0.0]]])  # larger than the reference
    result = verify_logits(lambda _: reference, lambda _: exported, np.zeros((1, 2), np.int64), "float32")
    assert result == Verification(
        num_tokens=2,
        max_abs_difference=1.0,
        mean_abs_difference=0.5,
        scale=4.0,
        relative=0.25,
        top1_agreement=0.0,
        bound=1e-5,
    )
    assert result.figures()["passed"] is False


def test_a_difference_at_the_bound_passes() -> None:
    def shifted(tokens_BS: np.ndarray) -> np.ndarray:
        return np.ones((1, 1, 2)) - [0.0, BOUNDS["bfloat16"]]

    assert verify_logits(lambda _: np.ones((1, 1, 2)), shifted, np.zeros((1, 1), int), "bfloat16").passed


def test_a_router_that_chooses_other_experts_is_a_fault_of_its_own() -> None:
    equal = np.ones((1, 1, 2))

    def result(agreement: float) -> Verification:
        tokens_BS = np.zeros((1, 1), int)
        return verify_logits(lambda _: equal, lambda _: equal, tokens_BS, "float32", lambda: agreement)

    assert result(MIN_EXPERT_AGREEMENT).passed
    assert result(0.899).fault == "the routers choose 89.9% of the checkpoint's experts, at least 90% are required"


@pytest.mark.parametrize("broken", ["reference", "exported"])
def test_logits_that_are_not_finite_are_an_error(broken: str) -> None:
    sound, bad = np.zeros((1, 1, 2)), np.array([[[0.0, np.nan]]])
    reference, exported = (bad, sound) if broken == "reference" else (sound, bad)
    with pytest.raises(RunError, match="not finite"):
        verify_logits(lambda _: reference, lambda _: exported, np.zeros((1, 1), int), "float32")


def test_logits_of_different_shapes_are_an_error() -> None:
    with pytest.raises(RunError, match=r"logits \[1, 1, 3\], the checkpoint's \[1, 1, 2\]"):
        verify_logits(lambda _: np.zeros((1, 1, 2)), lambda _: np.zeros((1, 1, 3)), np.zeros((1, 1), int), "float32")


def test_tokens_stay_within_vocabulary_and_length() -> None:
    tokens_BS = random_tokens(7, 20)
    assert tokens_BS.shape == (2, 20) and set(tokens_BS.ravel()) == set(range(7))
    assert random_tokens(7, 4096).shape == (2, 128)
