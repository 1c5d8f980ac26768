from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from tests.ops.conftest import assert_gradients
from vha_paddle.ops import grouped_linear as module
from vha_paddle.ops.grouped_linear import grouped_linear
from vha_paddle.ops.linear import Products, matmul, matmul_with_transpose, transposed_matmul

SAME = Products(matmul, matmul_with_transpose, transposed_matmul)  # as PLAIN, but one expert at a time


@pytest.mark.parametrize("form", ["by rows", "one by one", "batched"])
@pytest.mark.parametrize(
    "counts", [[3, 1, 4], [0, 7, 0], [0, 0, 1], [5], [0, 0]], ids=lambda counts: "-".join(map(str, counts))
)
def test_every_row_meets_its_experts_matrix_and_so_do_the_gradients(
    counts: list[int], form: str, dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "batched":  # what a GPU takes
        monkeypatch.setattr(module, "_PLAIN", module._BATCHED)
    rng = np.random.default_rng(1)
    rows, experts = sum(counts), np.repeat(np.arange(len(counts)), counts)
    x, weight, dy = rng.normal(size=(rows, 5)), rng.normal(size=(len(counts), 5, 7)), rng.normal(size=(rows, 7))
    dweight = np.zeros_like(weight)
    for row, expert in enumerate(experts):
        dweight[expert] += np.outer(x[row], dy[row])
    own = weight[experts]
    expected = {"x_RD": np.einsum("rf,rdf->rd", dy, own), "weight_EDF": dweight}
    products = (SAME,) if form == "one by one" else ()
    assert_gradients(
        lambda x_RD, weight_EDF: grouped_linear(x_RD, weight_EDF, counts, *products),
        {"x_RD": x, "weight_EDF": weight},
        np.einsum("rd,rdf->rf", x, own),
        dy,
        expected,
        dtype,
    )


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_the_product_of_an_unwanted_gradient_is_not_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": paddle.ones([3, 4]), "weight": paddle.ones([2, 4, 2])}
    for name, tensor in inputs.items():
        tensor.stop_gradient = name == frozen
    unwanted = {"x": "input_gradient", "weight": "weight_gradient"}[frozen]
    monkeypatch.setattr(module, "_PLAIN", replace(module._PLAIN, **{unwanted: None}))
    grouped_linear(inputs["x"], inputs["weight"], [1, 2]).sum().backward()
    assert inputs[frozen].grad is None
    assert all(tensor.grad is not None for name, tensor in inputs.items() if name != frozen)


def test_one_operation_serves_all_experts() -> None:
    """A node of the graph per expert would cost more than its product."""
    x, weight = paddle.ones([64, 4]), paddle.ones([64, 4, 2])
    weight.stop_gradient = x.stop_gradient = False
    y = grouped_linear(x, weight, [1] * 64)
    assert "GroupedLinear" in y.grad_fn.name()
    assert all("GradNodeAccumulation" in node.name() for node in y.grad_fn.next_functions if node is not None)


def test_rows_of_one_expert_are_shared_out_as_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[int, int]] = []
    monkeypatch.setattr(
        module, "for_each_share", lambda count, work: [shares.append((i, i + 5)) or work(i, i + 5) for i in (0, 5)]
    )
    x, weight = paddle.rand([10, 10]), paddle.rand([3, 10, 2])
    for counts in ([10, 0, 0], [2, 4, 4]):
        whole = [expert for expert, count in enumerate(counts) for _ in range(count)]
        y = grouped_linear(x, weight, counts)
        expected = np.einsum("rd,rdf->rf", x.numpy(), weight.numpy()[whole])
        assert np.allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert shares == [(0, 5), (5, 10)] * 2


@pytest.mark.parametrize(("rows", "counts"), [(3, [1, 1]), (2, [2]), (2, [1, 1, 0])])
def test_counts_that_do_not_fit_are_refused(rows: int, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear(paddle.zeros([rows, 4]), paddle.zeros([2, 4, 5]), counts)
