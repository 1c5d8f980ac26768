"""Learning rates at the points that matter, computed by hand."""

from __future__ import annotations

import pytest

from vha_paddle.config.schema import CosineSchedule, WSDSchedule
from vha_paddle.train.schedule import learning_rate

COSINE = CosineSchedule(kind="cosine", total_tokens=1000, warmup_tokens=100, min_lr=0.1)
WSD = WSDSchedule(kind="wsd", total_tokens=1000, warmup_tokens=100, decay_tokens=200, min_lr=0.1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0.01), (50, 0.5), (100, 1.0), (325, 0.1 + 0.45 * (1 + 0.5**0.5)), (550, 0.55), (1000, 0.1)],
)
def test_cosine_rises_linearly_and_falls_by_half_a_cosine(tokens: int, expected: float) -> None:
    assert learning_rate(COSINE, 1.0, tokens) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(50, 0.5), (100, 1.0), (500, 1.0), (800, 1.0), (850, 0.775), (900, 0.55), (1000, 0.1)],
)
def test_wsd_is_constant_until_its_decay(tokens: int, expected: float) -> None:
    assert learning_rate(WSD, 1.0, tokens) == pytest.approx(expected, rel=1e-12)


def test_no_warmup_starts_at_the_peak() -> None:
    schedule = WSDSchedule(kind="wsd", total_tokens=10, warmup_tokens=0, decay_tokens=0, min_lr=0.0)
    assert [learning_rate(schedule, 2.0, tokens) for tokens in (1, 5, 10)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", [COSINE, WSD], ids=["cosine", "wsd"])
def test_tokens_beyond_the_run_stay_at_min_lr(schedule: CosineSchedule | WSDSchedule) -> None:
    assert learning_rate(schedule, 1.0, 1100) == pytest.approx(0.1, rel=1e-12)


def test_a_whole_run_ends_at_min_lr() -> None:
    step = 8
    rates = [learning_rate(COSINE, 1.0, tokens) for tokens in range(step, 1001, step)]
    assert rates[-1] == pytest.approx(0.1) and max(rates) <= 1.0
