"""Clipping in one process. Sums over ranks are compared with one process in tests/distributed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.cases import CASES
from tests.tolerances import FLOAT64_FOLD
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.gradients import clip_by_global_norm
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import info_of
from vha_paddle.tensors import group_of


@pytest.fixture
def parameters() -> list[paddle.Tensor]:
    """The parameters of a decoder, each with a random gradient."""
    model = build_decoder(CASES[0].recipe().model, Mesh(), seed=0, dtype="float64")
    generator = np.random.default_rng(0)
    for parameter in model.parameters():
        (parameter * paddle.to_tensor(generator.standard_normal(parameter.shape))).sum().backward()
    return model.parameters()


def norm_of(parameters: list[paddle.Tensor]) -> float:
    return float(np.sqrt(sum(np.square(parameter.grad.numpy()).sum() for parameter in parameters)))


def test_clipped_gradients_have_the_maximal_norm(parameters: list[paddle.Tensor]) -> None:
    before = norm_of(parameters)
    assert before > 0.01
    assert clip_by_global_norm(parameters, 0.01, Mesh()).total == pytest.approx(before, rel=FLOAT64_FOLD)
    assert norm_of(parameters) == pytest.approx(0.01, rel=FLOAT64_FOLD)


def test_gradients_within_the_norm_are_left_bit_equal(parameters: list[paddle.Tensor]) -> None:
    before = [parameter.grad.numpy() for parameter in parameters]
    clip_by_global_norm(parameters, 2 * norm_of(parameters), Mesh())
    for parameter, gradient in zip(parameters, before, strict=True):
        assert np.array_equal(parameter.grad.numpy(), gradient)


def test_norms_by_group_are_those_of_its_parameters(parameters: list[paddle.Tensor]) -> None:
    by_group: dict[str, list[paddle.Tensor]] = {}
    for parameter in parameters:
        by_group.setdefault(group_of(info_of(parameter).name), []).append(parameter)
    expected = {group: norm_of(members) for group, members in by_group.items()}
    norms = clip_by_global_norm(parameters, 0.01, Mesh())
    assert set(norms.by_group) == {"embedding", "attention", "premix", "postmix", "feed_forward", "norms"}
    assert norms.by_group == pytest.approx(expected, rel=FLOAT64_FOLD)
    assert norms.total == pytest.approx(np.sqrt(sum(norm**2 for norm in expected.values())), rel=FLOAT64_FOLD)
