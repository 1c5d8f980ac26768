"""The global batch cut into what one rank runs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from vha_paddle.parallel.mesh import Mesh


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one forward pass, at the positions that this rank holds."""

    tokens_BS: paddle.Tensor
    labels_BS: paddle.Tensor
    samples_B: np.ndarray[Any, Any]
    """Index of each sequence among all that the run will ever see."""


def microbatches_of(
    tokens_BS: np.ndarray[Any, Any], labels_BS: np.ndarray[Any, Any], first_sample: int, size: int, mesh: Mesh
) -> list[Microbatch]:
    """This rank's microbatches of `size` sequences out of the global batch, whose rows divide evenly over the ranks."""
    share = len(tokens_BS) // mesh.data_degree
    positions = mesh.own_positions(tokens_BS.shape[1])
    batches = []
    for start in range(mesh.data_rank * share, (mesh.data_rank + 1) * share, size):
        rows = slice(start, start + size)
        batches.append(
            Microbatch(
                paddle.to_tensor(np.ascontiguousarray(tokens_BS[rows][:, positions])),
                paddle.to_tensor(np.ascontiguousarray(labels_BS[rows][:, positions])),
                first_sample + np.arange(len(tokens_BS))[rows],
            )
        )
    return batches
