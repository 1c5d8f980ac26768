"""What is computed again in backward. That results do not change is tested with every layout."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tests.cases import CASES, GLOBAL_BATCH, batches
from vha_paddle.attention import base
from vha_paddle.config import Memory
from vha_paddle.model import mlp
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.step import accumulate_gradients


@pytest.mark.parametrize("kind", ["vha", "grouped"])
@pytest.mark.parametrize(("recompute", "attention", "swiglu"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)])
def test_runs_of_each_layers_attention_and_mlp(
    kind: str, recompute: str, attention: int, swiglu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.attention["kind"] == kind and case.layers == 2)
    runs: collections.Counter[str] = collections.Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            runs[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(base, "causal_attention", counted("attention", base.causal_attention))
    monkeypatch.setattr(mlp, "swiglu", counted("swiglu", mlp.swiglu))
    model = build_decoder(case.recipe().model, Mesh(), seed=0, memory=Memory(recompute=recompute))
    accumulate_gradients(model, *next(batches(case)), 0, GLOBAL_BATCH, Mesh())
    assert runs == {"attention": 2 * attention, "swiglu": 2 * swiglu}
