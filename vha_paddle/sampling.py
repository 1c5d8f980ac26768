"""How the next token is chosen from logits `[V]`: the likeliest, or a draw among the likely ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.errors import RunError, UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: the likeliest token.

    Raises:
        UserError: a value out of its range.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token (of equals, the lowest id)."""
    top_k: int | None = None
    """Choose among the k likeliest tokens; None: among all."""
    top_p: float = 1.0
    """Of those, choose among the fewest likeliest whose probabilities sum to top_p or more."""
    seed: int = 0
    """The same seed, model and prompt give the same text."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: must be 0 (greedy) or positive; try 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be at least 1; leave it out to choose among all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1, which is all tokens")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: must be 0 or more")


def choose_token(logits_V: np.ndarray[Any, Any], sampling: Sampling, generator: np.random.Generator) -> int:
    """One token id. Sampling takes exactly one draw from the generator, greedy choice none."""
    if not np.isfinite(logits_V).all():
        raise RunError("the model's logits are not finite; its weights are damaged or its training diverged")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    candidates = np.argsort(-logits_V, kind="stable")[: sampling.top_k]  # likeliest first
    below_best = (logits_V[candidates] - logits_V.max()).astype(np.float64)
    with np.errstate(over="ignore"):  # a temperature next to 0 makes all but the best impossible
        cumulative = np.exp(below_best / sampling.temperature).cumsum()
    kept = cumulative[: int(cumulative.searchsorted(sampling.top_p * cumulative[-1])) + 1]
    return int(candidates[kept.searchsorted(generator.random() * kept[-1], side="right")])
