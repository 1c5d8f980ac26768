"""The products of rows with the matrices of their experts as one batched product: the form for a GPU.

The rows of each expert are padded with zeros to the number that the busiest has, C, so that one kernel takes the
matrices of all experts, where a product for each would be as many launches. What it costs: C * E rows are multiplied
in place of R, which is the largest load over the mean load, so a balanced router pays little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor


def output(x_RD: Tensor, weight_EDF: Tensor, counts_E: Sequence[int]) -> Tensor:
    """Each row times the matrix of its expert: y_RF."""
    return _unpadded(paddle.bmm(_padded(x_RD, counts_E), weight_EDF), counts_E)


def input_gradient(dy_RF: Tensor, weight_EDF: Tensor, counts_E: Sequence[int]) -> Tensor:
    """Each row times the transposed matrix of its expert: dx_RD."""
    return _unpadded(paddle.matmul(_padded(dy_RF, counts_E), weight_EDF, transpose_y=True), counts_E)


def weight_gradient(x_RD: Tensor, dy_RF: Tensor, counts_E: Sequence[int]) -> Tensor:
    """Sum of x_r^T dy_r over the rows of each expert; zero for one without rows."""
    return paddle.matmul(_padded(x_RD, counts_E), _padded(dy_RF, counts_E), transpose_x=True)


def _padded(rows_RX: Tensor, counts_E: Sequence[int]) -> Tensor:
    """[E, C, X], the rows of each expert and then zeros."""
    size = max(1, *counts_E)
    source = np.full((len(counts_E), size), len(rows_RX))  # of padding: a row of zeros behind the others
    source.reshape(-1)[_places(counts_E, size)] = np.arange(len(rows_RX))
    zero_1X = paddle.zeros([1, rows_RX.shape[1]], rows_RX.dtype)
    padded = paddle.gather(paddle.concat([rows_RX, zero_1X]), paddle.to_tensor(source.reshape(-1)))
    return padded.reshape([*source.shape, -1])


def _unpadded(padded_ECX: Tensor, counts_E: Sequence[int]) -> Tensor:
    """The rows without the padding."""
    experts, size, width = padded_ECX.shape
    return paddle.gather(
        padded_ECX.reshape([experts * size, width]), paddle.to_tensor(_places(counts_E, size), dtype="int64")
    )


def _places(counts_E: Sequence[int], size: int) -> np.ndarray:
    """Where each row stands among E * C."""
    counts = np.asarray(counts_E)
    starts = np.arange(len(counts)) * size - (np.cumsum(counts) - counts)
    return np.repeat(starts, counts) + np.arange(counts.sum())
