from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from tests.ops.conftest import TOLERANCES, Arrays, assert_gradients
from tests.oracles import ops as oracle
from tests.tolerances import assert_close
from vha_paddle.errors import RunError
from vha_paddle.ops import attention, attention_gpu
from vha_paddle.ops.attention import causal_attention
from vha_paddle.ops.attention_gpu import plain_attention, windowed_attention

# B, S, N, K, H, V
SHAPES = {
    "grouped": (2, 13, 6, 2, 5, 5),
    "one KV head": (1, 10, 4, 1, 3, 3),
    "a KV head each": (2, 9, 3, 3, 4, 4),
    "one head": (1, 8, 1, 1, 2, 2),
    "one position": (3, 1, 4, 2, 6, 6),
    "many heads": (1, 7, 20, 10, 2, 2),
    "narrow values": (2, 11, 4, 2, 5, 3),
    "wide values": (2, 11, 3, 3, 2, 7),
}
# B, T, N, K, H, V
LONG_SHAPES = {
    "grouped": (2, 16, 6, 2, 5, 5),
    "one KV head": (1, 16, 4, 1, 3, 3),
    "a KV head each": (2, 16, 3, 3, 4, 4),
    "narrow values": (2, 16, 4, 2, 5, 3),
}
PIECES = {
    "inner zigzag": [(2, 4), (12, 14)],
    "outer zigzag": [(0, 4), (12, 16)],
    "the zigzag between": [(4, 8), (8, 12)],
    "the end": [(5, 16)],
    "the beginning": [(0, 5)],
    "one position": [(7, 8)],
    "three": [(0, 1), (3, 9), (11, 13)],
}


@pytest.fixture(params=[1 << 26, 0], ids=["kept", "computed again"])
def probabilities(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_KEPT_PROBABILITIES", request.param)


def random_inputs(shape: tuple[int, ...]) -> tuple[Arrays, np.ndarray]:
    B, S, N, K, H, V = shape
    rng = np.random.default_rng(1)
    shapes = {"q_BSNH": (B, S, N, H), "k_BTKH": (B, S, K, H), "v_BTKV": (B, S, K, V)}
    inputs = {name: rng.normal(0, 1.5, size) for name, size in shapes.items()}
    return inputs, rng.normal(size=(B, S, N, V))


def positions_of(pieces: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(*piece) for piece in pieces])


