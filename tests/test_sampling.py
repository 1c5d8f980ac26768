"""Which tokens a draw can give and how often, against the softmax written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vha_paddle.errors import RunError, UserError
from vha_paddle.sampling import Sampling, choose_token

PROBABILITIES = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + np.float32(3)
DRAWS = 4000


def drawn(sampling: Sampling, logits: np.ndarray = LOGITS) -> np.ndarray:
    """How often each token comes in `DRAWS` draws."""
    generator = np.random.Generator(np.random.Philox(sampling.seed))
    tokens = [choose_token(logits, sampling, generator) for _ in range(DRAWS)]
    return np.bincount(tokens, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    # Five standard deviations of a frequency.
    bound = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(drawn(Sampling(temperature=temperature)) - expected) < bound).all()


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {1, 3}),  # 0.4 is too little, 0.4 + 0.3 enough
        ({"top_p": 0.75}, {1, 2, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of the three, 0.7 / 0.85 is enough
    ],
    ids=str,
)
def test_only_the_likeliest_tokens_are_drawn(options: dict[str, Any], possible: set[int]) -> None:
    assert set(np.flatnonzero(drawn(Sampling(temperature=1.0, **options)))) == possible


def test_the_tokens_left_keep_their_proportions() -> None:
    frequencies = drawn(Sampling(temperature=1.0, top_k=2))
    assert abs(frequencies[1] - 4 / 7) < 5 * np.sqrt(4 / 7 * 3 / 7 / DRAWS)


def test_temperature_0_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    generator = np.random.Generator(np.random.Philox(0))
    assert choose_token(np.array([1.0, 5.0, 2.0, 5.0], np.float32), Sampling(), generator) == 1


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    assert drawn(Sampling(temperature=1e-320))[1] == 1


def test_logits_that_are_not_finite_are_a_failed_run() -> None:
    with pytest.raises(RunError, match="not finite"):
        choose_token(np.array([0.0, np.nan], np.float32), Sampling(), np.random.default_rng(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named_with_its_rule(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(UserError, match=f"{name}={value}: must be"):
        Sampling(**wrong)
