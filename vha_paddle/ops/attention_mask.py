"""Which keys a query sees: those before it, the newest ones through a window, those of its own document.

A packed sequence is documents one after another, each ended by its end-of-document token; the first may have begun
before the sequence, the last may go on after it. A mask of documents is one number for each query: the position at
which its document starts. That is the first key it sees, so documents of a packed sequence attend as if each were
alone. Positions count on through the sequence: RoPE's scores depend on distances only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Pieces = Sequence[tuple[int, int]]
"""Ranges (start, stop) of the positions of queries."""


def document_starts(tokens_BS: np.ndarray, eod_id: int) -> np.ndarray:
    """The position at which each token's document starts in its sequence, `[B, S]`, int64.

    `eod_id` belongs to the document that it ends.
    """
    starts_BS = np.zeros(tokens_BS.shape, np.int64)
    after_end = tokens_BS[:, :-1] == eod_id
    np.maximum.accumulate(np.where(after_end, np.arange(1, tokens_BS.shape[1]), 0), axis=1, out=starts_BS[:, 1:])
    return starts_BS


def document_ends(starts_BS: np.ndarray) -> np.ndarray:
    """The position after the last of each token's document, from `document_starts` of whole sequences."""
    length = starts_BS.shape[1]
    position_S = np.arange(length)
    starts_here = np.where(starts_BS == position_S, position_S, length)
    ends_BS = np.full_like(starts_BS, length)
    ends_BS[:, :-1] = np.minimum.accumulate(starts_here[:, :0:-1], axis=1)[:, ::-1]
    return ends_BS


def segments(pieces: Pieces, starts_S: np.ndarray | None) -> list[tuple[int, int, int]]:
    """The pieces cut where a document starts: (start, stop, the first position of the document) of each part.

    `starts_S` is that of the pieces' queries, in their order; None is one document from position 0 on.
    """
    if starts_S is None:
        return [(start, stop, 0) for start, stop in pieces]
    parts, row = [], 0
    for start, stop in pieces:
        of_piece = starts_S[row : row + stop - start]
        cuts = [0, *(np.flatnonzero(np.diff(of_piece)) + 1).tolist(), stop - start]
        parts += [(start + a, start + b, int(of_piece[a])) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        row += stop - start
    return parts


def seen_keys(
    pieces: Pieces, num_keys: int, window: int | None = None, starts_BS: np.ndarray | None = None
) -> np.ndarray:
    """Whether each of the pieces' queries sees each of the keys at positions 0 to num_keys - 1.

    Args:
        window: keys that a query sees, its own position included; None is all before it.
        starts_BS: `document_starts` of the queries; None is no mask of documents.

    Returns:
        bool, `[B, S, T]`; B = 1 without documents.
    """
    query_S1, key_T = np.concatenate([np.arange(*piece) for piece in pieces])[:, None], np.arange(num_keys)
    seen_ST = key_T <= query_S1
    if window is not None:
        seen_ST &= key_T > query_S1 - window
    seen_1ST: np.ndarray = seen_ST[None]
    return seen_1ST if starts_BS is None else seen_1ST & (key_T >= starts_BS[:, :, None])
