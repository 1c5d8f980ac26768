"""Learning rates as a function of tokens."""

from __future__ import annotations

import math

from vha_paddle.config.schema import CosineSchedule, Schedule, WSDSchedule


def learning_rate(schedule: Schedule, peak: float, tokens: int) -> float:
    """The learning rate of the optimizer step that brings the run to `tokens` tokens.

    Linear from 0 over the warmup; then a half cosine to `min_lr` (`cosine`), or constant and a linear fall over the
    last `decay_tokens` (`wsd`). The last step runs at `min_lr` exactly when steps divide the run.
    """
    if tokens <= schedule.warmup_tokens:
        return peak * tokens / schedule.warmup_tokens
    fall_start, shape = _fall(schedule)
    if tokens <= fall_start:
        return peak
    progress = min(1.0, (tokens - fall_start) / (schedule.total_tokens - fall_start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if shape == "cosine" else 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * remaining


def _fall(schedule: CosineSchedule | WSDSchedule) -> tuple[int, str]:
    """Where the fall starts (tokens) and how it goes."""
    if isinstance(schedule, WSDSchedule):
        return schedule.total_tokens - schedule.decay_tokens, "linear"
    return schedule.warmup_tokens, "cosine"
