"""The forms that operations take on a GPU, run on this device: where Paddle has the kernels here, they must agree."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES, GLOBAL_BATCH, MICRO_BATCH, Case, batches, starting_weights
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.model.decoder import build_decoder
from vha_paddle.ops import attention, dropout, grouped_linear, linear, rope, routing, swiglu
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.step import accumulate_gradients

# RMSNorm's form has no kernel here; flash attention is for bfloat16, so attention takes its plain form
OPERATIONS = (attention, dropout, grouped_linear, linear, rope, routing, swiglu)
CHOSEN = ("vha_gate_before_postmix", "moe_", "mla", "hybrid", "dropout")
SOME = [case for case in CASES if case.layers == 2 and any(part in case.name for part in CHOSEN)]


def losses_and_gradients(case: Case) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model = build_decoder(case.recipe().model, Mesh(), seed=5, dtype="float64", memory=case.recipe().memory)
    weights = starting_weights(case)
    for name, parameter in model.named_tensors().items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    tokens_BS, labels_BS = next(batches(case))
    loss = accumulate_gradients(model, tokens_BS, labels_BS, GLOBAL_BATCH, MICRO_BATCH, Mesh(), eod_id=case.eod_id)
    return np.array(loss), {name: parameter.grad.numpy() for name, parameter in model.named_tensors().items()}


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_model_of_gpu_forms_gives_the_loss_and_the_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, gradients = losses_and_gradients(case)
    taken = set()
    for module in OPERATIONS:
        monkeypatch.setattr(module, "on_gpu", lambda x, name=module.__name__: taken.add(name) is None)
    gpu_loss, gpu_gradients = losses_and_gradients(case)
    assert len(taken) >= 4, taken
    assert_close(gpu_loss, loss, FLOAT64, "loss")
    for name, gradient in gradients.items():
        assert_close(gpu_gradients[name], gradient, FLOAT64, name)
