"""FLOPs counted from a recipe, against the matrix products that the running program makes.

Sequences are short, so attention computes one block of queries on all keys: the scores that are counted without
`causal`. Left out are Postmix in weight space, which is counted as in activation space, and windows, whose masked
scores a block this small computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from tests.cases import CASES, HIDDEN, Case
from vha_paddle import counts
from vha_paddle.config import VirtualHeadAttention
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh

BATCH, SEQUENCE = 2, 8


def is_counted(case: Case) -> bool:
    model = case.recipe().model
    in_weights = [one for one in model.attentions if isinstance(one, VirtualHeadAttention)]
    if any(one.postmix_space == "weight" for one in in_weights) or model.sliding_window is not None:
        return False
    all_compute = model.experts is None or model.experts.capacity_factor is None
    return all_compute and case.fp8 == "none" and case.layers == 2


COUNTED = [case for case in CASES if is_counted(case)]


def recording(found: list[int]) -> Callable[..., paddle.Tensor]:
    """`paddle.matmul` that appends its FLOPs: a list, since threads share the work."""
    matmul = paddle.matmul

    def record(x: paddle.Tensor, y: paddle.Tensor, transpose_x: bool = False, transpose_y: bool = False, **out: Any):
        result = matmul(x, y, transpose_x, transpose_y, **out)
        inner = x.shape[-2] if transpose_x else x.shape[-1]
        found.append(2 * inner * math.prod(result.shape))
        return result

    return record


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_a_forward_pass_makes_the_products_that_are_counted(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.recipe().model
    decoder = build_decoder(model, Mesh(), seed=1)
    decoder.eval()
    tokens_BS = paddle.to_tensor(np.random.default_rng(2).integers(0, model.vocab_size, (BATCH, SEQUENCE)))
    found: list[int] = []
    monkeypatch.setattr(paddle, "matmul", recording(found))
    with paddle.no_grad():
        decoder(tokens_BS)
    rule = counts.FlopRule(sequence_length=SEQUENCE)
    assert sum(found) == BATCH * SEQUENCE * counts.forward_flops(model, rule)


def test_every_kind_and_experts_are_counted() -> None:
    models = [case.recipe().model for case in COUNTED]
    assert {model.attention.kind for model in models} == {"grouped", "vha", "mla", "mfa", "gva", "dcmha"}
    assert any(model.experts is not None and model.experts.shared_expert_intermediate_size for model in models)
    assert all(model.hidden_size == HIDDEN for model in models)
