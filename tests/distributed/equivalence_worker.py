"""Train every case for a few steps under one layout and leave losses, gradients and weights as logical tensors.

Run once per rank: `python equivalence_worker.py WORK_DIRECTORY LAYOUT`. The starting weights of each
case lie in WORK_DIRECTORY/<case>.start.safetensors; results go to <case>.<layout>.<dtype>.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle

from tests.cases import CASES, GLOBAL_BATCH, NUM_STEPS, Case, batches
from tests.tensor_files import create_tensors, mapped_tensors
from vha_paddle.checkpoint.load import load_parameters
from vha_paddle.checkpoint.logical import LogicalTensors
from vha_paddle.checkpoint.save import host_array
from vha_paddle.model.decoder import Decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder, build_model
from vha_paddle.parallel import collectives
from vha_paddle.parallel.gradients import clip_by_global_norm, complete_gradients
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import answered_for
from vha_paddle.parallel.placement import info_of
from vha_paddle.parallel.start import start_mesh
from vha_paddle.tensor_file import read_tensors
from vha_paddle.tensors import GROUPS
from vha_paddle.train.optimizer import Optimizer
from vha_paddle.train.step import accumulate_gradients


def run_case(case: Case, directory: Path, layout: str, dtype: str, mesh: Mesh) -> None:
    """Train one case; every rank writes its slices of the first gradient and of the last weights."""
    recipe = case.recipe(layout)
    model = build_model(recipe, mesh, dtype)
    start = read_tensors(directory / f"{case.name}.start.safetensors")
    load_parameters(model.named_tensors(), LogicalTensors(start.path, [start]), mesh)
    optimizer = Optimizer(model.parameters(), recipe, mesh)
    result = directory / f"{case.name}.{layout}.{dtype}.safetensors"
    if mesh.is_main:
        kind = np.dtype(dtype)
        tensors = {
            f"{what}/{name}": (kind, start.array(name).shape) for what in ("gradient", "weight") for name in start
        }
        tensors |= {name: (np.dtype(np.float64), (NUM_STEPS,)) for name in ("losses", "norms")}
        tensors["group_norms"] = (np.dtype(np.float64), (NUM_STEPS, len(GROUPS)))
        tensors["evaluation"] = (np.dtype(np.float64), (1,))
        tensors |= {f"router/{name}": (array.dtype, array.shape) for name, array in router_state(model).items()}
        create_tensors(result, tensors)
    mesh.barrier()
    output = mapped_tensors(result)

    def write(prefix: str, parameter: paddle.Tensor, tensor: paddle.Tensor) -> None:
        info = info_of(parameter)
        target = output[f"{prefix}/{info.name}"]
        info.placement.write_slice(target, host_array(tensor), mesh.seat)

    tokens_BS, labels_BS = next(batches(case))
    own, size = mesh.own_rows(GLOBAL_BATCH), recipe.data.micro_batch_size
    held_out = microbatches_of(tokens_BS[own], labels_BS[own], own.start, size, mesh, case.eod_id)
    evaluation = mesh.sum_over_batch(float(model.sequence_losses(held_out).sum()))
    if mesh.is_main:
        output["evaluation"][...] = evaluation
    mine = answered_for(optimizer.parameters, mesh)
    for step, (tokens_BS, labels_BS) in enumerate(batches(case)):
        first = step * GLOBAL_BATCH + own.start
        loss = accumulate_gradients(model, tokens_BS[own], labels_BS[own], first, size, mesh, eod_id=case.eod_id)
        complete_gradients(optimizer.parameters, mesh)
        if step == 0:
            for parameter in mine:
                write("gradient", parameter, parameter.grad)
        norms = clip_by_global_norm(optimizer.parameters, recipe.optim.max_grad_norm, mesh)
        optimizer.step(recipe.optim.lr)
        if model.balance is not None:
            model.balance.finish_step()
        if mesh.is_main:
            output["losses"][step], output["norms"][step] = loss, norms.total
            output["group_norms"][step] = [norms.by_group.get(group, 0.0) for group in GROUPS]
    for parameter in mine:
        write("weight", parameter, parameter)
    if mesh.is_main:
        for name, array in router_state(model).items():
            output[f"router/{name}"][...] = array


def router_state(model: Decoder | PipelinedDecoder) -> dict[str, np.ndarray]:
    return {} if model.balance is None else model.balance.state()


def main() -> None:
    directory, layout = Path(sys.argv[1]), sys.argv[2]
    cases = [case for case in CASES if case.fits(layout)]
    recipe = cases[0].recipe(layout)
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    collectives._BUCKET_ELEMENTS = 500  # small models, yet several buckets: some of one gradient, some of many
    for case in cases:
        for dtype in case.dtypes:
            run_case(case, directory, layout, dtype, mesh)
    mesh.barrier()


if __name__ == "__main__":
    main()