def piece_case(
    shape: tuple[int, ...], pieces: list[tuple[int, int]], **options: Any
) -> tuple[Arrays, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Inputs, dy, y and gradients of the queries in `pieces`: the whole attention, no gradient from the others."""
    inputs, dy = random_inputs(shape)
    own = positions_of(pieces)
    y, cache = oracle.causal_attention(*inputs.values(), **options)
    dy_own = np.zeros_like(dy)
    dy_own[:, own] = dy[:, own]
    dq, dk, dv = oracle.causal_attention_backward(dy_own, cache)
    part = inputs | {"q_BSNH": inputs["q_BSNH"][:, own]}
    return part, dy[:, own], y[:, own], {"q_BSNH": dq[:, own], "k_BTKH": dk, "v_BTKV": dv}


def assert_pieces_equal_the_equations(
    shape: tuple[int, ...],
    pieces: list[tuple[int, int]],
    dtype: str,
    form: attention_gpu.Attention = causal_attention,
    **options: Any,
) -> None:
    inputs, dy, y, gradients = piece_case(shape, pieces, **options)
    assert_gradients(functools.partial(form, pieces=pieces, **options), inputs, y, dy, gradients, dtype)


def assert_equals_the_equations(shape: tuple[int, ...], dtype: str, **options: Any) -> None:
    inputs, dy = random_inputs(shape)
    y, cache = oracle.causal_attention(*inputs.values(), **options)
    gradients = dict(zip(inputs, oracle.causal_attention_backward(dy, cache), strict=True))
    assert_gradients(functools.partial(causal_attention, **options), inputs, y, dy, gradients, dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_and_its_gradients_equal_the_equations(shape: tuple[int, ...], dtype: str, threads: int) -> None:
    assert_equals_the_equations(shape, dtype)


@pytest.mark.parametrize("block_rows", [1, 6, 12, 13], ids=lambda rows: f"{rows} rows")
def test_the_blocks_do_not_show(
    block_rows: int, probabilities: None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", block_rows)
    for shape in SHAPES.values():
        assert_equals_the_equations(shape, "float64")


def test_a_sequence_longer_than_a_block_equals_the_equations(probabilities: None, dtype: str) -> None:
    assert_equals_the_equations((1, 2 * attention._BLOCK_ROWS // 2 + 3, 2, 1, 4, 4), dtype)


@pytest.mark.parametrize("t", [0, 5, 12])
def test_outputs_before_a_changed_token_stay_bit_equal(t: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 12)  # 4 positions
    inputs, _ = random_inputs(SHAPES["grouped"])
    before = [paddle.to_tensor(x.astype(dtype)) for x in inputs.values()]
    after = [x.clone() for x in before]
    for x, factor in zip(after, [1e6, 1e6, 1e30], strict=True):
        x[:, t] *= factor  # so large that the smallest weight on it would show
    y, changed = causal_attention(*before).numpy(), causal_attention(*after).numpy()
    np.testing.assert_array_equal(changed[:, :t], y[:, :t])
    assert (changed[:, t] != y[:, t]).any()


def test_scores_far_apart_stay_exact(dtype: str) -> None:
    q_BSNH = paddle.to_tensor([[[[1e4]], [[1e4]]]], dtype)
    k_BTKH = paddle.to_tensor([[[[1.0]], [[-1.0]]]], dtype)
    v_BTKH = paddle.to_tensor([[[[3.0]], [[5.0]]]], dtype)
    np.testing.assert_array_equal(causal_attention(q_BSNH, k_BTKH, v_BTKH).numpy(), [[[[3.0]], [[3.0]]]])


@pytest.mark.parametrize("pieces", [[(0, 16)], *PIECES.values()], ids=["whole", *PIECES.keys()])
@pytest.mark.parametrize("shape", LONG_SHAPES.values(), ids=LONG_SHAPES.keys())
@pytest.mark.parametrize("window", [None, 1, 3, 15])
def test_the_form_in_paddle_operations_is_the_same_function(
    shape: tuple[int, ...], pieces: list[tuple[int, int]], window: int | None
) -> None:
    assert_pieces_equal_the_equations(shape, pieces, "float64", plain_attention, window=window, scale=0.3)


@pytest.mark.parametrize("pieces", [[(0, 16)], *PIECES.values()], ids=["whole", *PIECES.keys()])
@pytest.mark.parametrize("window", [1, 3, 7, 15])
def test_the_windowed_form_in_paddle_operations_is_the_same_function(
    pieces: list[tuple[int, int]], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_gpu, "_WINDOWED_QUERIES", 4)
    for shape in LONG_SHAPES.values():
        assert_pieces_equal_the_equations(shape, pieces, "float64", windowed_attention, window=window, scale=0.3)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 12, 13, 100])
def test_a_window_and_its_gradients_equal_the_equations(
    window: int, probabilities: None, dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 12)  # windows shorter than a block, as long, longer
    for shape in SHAPES.values():
        assert_equals_the_equations(shape, dtype, window=window)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("window", [1, 2, 5, 9, 15])
def test_pieces_see_through_the_window_what_the_whole_sees(
    pieces: list[tuple[int, int]], window: int, probabilities: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 9)
    for shape in LONG_SHAPES.values():
        assert_pieces_equal_the_equations(shape, pieces, "float64", window=window, scale=0.3)


@pytest.mark.parametrize("window", [40, 128, 300])
def test_a_window_in_a_sequence_of_many_blocks_equals_the_equations(window: int, dtype: str) -> None:
    assert_equals_the_equations((1, 3 * attention._BLOCK_ROWS // 2 + 3, 2, 1, 4, 4), dtype, window=window)


def test_keys_outside_the_window_are_not_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 4 queries and a window of 3 needs 6 keys, wherever it stands: the work is in proportion."""
    keys = []

    def counted(q_RH: paddle.Tensor, k_TH: paddle.Tensor, block: attention._Block, *rest: Any, **out: Any) -> None:
        keys.append(out["out"].shape[1])
        probabilities(q_RH, k_TH, block, *rest, **out)

    probabilities = attention._probabilities
    monkeypatch.setattr(attention, "_probabilities", counted)
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 8)
    x = paddle.randn([1, 20, 2, 3])
    causal_attention(x, x[:, :, :1], x[:, :, :1], window=3)
    assert keys == [4, 6, 6, 6, 6]


