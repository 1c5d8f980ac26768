"""Training and validation batches from indexed datasets: B samples of S tokens, and the token after each.

The documents of a dataset are one stream of T tokens. Sample i is the window of S + 1 tokens that starts at
i * S: S inputs, and the same shifted by one as labels. Windows overlap by one token, so each of the first (T
- 1) // S * S transitions is predicted exactly once an epoch; the tail that fills no window is left out.

The only state of a run's data is the number of samples it has consumed. Which sample comes next follows from that
number, the seed and the datasets with their weights, and never from how many ranks or threads read it. It is computed,
not looked up: `blend.py` says of which dataset a sample is, `shuffle.py` where an epoch's order has it. So there is no
index to build, to cache or to agree on, and memory does not depend on the size of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vha_paddle.data.blend import Blend
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.shuffle import shuffled
from vha_paddle.errors import RunError, UserError
from vha_paddle.files import read_at


class _Windows:
    """The samples of one dataset, by number.

    They are read from the file, not from its mapping: a disk that fails or a file that was cut off would end a process
    that touches a mapping with a signal, and a run of weeks would map all it has read.
    """

    def __init__(self, indexed: IndexedTokens, sequence_length: int, vocab_size: int | None = None) -> None:
        """Prepare; nothing is read yet.

        Args:
            vocab_size: of the model; a token that reaches it is an error when it is read. None checks nothing.
        """
        if sequence_length < 1:
            raise UserError(f"sequence_length {sequence_length} must be at least 1 token")
        if indexed.num_tokens < sequence_length + 1:
            raise UserError(
                f"{indexed.prefix} holds {indexed.num_tokens} tokens, fewer than one sample of "
                f"sequence_length + 1 = {sequence_length + 1}; give more text or shorten sequence_length"
            )
        self.indexed, self.sequence_length, self._vocab_size = indexed, sequence_length, vocab_size
        self._file = open(indexed.bin_path, "rb", buffering=0)

    @property
    def num_samples(self) -> int:
        """Samples in one pass over the dataset."""
        return (self.indexed.num_tokens - 1) // self.sequence_length

    def read(self, samples: Sequence[int]) -> np.ndarray:
        """The windows `[B, S + 1]` of the given samples, in the file's type.

        Raises:
            RunError: the file cannot be read, is shorter than it was, or holds a token that the model does not have.
        """
        dtype = self.indexed.tokens.dtype
        windows = np.empty((len(samples), self.sequence_length + 1), dtype)
        for window, sample in zip(windows, samples, strict=True):
            offset = sample * self.sequence_length * dtype.itemsize
            try:
                count = read_at(self._file.fileno(), memoryview(window).cast("B"), offset)
            except OSError as error:
                raise RunError(f"{self.indexed.bin_path}: cannot be read ({error.strerror})") from None
            if count != window.nbytes:
                raise RunError(
                    f"{self.indexed.bin_path}: ends within sample {sample}; it is shorter than when the run started"
                )
        self._check_vocabulary(windows, samples)
        return windows

    def _check_vocabulary(self, windows: np.ndarray, samples: Sequence[int]) -> None:
        unsigned = windows.view(f"<u{windows.itemsize}")  # a negative one is very large
        if self._vocab_size is None or int(unsigned.max(initial=0)) < self._vocab_size:
            return
        row, column = np.argwhere(unsigned >= self._vocab_size)[0]
        raise RunError(
            f"{self.indexed.bin_path}: token number {samples[row] * self.sequence_length + column} is "
            f"{windows[row, column]}, which is not in [0, vocab_size={self._vocab_size}); prepare the data again"
        )


class Part(NamedTuple):
    """One dataset of a blend."""

    indexed: IndexedTokens
    weight: int = 1
    """Its share of the samples, relative to the other weights."""


class Passes(NamedTuple):
    """How often a dataset is gone through."""

    part: Part
    tokens: int
    """Labels that are trained on from it."""
    epochs: float


class TokenBatches:
    """The endless training stream: datasets in proportion to their weights, each of them every sample once an epoch, in
    an order of that epoch's own.

    Attributes:
        parts: the datasets of the blend.
        sequence_length: S, tokens.
        global_batch_size: B, samples of one optimizer step over all ranks.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        """Prepare the stream; nothing is read yet.

        Args:
            vocab_size: of the model; a token that reaches it is an error when it is read. None checks nothing.

        Raises:
            UserError: a number is out of range, or a dataset is shorter than one sample.
        """
        if global_batch_size < 1:
            raise UserError(f"global_batch_size {global_batch_size} must be at least 1 sample")
        if not 0 <= seed < 1 << 64:
            raise UserError(f"data seed {seed} must be in [0, 2**64)")
        self.parts, self.sequence_length, self.global_batch_size = tuple(parts), sequence_length, global_batch_size
        self._seed = seed
        self._windows = [_Windows(part.indexed, sequence_length, vocab_size) for part in parts]
        self._blend = Blend([part.weight for part in parts])

    @property
    def fingerprint(self) -> str:
        """All that decides the stream but the position: digests of the data, weights, sequence_length and seed.

        A checkpoint keeps it beside the number of samples consumed: with another fingerprint that number
        means other text. `fingerprint.py` tells what differs between two.
        """
        data = ",".join(f"{part.weight}*{part.indexed.digest}" for part in self.parts)
        return f"order=2 seed={self._seed} sequence_length={self.sequence_length} train={data}"

    def passes(self, num_samples: int) -> list[Passes]:
        """What the first `num_samples` of the stream take of each dataset."""
        counts = self._blend.count(num_samples).tolist()
        return [
            Passes(part, count * self.sequence_length, count / windows.num_samples)
            for part, windows, count in zip(self.parts, self._windows, counts, strict=True)
        ]

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, stop) of the global batch of step `step`, counted from 0; all rows by default. No others are
        read.

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
        datasets, numbers = self._blend.at(np.arange(start, stop, dtype=np.int64))
        windows_BX = np.empty((stop - start, self.sequence_length + 1), np.int64)
        for dataset in np.unique(datasets).tolist():
            rows = np.flatnonzero(datasets == dataset)
            windows_BX[rows] = self._windows[dataset].read(self._places(dataset, numbers[rows]).tolist())
        return _inputs_and_labels(windows_BX)

    def _places(self, dataset: int, numbers: np.ndarray) -> np.ndarray:
        """The samples that a dataset has at these numbers of its own stream of epochs."""
        size = self._windows[dataset].num_samples
        epochs, positions = np.divmod(numbers, size)
        places = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            places[of_epoch] = shuffled(positions[of_epoch], size, self._seed, epoch, dataset)
        return places


