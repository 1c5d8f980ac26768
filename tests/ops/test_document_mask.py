"""Attention that keeps to documents: a packed sequence against its documents one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from tests.oracles import ops as oracle
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.ops import attention, attention_gpu
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.attention_mask import document_ends, document_starts, seen_keys, segments

EOD = 0
B, S, N, K, H = 2, 14, 4, 2, 5
# the second begins in a document, has empty ones (two ends in a row) and ends with an end
TOKENS = np.array([[5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 0, 0, 9, 1, 0, 3, 4, 5, 6, 7, 8, 0]])
STARTS = np.array([[0] * 14, [0, 0, 0, 3, 4, 4, 4, 7, 7, 7, 7, 7, 7, 7]])
MIXED = np.array([[5, 0, 7, 8, 9, 1, 0, 3, 4, 5, 6, 7, 8, 9], [5, 6, 0, 0, 9, 1, 0, 3, 4, 5, 6, 7, 8, 0]])


def inputs() -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(0, 1.5, (B, S, heads, H)) for heads in (N, K, K)], rng.normal(size=(B, S, N, H))


def one_by_one(starts_BS: np.ndarray, window: int | None) -> list[np.ndarray]:
    """The output and the gradients of q, k and v, from each document alone."""
    tensors, dy = inputs()
    y, gradients = np.zeros_like(dy), [np.zeros_like(tensor) for tensor in tensors]
    for row, starts_S in enumerate(starts_BS):
        for start in np.unique(starts_S):
            (positions,) = np.nonzero(starts_S == start)
            document = np.s_[row : row + 1, positions]
            y[document], cache = oracle.causal_attention(*(x[document] for x in tensors), window)
            for gradient, found in zip(gradients, oracle.causal_attention_backward(dy[document], cache), strict=True):
                gradient[document] = found
    return [y, *gradients]


def computed(form: Callable[..., paddle.Tensor], positions: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The same of the queries at `positions` by `form`, in float64; gradients of the others are not in k's and v's."""
    tensors, dy = inputs()
    leaves = [paddle.to_tensor(x, stop_gradient=False) for x in (tensors[0][:, positions], *tensors[1:])]
    y = form(*leaves, **options)
    y.backward(paddle.to_tensor(dy[:, positions]))
    return [y.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def test_a_document_starts_after_the_end_of_the_one_before() -> None:
    assert np.array_equal(document_starts(TOKENS, EOD), STARTS)
    assert np.array_equal(document_starts(TOKENS[:, :1], EOD), [[0], [0]])


def test_a_document_ends_where_the_next_starts() -> None:
    assert document_ends(STARTS).tolist() == [[14] * 14, [3, 3, 3, 4, 7, 7, 7, 14, 14, 14, 14, 14, 14, 14]]
    assert document_ends(np.array([[0]])).tolist() == [[1]]


def test_segments_are_the_documents_within_the_pieces() -> None:
    own = np.r_[2:6, 9:13]
    assert segments([(2, 6), (9, 13)], STARTS[1, own]) == [(2, 3, 0), (3, 4, 3), (4, 6, 4), (9, 13, 7)]
    assert segments([(2, 6), (9, 13)], None) == [(2, 6, 0), (9, 13, 0)]


@pytest.mark.parametrize("window", [None, 3])
def test_seen_keys_are_causal_in_the_window_and_of_the_document(window: int | None) -> None:
    own = np.r_[2:6, 9:13]
    seen = seen_keys([(2, 6), (9, 13)], S, window, STARTS[:, own])
    for row in range(B):
        for query, position in enumerate(own):
            first = max(STARTS[row, position], 0 if window is None else position - window + 1)
            assert np.flatnonzero(seen[row, query]).tolist() == list(range(first, position + 1))


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("block_rows", [2, 6, 256])
@pytest.mark.parametrize("kept", [1 << 26, 0], ids=["kept", "computed again"])
def test_packed_documents_attend_as_if_each_were_alone(
    window: int | None, block_rows: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", block_rows)
    monkeypatch.setattr(attention, "_MAX_KEPT_PROBABILITIES", kept)
    for tokens in (TOKENS, MIXED):
        starts_BS = document_starts(tokens, EOD)
        actual = computed(causal_attention, np.arange(S), window=window, starts_BS=starts_BS)
        for name, one, other in zip("yqkv", actual, one_by_one(starts_BS, window), strict=True):
            assert_close(one, other, FLOAT64, name)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("pieces", [[(0, 4), (10, 14)], [(4, 7), (7, 10)], [(5, 14)]])
@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_pieces_of_packed_documents_are_those_of_the_whole(
    window: int | None, pieces: list[tuple[int, int]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece's part of the output and of the gradients; the parts of all positions add up to the whole."""
    monkeypatch.setattr(attention_gpu, "_WINDOWED_QUERIES", 2)
    monkeypatch.setattr(attention, "on_gpu", lambda x: form == "gpu")
    starts_BS = document_starts(MIXED, EOD)
    own = np.concatenate([np.arange(*piece) for piece in pieces])
    others = np.setdiff1d(np.arange(S), own)
    ranges = [(int(p), int(p) + 1) for p in others]
    options = {"window": window}
    mine = computed(causal_attention, own, pieces=pieces, starts_BS=starts_BS[:, own], **options)
    theirs = computed(causal_attention, others, pieces=ranges, starts_BS=starts_BS[:, others], **options)
    y, dq, dk, dv = one_by_one(starts_BS, window)
    assert_close(mine[0], y[:, own], FLOAT64, "y")
    assert_close(mine[1], dq[:, own], FLOAT64, "dq")
    assert_close(mine[2] + theirs[2], dk, FLOAT64, "dk")
    assert_close(mine[3] + theirs[3], dv, FLOAT64, "dv")


def dense_flashmask(
    q_BSNH: paddle.Tensor, k_BSKH: paddle.Tensor, v_BSKH: paddle.Tensor, rows_B1S1: paddle.Tensor, *, causal: bool
) -> paddle.Tensor:
    """FlashMask as its documentation has it: key t is hidden from query rows_B1S1[t] on; causal besides."""
    assert causal and rows_B1S1.dtype == paddle.int32 and rows_B1S1.shape == [B, 1, S, 1]
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (paddle.repeat_interleave(x, group, axis=2) for x in (k_BSKH, v_BSKH))
    scores = paddle.einsum("bsnh,btnh->bnst", q_BSNH, k_BSNH) * q_BSNH.shape[3] ** -0.5
    query = paddle.arange(S).unsqueeze(1)
    seen = (paddle.arange(S) <= query) & (query < rows_B1S1[:, 0, :, 0].unsqueeze(1).astype("int64"))
    scores = paddle.where(seen.unsqueeze(1), scores, paddle.full([], -1e300, scores.dtype))
    return paddle.einsum("bnst,btnh->bsnh", F.softmax(scores), v_BSNH)


def test_flashmask_is_told_where_documents_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "flashmask_attention", dense_flashmask)
    starts_BS = document_starts(MIXED, EOD)

    def form(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        return attention_gpu.flash_attention_of_documents(q, k, v, H**-0.5, starts_BS)

    for name, one, other in zip("yqkv", computed(form, np.arange(S)), one_by_one(starts_BS, None), strict=True):
        assert_close(one, other, FLOAT64, name)


@pytest.mark.parametrize(("positions", "form"), [(14, "flash_attention_of_documents"), (9, "plain_attention")])
def test_a_gpu_takes_flashmask_for_whole_sequences(positions: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for name in ("flash_attention", "plain_attention", "flash_attention_of_documents"):
        monkeypatch.setattr(attention_gpu, name, lambda *_, name=name: chosen.append(name))
    q, k = (paddle.zeros([B, length, N, 8], "bfloat16") for length in (positions, S))
    attention_gpu.attention_on_gpu(q, k, k, [(S - positions, S)], None, 0.3, STARTS[:, S - positions :])
    assert chosen == [form]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (STARTS[:, 1:], "do not fit 2 sequences of 14 queries"),
        (STARTS[:1], "do not fit"),
        (STARTS - 1, "must ascend"),
        (STARTS + 1, "none may be after its own query"),
        (np.array([[0] * 14, [0] * 8 + [3, 2] + [3] * 4]), "must ascend"),
    ],
)
def test_starts_that_cannot_be_are_refused(starts: np.ndarray, message: str) -> None:
    q, k, v = (paddle.to_tensor(x) for x in inputs()[0])
    with pytest.raises(ValueError, match=message):
        causal_attention(q, k, v, starts_BS=starts)
