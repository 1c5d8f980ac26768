from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from tests.ops.conftest import TOLERANCES, assert_gradients
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.ops import routing
from vha_paddle.ops.routing import Rows, combine, gather_rows, route, sort_by_expert, within_capacity

T, E, K = 9, 5, 3
LOGITS = np.random.default_rng(0).normal(size=(T, E)) * 2


def chosen(scores: np.ndarray) -> np.ndarray:
    return np.sort(np.argsort(-scores, axis=1)[:, :K], axis=1)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_chosen_have_the_largest_biased_probability_and_weigh_by_the_plain_one(
    normalise: bool, with_bias: bool, dtype: str
) -> None:
    p, bias = softmax(LOGITS), np.linspace(-0.5, 0.5, E) if with_bias else None
    found = route(paddle.to_tensor(LOGITS.astype(dtype)), K, normalise, bias)
    assert np.array_equal(np.sort(found.experts_Tk, axis=1), chosen(p if bias is None else p + bias))
    weights = np.take_along_axis(p, found.experts_Tk, 1)
    if normalise:
        weights = weights / weights.sum(1, keepdims=True)
    assert_close(found.weights_Tk.numpy(), weights, TOLERANCES[dtype], "weights")
    assert_close(found.probability_E, p.sum(0), TOLERANCES[dtype], "probability")
    squares = np.square(np.log(np.exp(LOGITS).sum(1))).sum()
    assert_close(np.array(found.squared_logsumexp), squares, TOLERANCES[dtype], "squares")


@pytest.mark.parametrize("normalise", [True, False])
def test_the_gradient_is_that_of_weights_and_balancing_losses(normalise: bool) -> None:
    rng = np.random.default_rng(1)
    balance, z = rng.normal(size=E), 0.3
    dw_TE = rng.normal(size=(T, E))
    on_TE = np.zeros((T, E))
    np.put_along_axis(on_TE, chosen(softmax(LOGITS)), 1.0, axis=1)

    def total(logits: np.ndarray) -> float:
        """What is differentiated, with the choice held fast."""
        p = softmax(logits)
        w = p * on_TE
        if normalise:
            w = w / w.sum(1, keepdims=True)
        return float((dw_TE * w).sum() + (balance * p).sum() + z * np.square(np.log(np.exp(logits).sum(1))).sum())

    logits = paddle.to_tensor(LOGITS, stop_gradient=False)
    found = route(logits, K, normalise, None, balance, z)
    found.weights_Tk.backward(paddle.to_tensor(np.take_along_axis(dw_TE, found.experts_Tk, 1)))
    step, expected = 1e-6, np.zeros_like(LOGITS)
    for index in np.ndindex(T, E):
        moved = np.zeros_like(LOGITS)
        moved[index] = step
        expected[index] = (total(LOGITS + moved) - total(LOGITS - moved)) / (2 * step)
    assert np.abs(logits.grad.numpy() - expected).max() < 1e-8  # of the finite differences


def test_logits_that_overflow_an_exponential_are_no_trouble() -> None:
    logits = paddle.to_tensor([[1e4, 0.0, -1e4]], stop_gradient=False)
    found = route(logits, 2, True, z=1.0)
    found.weights_Tk.sum().backward()
    assert_close(found.weights_Tk.numpy(), np.array([[1.0, 0.0]]), FLOAT64, "weights")
    assert np.isfinite(logits.grad.numpy()).all() and found.squared_logsumexp == 1e8


def test_an_expert_takes_the_first_of_each_sequence_up_to_its_capacity() -> None:
    experts = np.array([[0, 1], [0, 2], [0, 1], [1, 0], [2, 1], [0, 1]])
    kept = within_capacity(experts, num_sequences=2, num_experts=3, capacity=2)
    assert kept.tolist() == [[True, True], [True, True], [False, True], [True, True], [True, True], [True, False]]
    assert within_capacity(experts, 2, 3, capacity=3).all()


def random_rows(drop: bool) -> tuple[np.ndarray, np.ndarray, Rows, np.ndarray]:
    rng = np.random.default_rng(2)
    experts = np.argsort(rng.random((T, E)), axis=1)[:, :K]
    kept = rng.random((T, K)) < 0.6 if drop else np.ones((T, K), bool)
    rows, counts = sort_by_expert(experts, E, kept if drop else None)
    return experts, kept, rows, counts


@pytest.mark.parametrize("drop", [False, True])
def test_rows_lie_by_expert_then_by_token_and_know_their_copies(drop: bool) -> None:
    experts, kept, rows, counts = random_rows(drop)
    wanted = sorted((experts[t, i], t, i) for t in range(T) for i in range(K) if kept[t, i])
    assert [(experts[t, i], t, i) for t, i in (divmod(copy, K) for copy in rows.copies_R)] == wanted
    assert counts.tolist() == [int((experts[kept] == e).sum()) for e in range(E)]
    assert np.array_equal(rows.rows_Tk >= 0, kept)
    assert np.array_equal(rows.rows_Tk.reshape(-1)[rows.copies_R], np.arange(len(wanted)))


@pytest.fixture(params=["CPU", "GPU"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of each device; that of a GPU is made of Paddle's operations, so it runs here too."""
    monkeypatch.setattr(routing, "on_gpu", lambda x: request.param == "GPU")


@pytest.mark.parametrize("drop", [False, True])
def test_tokens_are_gathered_and_their_gradients_summed(drop: bool, dtype: str, threads: int, form: None) -> None:
    _, _, rows, counts = random_rows(drop)
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(T, 4)), rng.normal(size=(counts.sum(), 4))
    dx = np.zeros_like(x)
    np.add.at(dx, rows.tokens_R, dy)
    assert_gradients(lambda x: gather_rows(x, rows), {"x": x}, x[rows.tokens_R], dy, {"x": dx}, dtype)


@pytest.mark.parametrize("drop", [False, True])
def test_copies_are_weighted_and_summed_and_a_dropped_one_counts_nothing(
    drop: bool, dtype: str, threads: int, form: None
) -> None:
    _, kept, rows, counts = random_rows(drop)
    rng = np.random.default_rng(4)
    x, weights, dy = rng.normal(size=(counts.sum(), 4)), rng.normal(size=(T, K)), rng.normal(size=(T, 4))
    own_R = weights.reshape(-1)[rows.copies_R]
    y, dw = np.zeros((T, 4)), np.zeros(T * K)
    np.add.at(y, rows.tokens_R, own_R[:, None] * x)
    dw[rows.copies_R] = (x * dy[rows.tokens_R]).sum(1)
    expected = {"x": own_R[:, None] * dy[rows.tokens_R], "weights": dw.reshape(T, K)}
    assert not (drop and kept.all())
    assert_gradients(lambda x, weights: combine(x, weights, rows), {"x": x, "weights": weights}, y, dy, expected, dtype)


def test_no_rows_are_gathered_and_brought_back_as_none() -> None:
    rows = Rows.of(np.zeros(0, np.int64), (0, 1))
    x = paddle.zeros([0, 4])
    x.stop_gradient = False
    y = gather_rows(x, rows)
    y.sum().backward()
    assert y.shape == [0, 4] and x.grad.shape == [0, 4] and math.prod(y.shape) == 0
