"""Gradients of bfloat16 parameters: float32 sums from the microbatches to AdamW.

On a CPU Paddle has casts of bfloat16 and little else, so the toys here cast their weights, and AdamW's kernel is
replaced: what it is handed is tested, not what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle import nn

from tests.cases import CASES
from tests.distributed.launch import run_ranks
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.gradients import clip_by_global_norm
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.main_gradients import accumulate_in_float32, gradient_of, set_gradient
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.scope import Scope
from vha_paddle.parallel.sharding import Sharding
from vha_paddle.train.optimizer import Optimizer

MICROBATCHES, SIZE = 64, 200


class Toy(nn.Layer):
    """Weights w1, w2 of a linear function of what they are multiplied with."""

    def __init__(self, dtype: str, mesh: Mesh | None = None) -> None:
        super().__init__()
        scope = Scope(mesh or Mesh(), dtype, 3, "toy")
        whole = Placement.replicated((SIZE,), partial_gradient=False)
        for name in ("w1", "w2"):
            setattr(self, name, scope.parameter(self, name, whole, Normal(1.0), "matrix"))

    def forward_backward(self, gradient_1: np.ndarray, gradient_2: np.ndarray) -> None:
        pairs = ((self.w1, gradient_1), (self.w2, gradient_2))
        sum((w.astype("float32") * paddle.to_tensor(g)).sum() for w, g in pairs).backward()


def gradients() -> np.ndarray:
    """One large microbatch and many small ones, which a bfloat16 sum would forget."""
    values = np.random.default_rng(0).uniform(0.5, 1, (MICROBATCHES, 2, SIZE)).astype(np.float32)
    values[0] *= 512
    return values


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def after_backward(dtype: str) -> tuple[Toy, np.ndarray]:
    """A toy with the gradients of all microbatches, and their sum."""
    toy, values = Toy(dtype), gradients()
    accumulate_in_float32(toy.parameters())
    for pair in values:
        toy.forward_backward(*pair)
    return toy, (rounded(values) if dtype == "bfloat16" else values).astype(np.float64).sum(axis=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_microbatches_are_added_in_float32(dtype: str) -> None:
    toy, expected = after_backward(dtype)
    for parameter, total in zip((toy.w1, toy.w2), expected, strict=True):
        gradient = gradient_of(parameter)
        assert gradient.dtype == paddle.float32
        assert np.abs(gradient.numpy() - total).max() < 1e-3  # a bfloat16 sum is off by 16 and more
        assert (parameter.grad is None) == (dtype == "bfloat16")  # else the next microbatch would be added to it too


def test_the_norm_and_clipping_are_of_the_float32_sums() -> None:
    toy, expected = after_backward("bfloat16")
    norm = np.sqrt(np.square(expected).sum())
    assert clip_by_global_norm(toy.parameters(), norm / 2, Mesh()).total == pytest.approx(norm, rel=1e-6)
    for parameter, total in zip((toy.w1, toy.w2), expected, strict=True):
        assert np.allclose(gradient_of(parameter).numpy(), total / 2, rtol=1e-6)


def test_adamw_gets_the_float32_sums_the_master_weights_and_an_empty_slate_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy, expected = after_backward("bfloat16")
    recipe = CASES[0].recipe()
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "bfloat16"})})
    optimizer = Optimizer(toy.parameters(), recipe, Mesh())
    handed: dict[str, Sequence[Any]] = {}

    def adamw(parameter: paddle.Tensor, gradient: paddle.Tensor, *others: Any) -> list[None]:
        handed[parameter.name] = (gradient.dtype, gradient.numpy(), others[6])
        return [None] * 7

    monkeypatch.setattr(paddle._C_ops, "adamw_", adamw)
    optimizer.step(1e-3)
    masters = optimizer.slots()["master"]
    for parameter, total in zip((toy.w1, toy.w2), expected, strict=True):
        dtype, gradient, master = handed[parameter.name]
        assert dtype == paddle.float32 and np.allclose(gradient, total, rtol=1e-6)
        assert master is masters[parameter.name] and master.dtype == paddle.float32
        assert gradient_of(parameter) is None and parameter.grad is None


def test_a_parameter_without_a_gradient_has_none() -> None:
    toy = Toy("bfloat16")
    accumulate_in_float32(toy.parameters())
    assert gradient_of(toy.w1) is None
    set_gradient(toy.w1, paddle.ones([SIZE]))
    assert gradient_of(toy.w1) is not None and gradient_of(toy.w2) is None


@pytest.mark.parametrize("stage", [1, 2])
def test_every_parameter_of_a_model_takes_part(stage: int) -> None:
    """Experts stay at stage 1."""
    case = next(case for case in CASES if case.name == "moe_vha_tied")
    mesh = Mesh(sharding_degree=2, sharding_stage=stage)
    with paddle.LazyGuard():  # no kernel initialises bfloat16 here
        model = build_decoder(case.recipe().model, mesh, seed=0, dtype="bfloat16")
    assert all(parameter.main_grad is None for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["data", "sharding_stage_1", "sharding_stage_2"])
def test_ranks_add_in_float32(layout: str) -> None:
    run_ranks(Path(__file__).with_name("main_gradients_worker.py"), 2, [layout])


def test_hooks_of_sharding_add_in_float32_at_stage_1() -> None:
    toy = Toy("bfloat16")
    Sharding(toy, [], Mesh())
    for pair in gradients():
        toy.forward_backward(*pair)
    assert np.abs(gradient_of(toy.w1).numpy() - rounded(gradients())[:, 0].sum(axis=0)).max() < 1e-2
