"""One optimizer step: what it reports, how far it moves, and what it leaves alone when a number is not finite."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import CASES, MICRO_BATCH, batches
from tests.tolerances import FLOAT64_FOLD
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import StepResult, accumulate_gradients, train_step

CASE = CASES[0]


def build() -> Decoder:
    return build_decoder(CASE.recipe().model, Mesh(), seed=0, dtype="float64")


def train(model: Decoder, learning_rate: float = 1e-3, max_grad_norm: float = 1.0) -> StepResult:
    optimizer = Optimizer(model.parameters(), CASE.recipe(), Mesh())
    tokens_BS, labels_BS = next(batches(CASE))
    return train_step(model, optimizer, tokens_BS, labels_BS, 0, MICRO_BATCH, learning_rate, max_grad_norm, Mesh())


def test_a_step_reports_its_loss_and_the_norm_before_clipping() -> None:
    twin = build()
    loss = accumulate_gradients(twin, *next(batches(CASE)), 0, MICRO_BATCH, Mesh())
    norm = np.sqrt(sum(np.square(parameter.grad.numpy()).sum() for parameter in twin.parameters()))
    result = train(build(), max_grad_norm=norm / 10)
    assert result.loss == pytest.approx(loss, rel=FLOAT64_FOLD)
    assert result.grad_norm == pytest.approx(norm, rel=FLOAT64_FOLD)


@pytest.mark.parametrize("rate", [1e-3, 3e-5])
def test_a_step_is_as_long_as_the_learning_rate_it_is_given(rate: float) -> None:
    model = build()
    train(model, learning_rate=rate)
    moved = np.abs(model.norm.weight.numpy() - 1)  # gains start at 1, do not decay; Adam's first step is +-rate
    assert moved.max() == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_weights_as_they_were(what: str) -> None:
    model = build()
    if what == "loss":
        model.norm.weight.set_value(model.norm.weight.detach() * float("inf"))
    else:
        (model.norm.weight * float("inf")).sum().backward()
    before = {name: parameter.numpy() for name, parameter in model.named_tensors().items()}
    result = train(model)
    assert result.skipped is not None and "not finite" in result.skipped
    for name, parameter in model.named_tensors().items():
        assert np.array_equal(parameter.numpy(), before[name]), name
        assert parameter.grad is None
