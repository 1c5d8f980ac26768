from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.ops.conftest import TOLERANCES
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.errors import UserError
from vha_paddle.ops.loss import cross_entropy


def equations(logits: np.ndarray, labels: np.ndarray, dloss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log sum exp(x) - x_label, and dloss (softmax - onehot)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    softmax = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
    onehot = np.arange(logits.shape[-1]) == labels[..., None]
    return -np.log((softmax * onehot).sum(axis=-1)), dloss[..., None] * (softmax - onehot)


@pytest.mark.parametrize("label_dtype", ["int32", "int64"])
@pytest.mark.parametrize("V", [1, 11, 3000])
def test_cross_entropy_and_its_gradient_equal_the_equations(V: int, label_dtype: str, dtype: str, threads: int) -> None:
    rng = np.random.default_rng(1)
    logits, labels, dloss = rng.normal(0, 3, (2, 5, V)), rng.integers(0, V, (2, 5)), rng.normal(size=(2, 5))
    loss, dlogits = equations(logits, labels, dloss)
    logits_BSV = paddle.to_tensor(logits.astype(dtype), stop_gradient=False)
    loss_BS = cross_entropy(logits_BSV, paddle.to_tensor(labels.astype(label_dtype)))
    loss_BS.backward(paddle.to_tensor(dloss.astype(dtype)))
    assert_close(loss_BS.numpy(), loss, TOLERANCES[dtype], "loss")
    assert_close(logits_BSV.grad.numpy(), dlogits, TOLERANCES[dtype], "gradient of logits")


def test_many_blocks_of_rows_give_the_same_as_one(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("vha_paddle.ops.backend._BLOCK_BYTES", 5 * 12 * 8)
    rng = np.random.default_rng(2)
    logits, labels, dloss = rng.normal(size=(3, 13, 12)), rng.integers(0, 12, (3, 13)), rng.normal(size=(3, 13))
    loss, dlogits = equations(logits, labels, dloss)
    logits_BSV = paddle.to_tensor(logits, stop_gradient=False)
    loss_BS = cross_entropy(logits_BSV, paddle.to_tensor(labels))
    loss_BS.backward(paddle.to_tensor(dloss))
    assert_close(loss_BS.numpy(), loss, FLOAT64, "loss")
    assert_close(logits_BSV.grad.numpy(), dlogits, FLOAT64, "gradient of logits")


def test_logits_beyond_the_range_of_exp_give_finite_losses(dtype: str) -> None:
    logits_BSV = paddle.to_tensor([[[1e4, 0.0, -1e4]]] * 2, dtype, stop_gradient=False)
    loss_BS = cross_entropy(logits_BSV, paddle.to_tensor([[0], [2]]))
    loss_BS.sum().backward()
    np.testing.assert_array_equal(loss_BS.numpy(), [[0.0], [2e4]])
    np.testing.assert_array_equal(logits_BSV.grad.numpy(), [[[0.0, 0.0, 0.0]], [[1.0, 0.0, -1.0]]])


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(UserError, match=r"must be in \[0, 4\)"):
        cross_entropy(paddle.zeros([1, 2, 4]), paddle.to_tensor([[0, label]]))


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        cross_entropy(paddle.zeros([1, 2, 4]), paddle.to_tensor([[0, 1, 2]]))