class ValidationWindows:
    """The samples of a held-out dataset in their own order, once.

    Attributes:
        sequence_length: S, tokens.
        num_samples: samples in the dataset.
    """

    def __init__(self, indexed: IndexedTokens, sequence_length: int, vocab_size: int | None = None) -> None:
        """Prepare; nothing is read yet. `vocab_size` as in `TokenBatches`.

        Raises:
            UserError: the dataset is shorter than one sample.
        """
        self._windows = _Windows(indexed, sequence_length, vocab_size)
        self.sequence_length, self.num_samples = sequence_length, self._windows.num_samples

    @property
    def digest(self) -> str:
        """What tells the dataset's tokens from others (`IndexedTokens.digest`)."""
        return self._windows.indexed.digest

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples [start, stop): tokens_BS and labels_BS, int64."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"samples [{start}, {stop}) are outside the {self.num_samples} of this dataset")
        return _inputs_and_labels(self._windows.read(range(start, stop)).astype(np.int64))

    def batches(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All samples, `batch_size` at a time; the last batch may be smaller."""
        for start in range(0, self.num_samples, batch_size):
            yield self.samples(start, min(start + batch_size, self.num_samples))


def _inputs_and_labels(windows_BX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(windows_BX[:, :-1]), np.ascontiguousarray(windows_BX[:, 1:])


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
