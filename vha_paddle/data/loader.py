"""Training and validation batches from an indexed dataset: B samples of S tokens, and the token after each.

The documents of a dataset are one stream of T tokens. Sample i is the window of S + 1 tokens that starts at
i * S: S inputs, and the same shifted by one as labels. Windows overlap by one token, so each of the first (T
- 1) // S * S transitions is predicted exactly once an epoch; the tail that fills no window is left out.

The only state of a run's data is the number of samples it has consumed. Which sample comes next depends on
that number, the seed and the dataset, and never on how many ranks read it: each rank slices the same global
batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.errors import UserError

_EPOCHS_KEPT = 2  # a batch may span the end of one epoch and the start of the next


class _Windows:
    """The samples of one dataset, by number."""

    def __init__(self, indexed: IndexedTokens, sequence_length: int) -> None:
        if sequence_length < 1:
            raise UserError(f"sequence_length {sequence_length} must be at least 1 token")
        if indexed.num_tokens < sequence_length + 1:
            raise UserError(
                f"{indexed.prefix} holds {indexed.num_tokens} tokens, fewer than one sample of "
                f"sequence_length + 1 = {sequence_length + 1}; give more text or shorten sequence_length"
            )
        self.sequence_length = sequence_length
        self._windows = sliding_window_view(indexed.tokens, sequence_length + 1)[::sequence_length]

    @property
    def num_samples(self) -> int:
        """Samples in one pass over the dataset."""
        return len(self._windows)

    def _gather(self, samples: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [B, S] and labels [B, S] of the given samples, both int64 and writable."""
        windows = self._windows[samples].astype(np.int64)
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


class TokenBatches(_Windows):
    """The endless training stream: every sample once an epoch, each epoch in an order of its own.

    Attributes:
        sequence_length: S, tokens.
        global_batch_size: B, samples of one optimizer step over all ranks.
    """

    def __init__(self, indexed: IndexedTokens, sequence_length: int, global_batch_size: int, seed: int) -> None:
        """Prepare the stream; nothing is read yet.

        Raises:
            UserError: a number is out of range, or the dataset is shorter than one sample.
        """
        super().__init__(indexed, sequence_length)
        if global_batch_size < 1:
            raise UserError(f"global_batch_size {global_batch_size} must be at least 1 sample")
        if not 0 <= seed < 1 << 64:
            raise UserError(f"data seed {seed} must be in [0, 2**64)")
        self.global_batch_size = global_batch_size
        self._indexed = indexed
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of all that decides the stream but the position: data, sequence_length and seed.

        A checkpoint keeps it beside the number of samples consumed: with another fingerprint that number
        means other text.
        """
        content = f"{self._indexed.digest} {self.sequence_length} {self._seed}"
        return hashlib.sha256(content.encode()).hexdigest()

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, stop) of the global batch of step `step`, counted from 0; all rows by default.

        Returns:
            tokens_BS and labels_BS, int64, B = stop - start.
        """
        stop = self.global_batch_size if stop is None else stop
        if not 0 <= start <= stop <= self.global_batch_size:
            raise ValueError(f"rows [{start}, {stop}) are outside a global batch of {self.global_batch_size}")
        first = step * self.global_batch_size
        return self.samples(first + start, first + stop)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples [start, stop) of the stream, counted from the start of training.

        It is what `batch` slices, and what a run uses that changes its batch size on the way.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"samples [{start}, {stop}) are not a range of the stream")
        chosen = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            taken = self._order(epoch)[position : position + stop - start]
            chosen.append(taken)
            start += len(taken)
        return self._gather(np.concatenate(chosen))

    def _order(self, epoch: int) -> np.ndarray:
        """The order of the samples in `epoch`."""
        if epoch not in self._orders:
            # Sorting raw Philox output, because numpy keeps that stream fixed across its versions and does
            # not promise so for `Generator.permutation`: a resumed run must see the order it started with.
            key = np.array([self._seed, epoch], dtype=np.uint64)
            order = np.argsort(np.random.Philox(key=key).random_raw(self.num_samples), kind="stable")
            while len(self._orders) >= _EPOCHS_KEPT:
                del self._orders[min(self._orders)]
            self._orders[epoch] = order
        return self._orders[epoch]


class ValidationWindows(_Windows):
    """The samples of a held-out dataset in their own order, once.

    Attributes:
        sequence_length: S, tokens.
    """

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples [start, stop): tokens_BS and labels_BS, int64."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"samples [{start}, {stop}) are outside the {self.num_samples} of this dataset")
        return self._gather(slice(start, stop))

    def batches(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All samples, `batch_size` at a time; the last batch may be smaller."""
        for start in range(0, self.num_samples, batch_size):
            yield self.samples(start, min(start + batch_size, self.num_samples))


def unigram_entropy(indexed: IndexedTokens) -> float:
    """Entropy of the token frequencies in nats per token: the loss of a model that knows nothing but them."""
    counts = np.zeros(0, dtype=np.int64)
    for chunk in indexed.chunks():
        found = np.bincount(chunk)
        if len(found) > len(counts):
            counts, found = found, counts
        counts[: len(found)] += found
    shares = counts[counts > 0] / indexed.num_tokens
    return float(-(shares * np.log(shares)).sum())
