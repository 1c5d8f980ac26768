"""The oracle here is the turn of a complex number: plane c of a head is the number x_c + i x_(c + H/2)."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.ops.conftest import TOLERANCES
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.attention.base import RotaryTables
from vha_paddle.ops import rope
from vha_paddle.parallel.mesh import Mesh

THETA = 10_000.0


def complex_rope(x_BSNH: np.ndarray, theta: float, sign: int = 1) -> np.ndarray:
    H = x_BSNH.shape[-1]
    angle_Sh = np.outer(np.arange(x_BSNH.shape[1]), theta ** (-2 * np.arange(H // 2) / H))
    z = (x_BSNH[..., : H // 2] + 1j * x_BSNH[..., H // 2 :]) * np.exp(sign * 1j * angle_Sh)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("shape", [(2, 7, 3, 10), (1, 1, 1, 2), (3, 5, 1, 8)])
def test_rope_turns_complex_numbers_and_its_gradient_turns_them_back(
    shape: tuple[int, ...], dtype: str, threads: int
) -> None:
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=shape), rng.normal(size=shape)
    tables = rope.rope_tables(shape[3], THETA, shape[1], dtype)
    x_BSNH = paddle.to_tensor(x.astype(dtype), stop_gradient=False)
    y_BSNH = rope.apply_rope(x_BSNH, *tables)
    y_BSNH.backward(paddle.to_tensor(dy.astype(dtype)))
    assert_close(y_BSNH.numpy(), complex_rope(x, THETA), TOLERANCES[dtype], "output")
    assert_close(x_BSNH.grad.numpy(), complex_rope(dy, THETA, -1), TOLERANCES[dtype], "gradient")


def test_blocks_of_rows_know_their_positions(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("vha_paddle.ops.backend._BLOCK_BYTES", 3 * 2 * 4 * 8)
    x = np.random.default_rng(2).normal(size=(2, 11, 2, 4))
    y_BSNH = rope.apply_rope(paddle.to_tensor(x), *rope.rope_tables(4, THETA, 11, "float64"))
    assert_close(y_BSNH.numpy(), complex_rope(x, THETA), FLOAT64, "output")


def test_float32_tables_are_the_float64_ones_rounded_once() -> None:
    exact = rope.rope_tables(16, 1_000_000.0, 50_000, "float64")
    rounded = rope.rope_tables(16, 1_000_000.0, 50_000, "float32")
    for table, wanted in zip(rounded, exact, strict=True):
        assert table.dtype == paddle.float32
        np.testing.assert_array_equal(table.numpy(), wanted.numpy().astype(np.float32))


def test_rope_equals_that_of_transformers() -> None:
    import torch
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    x = np.random.default_rng(3).normal(size=(2, 9, 3, 8)).astype(np.float32)
    tables = Qwen3RotaryEmbedding(Qwen3Config(head_dim=8, rope_theta=500_000.0))
    cos, sin = tables(torch.tensor(x), torch.arange(9)[None])
    theirs, _ = apply_rotary_pos_emb(*[torch.tensor(x).transpose(1, 2)] * 2, cos, sin)
    ours = rope.apply_rope(paddle.to_tensor(x), *rope.rope_tables(8, 500_000.0, 9, "float32"))
    assert_close(ours.numpy(), theirs.transpose(1, 2).numpy(), TOLERANCES["float32"], "output")


def test_the_form_in_paddle_operations_is_the_same_function() -> None:
    x = np.random.default_rng(4).normal(size=(2, 5, 3, 6))
    tables = rope.rope_tables(6, THETA, 5, "float64")
    y_BSNH = rope._rotate_with_paddle(paddle.to_tensor(x), *tables)
    assert_close(y_BSNH.numpy(), complex_rope(x, THETA), FLOAT64, "output")


def test_tables_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rope.apply_rope(paddle.zeros([1, 5, 2, 4]), *rope.rope_tables(4, THETA, 6, "float32"))


def test_a_rank_of_a_cut_sequence_has_its_own_rows_whatever_length_came_before() -> None:
    mesh = Mesh(context_rank=1, context_degree=4)
    tables = RotaryTables(6, THETA, "float64", mesh)
    for share in (8, 4, 8):
        positions = mesh.own_positions(4 * share)
        for found, whole in zip(tables.at(share, 6), rope.rope_tables(6, THETA, 4 * share, "float64"), strict=True):
            assert np.array_equal(found.numpy(), whole.numpy()[positions])
