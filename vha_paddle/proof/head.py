"""Logits of several models at the same positions, a piece of the vocabulary at a time, and how far they are apart.

With l and l' the logits of two models at a position, p = softmax(l) and d = l - l',

    KL(p || p') = sum_v p_v d_v - log sum_v exp(l_v) + log sum_v exp(l'_v)

so one pass over the vocabulary suffices: sums of exponentials are kept relative to the largest logit so far, and
scaled down when a larger one comes. Logits are float32, all sums float64.

Letters: T positions, V tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import paddle

from vha_paddle.errors import RunError
from vha_paddle.export.verify import Difference

Array = np.ndarray[Any, Any]
Columns = Callable[[int, int], Array]
"""From the first token and the one behind the last to that part of an output projection: `[D, V]`, float32."""

_TOKENS_AT_ONCE = 512
_POSITIONS_AT_ONCE = 256
NO_LABEL = -1


class Distribution:
    """What is kept of one model's logits at T positions."""

    def __init__(self, label_T: Array) -> None:
        self._label_T = label_T
        self.largest_T = np.full(len(label_T), -np.inf)
        self.largest_size = 0.0
        """Absolute."""
        self.top_T = np.zeros(len(label_T), np.int64)
        self._sum_T = np.zeros(len(label_T))
        self._label_logit_T = np.zeros(len(label_T))

    def add(self, logits_TV: Array, first: int, rows: slice) -> tuple[Array, Array]:
        """Take in the logits of the tokens from `first` on; returns what sums of exponentials kept elsewhere are to be
        multiplied by, and the exponentials."""
        top_T = logits_TV.argmax(axis=1)
        positions = np.arange(len(logits_TV))
        before_T = self.largest_T[rows]
        now_T = np.maximum(before_T, logits_TV[positions, top_T])
        self.top_T[rows] = np.where(now_T > before_T, first + top_T, self.top_T[rows])
        rescale_T, e_TV = np.exp(before_T - now_T), np.exp(logits_TV - now_T[:, None])
        self._sum_T[rows] = self._sum_T[rows] * rescale_T + e_TV.sum(axis=1)
        self.largest_T[rows] = now_T
        self.largest_size = max(self.largest_size, float(np.abs(logits_TV).max()))
        column_T = self._label_T[rows] - first
        here = (column_T >= 0) & (column_T < logits_TV.shape[1]) & (self._label_T[rows] != NO_LABEL)
        self._label_logit_T[rows][here] = logits_TV[positions[here], column_T[here]]
        return rescale_T, e_TV

    @property
    def log_sum_T(self) -> Array:
        """Of the exponentials, relative to the largest logit."""
        return np.log(self._sum_T)

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy of the labels in nats; None where there are none."""
        labelled = self._label_T != NO_LABEL
        if not labelled.any():
            return None
        return float((self.largest_T + self.log_sum_T - self._label_logit_T)[labelled].mean())


class Gap:
    """How far one model's logits are from another's."""

    def __init__(self, num_positions: int) -> None:
        self._largest, self._sum, self._count = 0.0, 0.0, 0
        self._weighted_T = np.zeros(num_positions)

    def add(self, difference_TV: Array, rescale_T: Array, e_TV: Array, rows: slice) -> None:
        """Take in a piece: the reference's logits less the other's, and what the reference's `add` gave."""
        size_TV = np.abs(difference_TV)
        self._largest = max(self._largest, float(size_TV.max()))
        self._sum += float(size_TV.sum())
        self._count += size_TV.size
        self._weighted_T[rows] = self._weighted_T[rows] * rescale_T + (e_TV * difference_TV).sum(axis=1)

    def figures(self, reference: Distribution, other: Distribution) -> Difference:
        mean_T = self._weighted_T / np.exp(reference.log_sum_T)
        shift_T = (other.largest_T - reference.largest_T) + (other.log_sum_T - reference.log_sum_T)
        kl_T = np.maximum(mean_T + shift_T, 0)  # round-off may take it below
        scale = reference.largest_size
        return Difference(
            max_abs=self._largest,
            mean_abs=self._sum / self._count,
            relative=self._largest / scale if scale > 0 else self._largest,
            kl_mean=float(kl_T.mean()),
            kl_max=float(kl_T.max()),
            top1_agreement=float((reference.top_T == other.top_T).mean()),
        )


def compare(
    hidden_TD: Mapping[str, Array],
    projection: Callable[[int, int], Mapping[str, Array]],
    vocab_size: int,
    label_T: Array,
    pairs: Mapping[str, tuple[str, str]],
) -> tuple[dict[str, Distribution], dict[str, Difference]]:
    """Run through the vocabulary once.

    Args:
        hidden_TD: by model, the residual stream behind the final norm.
        projection: from the first token and the one behind the last to each model's part `[D, V]` of its head.
        label_T: the token that follows each position, or NO_LABEL.
        pairs: by name, the model that is the reference and the other.

    Raises:
        RunError: a logit is not finite.
    """
    count = len(label_T)
    distributions = {name: Distribution(label_T) for name in hidden_TD}
    gaps = {name: Gap(count) for name in pairs}
    for first, stop in _pieces(vocab_size, _TOKENS_AT_ONCE):
        columns = projection(first, stop)
        for begin, end in _pieces(count, _POSITIONS_AT_ONCE):
            rows = slice(begin, end)
            logits = {name: _logits(x_TD[rows], columns[name]) for name, x_TD in hidden_TD.items()}
            added = {name: distributions[name].add(logits_TV, first, rows) for name, logits_TV in logits.items()}
            for name, (reference, other) in pairs.items():
                gaps[name].add(logits[reference] - logits[other], *added[reference], rows)
    figures = {name: gaps[name].figures(*(distributions[model] for model in pair)) for name, pair in pairs.items()}
    return distributions, figures


def _logits(x_TD: Array, columns_DV: Array) -> Array:
    logits_TV = paddle.matmul(paddle.to_tensor(x_TD), paddle.to_tensor(columns_DV)).numpy().astype(np.float64)
    if not np.isfinite(logits_TV).all():
        raise RunError("verification: logits that are not finite; the weights or the tokens are broken")
    return logits_TV


def _pieces(size: int, at_once: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, at_once):
        yield start, min(start + at_once, size)