def test_a_window_of_the_whole_sequence_gives_the_bits_of_none() -> None:
    inputs = [paddle.to_tensor(x) for x in random_inputs(LONG_SHAPES["grouped"])[0].values()]
    np.testing.assert_array_equal(causal_attention(*inputs, window=16).numpy(), causal_attention(*inputs).numpy())


def test_keys_and_values_before_the_window_count_for_nothing(probabilities: None, dtype: str) -> None:
    inputs, dy, _, _ = piece_case(LONG_SHAPES["grouped"], PIECES["one position"])
    outputs = []
    for beyond in [0.0, np.nan]:
        tensors = [paddle.to_tensor(x.astype(dtype)) for x in inputs.values()]
        for x in tensors[1:]:
            x[:, :5] = beyond
        for x in tensors:
            x.stop_gradient = False
        y_BSNV = causal_attention(*tensors, PIECES["one position"], window=3)
        y_BSNV.backward(paddle.to_tensor(dy.astype(dtype)))
        for x in tensors[1:]:
            np.testing.assert_array_equal(x.grad.numpy()[:, :5], 0)
            assert (x.grad.numpy()[:, 5:8] != 0).all()
        outputs.append(y_BSNV.numpy())
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_the_query_itself_is_refused(window: int) -> None:
    x = paddle.zeros([1, 4, 2, 2])
    with pytest.raises(ValueError, match=f"window {window} must be at least 1"):
        causal_attention(x, x, x, window=window)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_scale_is_the_callers(scale: float, probabilities: None, dtype: str) -> None:
    for shape in SHAPES.values():
        assert_equals_the_equations(shape, dtype, scale=scale)


def test_heads_that_do_not_divide_are_refused() -> None:
    q_BSNH, k_BTKH = paddle.zeros([1, 3, 4, 2]), paddle.zeros([1, 3, 3, 2])
    with pytest.raises(ValueError, match="do not fit"):
        causal_attention(q_BSNH, k_BTKH, k_BTKH)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("shape", LONG_SHAPES.values(), ids=LONG_SHAPES.keys())
def test_pieces_and_their_gradients_equal_the_equations(
    shape: tuple[int, ...], pieces: list[tuple[int, int]], dtype: str, threads: int
) -> None:
    assert_pieces_equal_the_equations(shape, pieces, dtype)


