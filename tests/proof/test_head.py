"""Logits in pieces of the vocabulary, against the whole of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tolerances import FLOAT64, assert_close
from vha_paddle.errors import RunError
from vha_paddle.proof import head
from vha_paddle.proof.head import NO_LABEL, compare

T, D, V = 23, 12, 57


@pytest.fixture(params=[(5, 7), (64, 32), (57, 23)], ids=["many pieces", "one piece", "just one"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_TOKENS_AT_ONCE", request.param[0])
    monkeypatch.setattr(head, "_POSITIONS_AT_ONCE", request.param[1])


def models(scale: float = 3.0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Hidden states and projections of two models, in float64 so that only the sums are compared."""
    generator = np.random.default_rng(1)
    hidden = {"a": generator.standard_normal((T, D))}
    hidden["b"] = hidden["a"] + 0.05 * generator.standard_normal((T, D))
    weights = {"a": scale * generator.standard_normal((D, V))}
    weights["b"] = weights["a"] + 0.02 * generator.standard_normal((D, V))
    return hidden, weights


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("scale", [3.0, 40.0], ids=["flat", "peaked"])
def test_figures_are_those_of_whole_logits(pieces: None, scale: float) -> None:
    hidden, weights = models(scale)
    labels = np.random.default_rng(2).integers(0, V, T)
    labels[::4] = NO_LABEL

    def projection(first: int, stop: int) -> dict[str, np.ndarray]:
        return {name: weight[:, first:stop] for name, weight in weights.items()}

    distributions, gaps = compare(hidden, projection, V, labels, {"gap": ("a", "b")})
    a, b = (hidden[name] @ weights[name] for name in ("a", "b"))
    log_a, log_b = log_softmax(a), log_softmax(b)
    kl = (np.exp(log_a) * (log_a - log_b)).sum(axis=1)
    labelled = labels != NO_LABEL
    expected = {
        "max_abs": np.abs(a - b).max(),
        "mean_abs": np.abs(a - b).mean(),
        "relative": np.abs(a - b).max() / np.abs(a).max(),
        "kl_mean": kl.mean(),
        "kl_max": kl.max(),
        "top1_agreement": (a.argmax(1) == b.argmax(1)).mean(),
    }
    assert expected["top1_agreement"] < 1
    for name, value in expected.items():
        assert_close(np.array(getattr(gaps["gap"], name)), np.array(value), FLOAT64, name)
    for name, log in (("a", log_a), ("b", log_b)):
        assert np.array_equal(distributions[name].top_T, log.argmax(1))
        loss = -log[np.arange(T), labels][labelled].mean()
        assert_close(np.array(distributions[name].loss), np.array(loss), FLOAT64, f"loss of {name}")


def test_without_labels_there_is_no_loss(pieces: None) -> None:
    hidden, weights = models()
    distributions, _ = compare(
        hidden,
        lambda first, stop: {name: weight[:, first:stop] for name, weight in weights.items()},
        V,
        np.full(T, NO_LABEL),
        {},
    )
    assert distributions["a"].loss is None


def test_equal_models_differ_by_nothing_and_huge_logits_overflow_nothing() -> None:
    hidden, weights = models(scale=1e4)
    same = {name: weights["a"] for name in weights}
    _, gaps = compare(
        {name: hidden["a"] for name in hidden},
        lambda first, stop: {name: weight[:, first:stop] for name, weight in same.items()},
        V,
        np.full(T, NO_LABEL),
        {"gap": ("a", "b")},
    )
    found = gaps["gap"]
    assert (found.max_abs, found.kl_max, found.top1_agreement) == (0, 0, 1)


@pytest.mark.parametrize("broken", ["a", "b"])
def test_logits_that_are_not_finite_are_an_error(broken: str) -> None:
    hidden, weights = models()
    hidden[broken][3, 2] = np.nan
    with pytest.raises(RunError, match="not finite"):
        compare(
            hidden,
            lambda first, stop: {name: weight[:, first:stop] for name, weight in weights.items()},
            V,
            np.full(T, NO_LABEL),
            {"gap": ("a", "b")},
        )
