"""What each of two ranks holds at every stage of ZeRO, and what it computes: `sharding_worker.py DIRECTORY`.

Each rank leaves its observations in DIRECTORY/rank<n>.json, by stage and case.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from tests.cases import CASES, MICRO_BATCH, Case, batches
from vha_paddle.config import Parallel
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.gradients import complete_gradients
from vha_paddle.parallel.init import Normal
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import owned
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.scope import Scope
from vha_paddle.parallel.sharding import Sharding
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import accumulate_gradients


def names(parameters: list[paddle.Tensor]) -> list[str]:
    return sorted(info_of(parameter).name for parameter in parameters)


def held(model: nn.Layer) -> list[str]:
    """The parameters that take memory here."""
    return names([parameter for parameter in model.parameters() if parameter._is_initialized()])


def allocated() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return int(paddle.base.core.host_memory_stat_current_value("Allocated", 0))


@contextmanager
def counted_broadcasts() -> Iterator[list[int]]:
    """Sizes of what is broadcast inside."""
    sizes: list[int] = []
    original = dist.broadcast

    def broadcast(tensor: paddle.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(int(tensor.size))
        return original(tensor, *arguments, **options)

    dist.broadcast = broadcast
    try:
        yield sizes
    finally:
        dist.broadcast = original


def watch(model: Decoder, seen: dict[str, Any]) -> None:
    """Record what is held in the first block, after it and in backward, and the most gradients there ever are."""
    block = model.layers[0]
    block.register_forward_pre_hook(lambda *_: seen.update(in_block=held(model)))
    block.register_forward_post_hook(lambda *_: seen.update(after_block=held(model)))
    seen["most_gradients"] = 0

    def count() -> None:
        gradients = sum(parameter.grad is not None for parameter in model.parameters())
        seen["most_gradients"] = max(seen["most_gradients"], gradients)
        seen["at_last_gradient"] = held(model)  # the last is the table's, when every block is done

    for parameter in model.parameters():
        parameter._register_backward_hook(count)


def observe_decoder(case: Case, mesh: Mesh) -> dict[str, Any]:
    recipe = case.recipe("sharding_2")
    before = allocated()
    model = build_decoder(recipe.model, mesh, seed=1)
    seen: dict[str, Any] = {"built": held(model), "built_bytes": allocated() - before}
    seen["owned"] = names(owned(model.parameters(), mesh))
    seen["sizes"] = {info_of(parameter).name: int(parameter.size) for parameter in model.parameters()}
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    watch(model, seen)
    tokens_BS, labels_BS = next(batches(case))
    before = allocated()
    loss = model.loss(paddle.to_tensor(tokens_BS), paddle.to_tensor(labels_BS)).sum()
    seen["forward_bytes"], seen["after_forward"] = allocated() - before, held(model)
    loss.backward()
    model.sharding.finish_backward()
    for parameter in model.parameters():
        parameter.grad = None
    with counted_broadcasts() as sizes:
        own = mesh.own_rows(len(tokens_BS))
        accumulate_gradients(model, tokens_BS[own], labels_BS[own], own.start, MICRO_BATCH, mesh)
        seen["gathered"] = sum(sizes)
    seen["after_backward"] = held(model)
    seen["gradients"] = names([parameter for parameter in model.parameters() if parameter.grad is not None])
    complete_gradients(optimizer.parameters, mesh)
    with counted_broadcasts() as sizes:
        optimizer.step(1e-3)
        seen["sent_by_update"] = sum(sizes)
    seen["after_step"] = held(model)
    seen["gradients_after_step"] = names([p for p in model.parameters() if p.grad is not None])
    with paddle.no_grad():
        losses = model.loss(paddle.to_tensor(tokens_BS), paddle.to_tensor(labels_BS))
    seen["evaluation"], seen["after_evaluation"] = losses.numpy().tolist(), held(model)
    return seen


class Toy(nn.Layer):
    """A layer that is run again in backward, and one that is called twice on branches that meet."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        scope = Scope(mesh, "float64", 3, "toy")
        self.again = scope.child("again").column_linear(4, 4, Normal(1.0))
        self.twice = scope.child("twice").column_linear(4, 4, Normal(1.0))
        self.alone = scope.child("alone").column_linear(4, 4, Normal(1.0))
        self.sharding = Sharding(self, [self.again, self.twice], mesh)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.alone(x)
        x = recompute(self.again, x, preserve_rng_state=False)
        return self.twice(x) * paddle.tanh(self.twice(x.tanh()))


def observe_toy(mesh: Mesh) -> dict[str, Any]:
    paddle.set_default_dtype("float64")
    model = Toy(mesh)
    x = paddle.arange(8, dtype="float64").reshape([2, 4]) / 8 + mesh.rank
    for factor in (1.0, 2.0):  # two microbatches
        (model(x) * factor).sum().backward()
    model.sharding.finish_backward()
    paddle.set_default_dtype("float32")
    gradients = {
        info_of(parameter).name: parameter.grad.numpy().tolist()
        for parameter in model.parameters()
        if parameter.grad is not None
    }
    return {"gradients": gradients, "held": held(model), "owned": names(owned(model.parameters(), mesh))}


def main() -> None:
    mesh = start_mesh(Parallel(sharding=2), 2)
    seen: dict[str, Any] = {}
    for stage in (1, 2, 3):
        staged = replace(mesh, sharding_stage=stage)
        for case in CASES[:2]:  # tied, untied
            seen[f"{stage} {'tied' if case.tied else 'untied'}"] = observe_decoder(case, staged)
        seen[f"{stage} toy"] = observe_toy(staged)
    Path(sys.argv[1], f"rank{mesh.rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