@pytest.mark.parametrize("block_rows", [1, 6, 9], ids=lambda rows: f"{rows} rows")
def test_the_blocks_of_a_piece_do_not_show(
    block_rows: int, probabilities: None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_ROWS", block_rows)
    for shape in LONG_SHAPES.values():
        for pieces in PIECES.values():
            assert_pieces_equal_the_equations(shape, pieces, "float64")


def test_pieces_longer_than_a_block_equal_the_equations(probabilities: None, dtype: str) -> None:
    step = attention._BLOCK_ROWS // 2
    assert_pieces_equal_the_equations((1, 4 * step, 2, 1, 4, 4), [(5, step + 8), (2 * step + 1, 4 * step - 9)], dtype)


@pytest.mark.parametrize("shape", LONG_SHAPES.values(), ids=LONG_SHAPES.keys())
def test_the_pieces_of_two_ranks_make_up_the_whole(shape: tuple[int, ...], dtype: str) -> None:
    inputs, dy = random_inputs(shape)

    def run(pieces: list[tuple[int, int]] | None, own: np.ndarray) -> list[np.ndarray]:
        part = inputs | {"q_BSNH": inputs["q_BSNH"][:, own]}
        tensors = [paddle.to_tensor(x.astype(dtype), stop_gradient=False) for x in part.values()]
        y_BSNH = causal_attention(*tensors, pieces=pieces)
        y_BSNH.backward(paddle.to_tensor(dy[:, own].astype(dtype)))
        return [y_BSNH.numpy(), *(x.grad.numpy() for x in tensors)]

    ranks = [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]
    back = np.argsort(np.concatenate([positions_of(pieces) for pieces in ranks]))
    whole = run(None, np.arange(16))
    first, second = (run(pieces, positions_of(pieces)) for pieces in ranks)
    for i, name in enumerate(["output", "gradient of q"]):
        joined = np.concatenate([first[i], second[i]], axis=1)[:, back]
        assert_close(joined, whole[i], TOLERANCES[dtype], name)
    for i, name in enumerate(["gradient of k", "gradient of v"], start=2):
        assert_close(first[i] + second[i], whole[i], TOLERANCES[dtype], name)


@pytest.mark.parametrize(
    "form", [causal_attention, functools.partial(plain_attention, window=None, scale=0.4)], ids=["blocks", "Paddle"]
)
def test_keys_and_values_after_the_last_query_count_for_nothing(form: attention_gpu.Attention, dtype: str) -> None:
    inputs, dy, _, _ = piece_case(LONG_SHAPES["grouped"], PIECES["inner zigzag"])
    outputs = []
    for beyond in [0.0, np.nan]:
        tensors = [paddle.to_tensor(x.astype(dtype)) for x in inputs.values()]
        for x in tensors[1:]:
            x[:, 14:] = beyond
        for x in tensors:
            x.stop_gradient = False
        y_BSNH = form(*tensors, pieces=PIECES["inner zigzag"])
        y_BSNH.backward(paddle.to_tensor(dy.astype(dtype)))
        for x in tensors[1:]:
            np.testing.assert_array_equal(x.grad.numpy()[:, 14:], 0)
            assert (x.grad.numpy()[:, :14] != 0).all()
        outputs.append(y_BSNH.numpy())
    np.testing.assert_array_equal(*outputs)


def test_one_piece_of_all_positions_gives_the_bits_of_the_whole(dtype: str) -> None:
    inputs = [paddle.to_tensor(x.astype(dtype)) for x in random_inputs(LONG_SHAPES["grouped"])[0].values()]
    np.testing.assert_array_equal(causal_attention(*inputs, [(0, 16)]).numpy(), causal_attention(*inputs).numpy())


BAD_PIECES = {
    "none": ([], "ascend"),
    "empty": ([(2, 2), (4, 8)], "ascend"),
    "backwards": ([(6, 2), (8, 16)], "ascend"),
    "descending": ([(12, 14), (2, 4)], "ascend"),
    "overlapping": ([(2, 4), (3, 5)], "ascend"),
    "before the first position": ([(-2, 2)], "ascend"),
    "too few": ([(2, 4), (12, 13)], "4 queries"),
    "too many": ([(2, 4), (12, 16)], "4 queries"),
    "after the last key": ([(2, 4), (15, 17)], "16 keys"),
    "not given": (None, "16 keys"),
}


@pytest.mark.parametrize(("pieces", "message"), BAD_PIECES.values(), ids=BAD_PIECES.keys())
def test_pieces_that_do_not_fit_are_refused(pieces: list[tuple[int, int]] | None, message: str) -> None:
    q_BSNH, k_BTKH = paddle.zeros([1, 4, 4, 2]), paddle.zeros([1, 16, 2, 2])
    with pytest.raises(ValueError, match=message):
        causal_attention(q_BSNH, k_BTKH, k_BTKH, pieces)


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        *(([2, 16, 2, 3], wrong) for wrong in ([1], [2], [1, 2])),
        *(([1, 15, 2, 3], wrong) for wrong in ([1], [2], [1, 2])),
        *(([1, 16, 1, 3], wrong) for wrong in ([1], [2])),
        *(([1, 16, 2, 4], wrong) for wrong in ([1], [1, 2])),  # values may have another width
    ],
)
def test_keys_or_values_of_another_shape_are_refused(shape: list[int], wrong: list[int]) -> None:
    tensors = [paddle.zeros([1, 16, 4, 3]), paddle.zeros([1, 16, 2, 3]), paddle.zeros([1, 16, 2, 3])]
    for i in wrong:
        tensors[i] = paddle.zeros(shape)
    with pytest.raises(ValueError, match="do not fit"):
        causal_attention(*tensors)


def flash_kernel(last_query_at_last_key: bool, scale_of_gradient: float = 1.0) -> attention_gpu.Attention:
    """What stands for the GPU's kernel: queries end at the last key, or begin at the first; one width, its scale."""

    def kernel(q_BSNH: paddle.Tensor, k_BTKH: paddle.Tensor, v_BTKH: paddle.Tensor) -> paddle.Tensor:
        S, T, H = q_BSNH.shape[1], *k_BTKH.shape[1::2]
        assert v_BTKH.shape == k_BTKH.shape and q_BSNH.shape[3] == H
        start = T - S if last_query_at_last_key else 0
        y_BSNH = plain_attention(q_BSNH, k_BTKH, v_BTKH, [(start, start + S)], None, H**-0.5)
        return scale_of_gradient * y_BSNH + (1 - scale_of_gradient) * y_BSNH.detach()

    return kernel


