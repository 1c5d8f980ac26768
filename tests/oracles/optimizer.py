"""Clipping by the global norm and AdamW with decoupled weight decay, from their equations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AdamWSpec:
    """The constants of one AdamW update."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class AdamWState:
    """Of one tensor: running means of the gradient and of its square, and the updates made so far."""

    first_moment: np.ndarray
    second_moment: np.ndarray
    step: int = 0


def initial_state(weight: np.ndarray) -> AdamWState:
    """Zero moments."""
    return AdamWState(np.zeros_like(weight), np.zeros_like(weight))


def global_norm(grads: Mapping[str, np.ndarray]) -> float:
    """The 2-norm of all gradients seen as one vector; each tensor counts once."""
    return float(np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values())))


def clip_by_global_norm(grads: Mapping[str, np.ndarray], max_norm: float) -> tuple[dict[str, np.ndarray], float]:
    """All gradients scaled by max_norm / max(norm, max_norm), and the norm before clipping."""
    norm = global_norm(grads)
    scale = max_norm / max(norm, max_norm)
    return {name: grad * scale for name, grad in grads.items()}, norm


def adamw_update(
    weight: np.ndarray, grad: np.ndarray, state: AdamWState, spec: AdamWSpec
) -> tuple[np.ndarray, AdamWState]:
    """One update of one tensor:

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   t = t + 1
    w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """
    step = state.step + 1
    first = spec.beta1 * state.first_moment + (1.0 - spec.beta1) * grad
    second = spec.beta2 * state.second_moment + (1.0 - spec.beta2) * np.square(grad)
    first_unbiased = first / (1.0 - spec.beta1**step)
    second_unbiased = second / (1.0 - spec.beta2**step)
    decayed = weight * (1.0 - spec.learning_rate * spec.weight_decay)
    updated = decayed - spec.learning_rate * first_unbiased / (np.sqrt(second_unbiased) + spec.eps)
    return updated, AdamWState(first, second, step)
