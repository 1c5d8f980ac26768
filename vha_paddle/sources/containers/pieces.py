"""One tensor out of its pieces: check that they are the whole of it, and put each in its place.

Paddle's own merge is not followed: it loses or moves values where a range of elements ends inside a row of a tensor of
three axes. Here a range of elements is that of the box in C order, which is what its writer cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vha_paddle.sources.containers.metadata import Piece


def chosen(shape: tuple[int, ...], pieces: Sequence[Piece]) -> list[Piece] | None:
    """The pieces that make up a tensor, the first of each that has copies; None if they leave a gap or overlap."""
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tuple[int, int], Piece]] = {}
    for piece in pieces:
        ranges = boxes.setdefault((piece.offset, piece.shape), {})
        if piece.num_elements:
            ranges.setdefault(piece.elements or (0, math.prod(piece.shape)), piece)
    if not _boxes_tile(shape, [box for box in boxes if math.prod(box[1])]):
        return None
    for (_, box_shape), ranges in boxes.items():
        reached = 0
        for start, stop in sorted(ranges):
            if start != reached:
                return None
            reached = stop
        if reached != math.prod(box_shape):
            return None
    return [piece for ranges in boxes.values() for piece in ranges.values()]


def _boxes_tile(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    if any(len(offset) != len(shape) for offset, _ in boxes):
        return False
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if not boxes:
        return True
    starts = np.array([offset for offset, _ in boxes], np.int64)
    stops = starts + np.array([size for _, size in boxes], np.int64)
    if np.any(stops > np.array(shape, np.int64)):
        return False
    for i in range(len(boxes) - 1):  # of the right volume in all, and no two overlap: they leave no gap
        common = (starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])
        if np.any(np.all(common, axis=1)):
            return False
    return True


def assemble(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    pieces: Sequence[Piece],
    read_into: Callable[[Piece, np.ndarray[Any, Any]], None],
) -> np.ndarray[Any, Any]:
    """The whole tensor.

    Args:
        pieces: what `chosen` gave.
        read_into: fills a contiguous array, one axis long, with the values of a piece.
    """
    whole = np.empty(shape, dtype)
    for piece in pieces:
        bounds = zip(piece.offset, piece.shape, strict=True)
        place: tuple[Any, ...] = (
            ...,
            *(slice(start, start + size) for start, size in bounds),
        )  # `...`: of a scalar too
        box = whole[place]
        first, stop = piece.elements or (0, box.size)
        if box.flags.c_contiguous:
            read_into(piece, box.reshape(-1)[first:stop])
            continue
        values = np.empty(stop - first, dtype)
        read_into(piece, values)
        if len(values) == box.size:
            box[...] = values.reshape(box.shape)
        else:
            box.flat[first:stop] = values
    return whole