@pytest.fixture
def unchecked() -> Iterator[None]:
    attention_gpu._require_mask_at_last_key.cache_clear()
    yield
    attention_gpu._require_mask_at_last_key.cache_clear()


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_a_kernel_whose_mask_ends_at_the_last_key_computes_the_pieces(
    pieces: list[tuple[int, int]], unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_gpu, "_flash", flash_kernel(True))
    for shape in [*LONG_SHAPES.values(), (2, 16, 3, 3, 2, 7)]:
        for scale in (shape[4] ** -0.5, 0.3):
            assert_pieces_equal_the_equations(shape, pieces, "float64", attention_gpu.flash_attention, scale=scale)


@pytest.mark.parametrize(
    "kernel",
    [flash_kernel(False), flash_kernel(True, 0.5), flash_kernel(True, math.nan)],
    ids=["mask at the first key", "wrong gradients", "not a number"],
)
def test_a_kernel_that_cannot_compute_a_part_is_refused_with_the_remedy(
    kernel: attention_gpu.Attention, unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_gpu, "_flash", kernel)
    tensors = [paddle.to_tensor(x) for x in piece_case(LONG_SHAPES["grouped"], [(2, 16)])[0].values()]
    with paddle.no_grad(), pytest.raises(RunError, match="set parallel.context=1"):
        attention_gpu.flash_attention(*tensors, [(2, 16)], 0.4)


def test_a_kernel_is_checked_once(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*tensors: paddle.Tensor) -> paddle.Tensor:
        calls.append(tensors[1].shape[1])
        return flash_kernel(True)(*tensors)

    monkeypatch.setattr(attention_gpu, "_flash", counted)
    tensors = [paddle.to_tensor(x) for x in piece_case(LONG_SHAPES["grouped"], [(0, 4), (12, 16)])[0].values()]
    for _ in range(2):
        attention_gpu.flash_attention(*tensors, [(0, 4), (12, 16)], 0.4)
    assert calls == [4, attention_gpu._CHECKED_KEYS, 16, 4, 16]


@pytest.mark.parametrize(
    ("dtype", "widths", "is_flash"),
    [
        ("bfloat16", (256, 256), True),
        ("bfloat16", (264, 128), False),
        ("bfloat16", (128, 264), False),
        ("float32", (128, 128), False),
    ],
)
def test_the_kernel_gets_what_it_masks(
    dtype: str, widths: tuple[int, int], is_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paddle hands heads wider than 256 to a kernel without a causal mask, and says nothing."""
    chosen = []
    monkeypatch.setattr(attention_gpu, "flash_attention", lambda *_: chosen.append("flash"))
    monkeypatch.setattr(attention_gpu, "plain_attention", lambda *_: chosen.append("plain"))
    q_BSNH, v_BTKV = (paddle.zeros([1, 4, 2, width], dtype) for width in widths)
    attention_gpu.attention_on_gpu(q_BSNH, q_BSNH, v_BTKV, [(0, 4)], None, 1.0)
    assert chosen == ["flash" if is_flash else "plain"]


@pytest.mark.parametrize(
    ("dtype", "window", "form", "options"),
    [
        ("bfloat16", 3, "windowed_attention", (3, 0.3, None)),
        ("float32", 3, "windowed_attention", (3, 0.3, None)),
        ("float32", None, "plain_attention", (None, 0.3, None)),
        ("bfloat16", None, "flash_attention", (0.3,)),
    ],
)
def test_window_and_scale_reach_the_form_for_a_gpu(
    dtype: str, window: int | None, form: str, options: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {}
    for name in ("windowed_attention", "plain_attention", "flash_attention"):
        monkeypatch.setattr(attention_gpu, name, lambda *arguments, name=name: given.update({name: arguments[4:]}))
    x_BSNH = paddle.zeros([1, 4, 2, 8], dtype)
    attention_gpu.attention_on_gpu(x_BSNH, x_BSNH, x_BSNH, [(0, 4)], window, 0.3)
    assert given == {form: options}
