"""Run one optimizer step of several recipes under one layout and count what every rank communicates and holds.

Run once per rank: `python communication_worker.py RECIPES OUTPUT_DIRECTORY`. RECIPES is a JSON object of recipes by
name, all of one layout; each rank leaves OUTPUT_DIRECTORY/rank<rank>.json.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from vha_paddle.config import Recipe, recipe_from_dict
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.gradients import clip_by_global_norm, complete_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import owned
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import accumulate_gradients

# Method of the process group: the kind in a plan, and which argument is the whole tensor.
METHODS = {
    "all_reduce": ("all-reduce", 0),
    "reduce": ("reduce", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "all_to_all_single": ("all-to-all", 1),
}


class Passes:
    """The most forward passes of a model chunk that wait for their backward pass."""

    def __init__(self) -> None:
        from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallel

        self.waiting = self.most = 0
        forward, backward = PipelineParallel._forward_step, PipelineParallel._backward_step

        def forward_step(schedule: Any, *arguments: Any, **options: Any) -> Any:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            return forward(schedule, *arguments, **options)

        def backward_step(schedule: Any, *arguments: Any, **options: Any) -> Any:
            self.waiting -= 1
            return backward(schedule, *arguments, **options)

        PipelineParallel._forward_step, PipelineParallel._backward_step = forward_step, backward_step

    def take(self) -> int:
        assert self.waiting == 0, f"{self.waiting} forward passes without a backward pass"
        most, self.most = self.most, 0
        return most


class Traffic:
    """Elements and bytes handed to the process groups, by axis and kind."""

    def __init__(self, mesh: Mesh) -> None:
        axes = ("tensor", "pipeline", "context", "sharding", "expert")
        groups = {axis: getattr(mesh, f"{axis}_group") for axis in axes}
        self.axis_of = {group.process_group: axis for axis, group in groups.items() if group is not None}
        if mesh.expert_sharding_group is not None:
            self.axis_of[mesh.expert_sharding_group.process_group] = "sharding"
        for group in mesh.gradient_groups:
            self.axis_of.setdefault(group.process_group, "data")
        self.bytes: Counter[str] = Counter()
        for name, (kind, position) in METHODS.items():
            for method in (name, f"{name}_on_calc_stream"):
                wrapped = self._counting(getattr(core.ProcessGroupGloo, method), kind, position)
                setattr(core.ProcessGroupGloo, method, wrapped)

    def _counting(self, method: Callable, kind: str, position: int) -> Callable:
        @functools.wraps(getattr(method, "func", method))
        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            tensor = arguments[position]
            # single numbers (loss, norm), the shapes that fleet's pipeline announces and how many rows go to each
            # expert are not what a plan counts
            if tensor.dtype == paddle.float32 and tensor.size > 1:
                # the group of a tied embedding is on no axis of its own: its ranks are pipeline stages
                axis = "pipeline" if kind == "send" else self.axis_of.get(group, "pipeline")
                self.bytes[f"{axis} {kind}"] += tensor.size * 4
            return method(group, *arguments, **options)

        return call

    def take(self) -> dict[str, int]:
        counted, self.bytes = dict(self.bytes), Counter()
        return counted


def run(recipe: Recipe, mesh: Mesh, traffic: Traffic, chunks: Passes) -> dict[str, Any]:
    model = build_model(recipe, mesh, "float32")
    parameters = model.parameters()
    optimizer = Optimizer(parameters, recipe, mesh)
    generator = np.random.default_rng(0)
    shape = (recipe.data.global_batch_size, recipe.data.sequence_length)
    tokens_BS, labels_BS = (generator.integers(0, recipe.model.vocab_size, shape) for _ in range(2))
    traffic.take()
    own, size = mesh.own_rows(len(tokens_BS)), recipe.data.micro_batch_size
    accumulate_gradients(model, tokens_BS[own], labels_BS[own], own.start, size, mesh)
    passes = traffic.take()
    complete_gradients(optimizer.parameters, mesh)
    clip_by_global_norm(optimizer.parameters, recipe.optim.max_grad_norm, mesh)
    optimizer.step(recipe.optim.lr)
    return {
        "pipeline_rank": mesh.pipeline_rank,
        "sharding_rank": mesh.sharding_rank,
        "parameters": [[info_of(parameter).name, parameter.size] for parameter in parameters],
        "owned": sum(parameter.size for parameter in owned(parameters, mesh)),
        "chunks_kept": chunks.take(),
        "passes": passes,
        "step": traffic.take(),
    }


def main() -> None:
    values = json.loads(Path(sys.argv[1]).read_text())
    recipes = {name: recipe_from_dict(recipe, source=name) for name, recipe in values.items()}
    first = next(iter(recipes.values()))
    mesh = start_mesh(first.parallel, first.num_ranks)
    traffic, chunks = Traffic(mesh), Passes()
    found = {name: run(recipe, mesh, traffic, chunks) for name, recipe in recipes.items()}
    (Path(sys.argv[2]) / f"rank{mesh.rank}.json").write_text(json.dumps(found))
    mesh.barrier()


if __name__ == "__main__":
    main()
