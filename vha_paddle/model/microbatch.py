"""A rank's rows of the global batch cut into what it runs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from vha_paddle.ops.attention_mask import document_starts
from vha_paddle.parallel.mesh import Mesh


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one forward pass, at the positions that this rank holds."""

    tokens_BS: paddle.Tensor
    labels_BS: paddle.Tensor
    samples_B: np.ndarray[Any, Any]
    """Index of each sequence among all that the run will ever see."""
    starts_BS: np.ndarray[Any, Any] | None
    """The position at which each token's document starts; None is no mask of documents."""


def microbatches_of(
    tokens_BS: np.ndarray[Any, Any],
    labels_BS: np.ndarray[Any, Any],
    first_sample: int,
    size: int,
    mesh: Mesh,
    eod_id: int | None = None,
) -> list[Microbatch]:
    """Microbatches of `size` sequences out of the rows that this rank reads.

    Args:
        tokens_BS, labels_BS: whole sequences; those of `mesh.own_rows` in training.
        first_sample: index of the first of them among all that the run will ever see; the others follow.
        eod_id: the token that ends a document, where attention keeps to documents; every pipeline stage sees it.
    """
    positions = mesh.own_positions(tokens_BS.shape[1])
    starts_BS = None if eod_id is None else document_starts(tokens_BS, eod_id)[:, positions]
    batches = []
    for start in range(0, len(tokens_BS), size):
        rows = slice(start, start + size)
        batches.append(
            Microbatch(
                paddle.to_tensor(np.ascontiguousarray(tokens_BS[rows][:, positions])),
                paddle.to_tensor(np.ascontiguousarray(labels_BS[rows][:, positions])),
                first_sample + np.arange(len(tokens_BS))[rows],
                None if starts_BS is None else starts_BS[rows],
            )
        )
    return batches
