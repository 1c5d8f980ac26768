"""Ranks on tensor 2 x data 2 agree; then one rank of one replica changes one value: `python agreement_worker.py`."""

from __future__ import annotations

import paddle
import pytest

from tests.cases import CASES
from vha_paddle.errors import RunError
from vha_paddle.model.pipelined import build_model
from vha_paddle.parallel.agreement import check_agreement
from vha_paddle.parallel.start import start_mesh

LAYOUT = "tensor_2_data_2"


def main() -> None:
    recipe = CASES[0].recipe(LAYOUT)
    mesh = start_mesh(recipe.parallel, recipe.num_ranks)
    model = build_model(recipe, mesh, "float32")
    check_agreement(model.parameters(), mesh)
    tensors = model.named_tensors()
    # a part that only the same tensor rank of the other replica holds, and a whole one that all four hold, changed
    # alike on the second tensor rank of both
    for name, culprits in (
        ("model.layers.1.self_attn.o_proj.weight", {3}),
        ("model.layers.0.self_attn.premix", {1, 3}),
    ):
        kept = tensors[name].clone()
        if mesh.rank in culprits:
            with paddle.no_grad():
                tensors[name].add_(paddle.full_like(tensors[name], 1e-7))
        with pytest.raises(RunError, match=f"parameter {name} differs between ranks"):
            check_agreement(model.parameters(), mesh)
        paddle.assign(kept, tensors[name])
    check_agreement(model.parameters(), mesh)
    mesh.barrier()


if __name__ == "__main__":
    main()
