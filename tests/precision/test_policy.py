"""Which parameters a model uses rounded. Where it does, rounding them beforehand changes nothing; else, something."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import paddle
import pytest

from tests.cases import CASES, MICRO_BATCH, Case, batches, starting_weights
from tests.oracles.fp8 import quantized
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.init import Constant
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import Placement
from vha_paddle.parallel.scope import OneHeadLinear, Scope

PROJECTIONS = re.compile(
    r"self_attn\.((q|k|v|g|o|q_a|q_b|kv_b|k_rope)_proj|kv_a_proj_with_mqa)\.weight$"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj\.weight$"
)
EXPERTS = re.compile(r"mlp\.experts\.(gate|up|down)_proj$")
MODELS = [case for case in CASES if case.dropout == 0 and case.recompute == "none" and case.layers == 2]
BY_NAME = {case.name: case for case in CASES}


def build(case: Case, fp8: Literal["none", "experts", "all"]) -> Decoder:
    model = build_decoder(case.recipe().model, Mesh(), seed=0, dtype="float64", fp8=fp8)
    start = starting_weights(case)
    for name, parameter in model.named_tensors().items():
        parameter.set_value(start[name])
    return model


def losses(case: Case, model: Decoder) -> np.ndarray:
    tokens_BS, labels_BS = next(batches(case))
    return model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, MICRO_BATCH, Mesh()))


def rounded(weight: np.ndarray) -> np.ndarray:
    matrices = weight.reshape(-1, *weight.shape[-2:]) if weight.ndim > 1 else weight[None, None]
    return np.stack([quantized(matrix, "blocks") for matrix in matrices]).reshape(weight.shape)


def used_rounded(case: Case, fp8: Literal["none", "experts", "all"]) -> set[str]:
    """Names of the parameters whose rounding leaves every bit of the loss as it is."""
    model = build(case, fp8)
    before, found = losses(case, model), set()
    for name, parameter in model.named_tensors().items():
        weight = parameter.numpy()
        parameter.set_value(rounded(weight))
        if np.array_equal(losses(case, model), before):
            found.add(name)
        parameter.set_value(weight)
    return found


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_all_projections_and_nothing_else_are_used_rounded(case: Case) -> None:
    expected = {name for name in starting_weights(case) if PROJECTIONS.search(name) or EXPERTS.search(name)}
    if case.attention.get("postmix_space") == "weight":
        expected = {name for name in expected if "o_proj" not in name}  # it is mixed before it is rounded
    assert used_rounded(case, "all") == expected and expected


def test_experts_alone_can_be_rounded() -> None:
    mixtures = [case for case in MODELS if case.recipe().model.experts is not None]
    assert mixtures
    for case in mixtures:
        expected = {name for name in starting_weights(case) if EXPERTS.search(name)}
        assert used_rounded(case, "experts") == expected and expected


def test_without_fp8_nothing_is_rounded() -> None:
    assert not used_rounded(BY_NAME["vha_2_groups_tied"], "none")


def mixed(model: Decoder, layer: int) -> np.ndarray:
    """W_O'[n] = sum_m M[m, n] W_O[m] with M = I + B A^T: what is served in W_O's place."""
    attention = model.layers[layer].self_attn
    a, b = attention.postmix_a.numpy(), attention.postmix_b.numpy()
    weight = attention.o_proj.weight.numpy()
    by_head = weight.reshape(len(a), -1)
    return ((np.eye(len(a)) + b @ a.T).T @ by_head).reshape(weight.shape)


def test_postmix_in_weight_space_trains_with_the_rounding_of_what_is_served() -> None:
    """Rounding the folded W_O, with no Postmix left, gives the loss of training. In activation space it does not."""
    case = BY_NAME["vha_weight_space"]
    served = build(case, "all")
    for layer in range(len(served.layers)):
        attention = served.layers[layer].self_attn
        attention.o_proj.weight.set_value(quantized(mixed(served, layer), "blocks"))
        attention.postmix_b.set_value(paddle.zeros_like(attention.postmix_b))
    trained = losses(case, build(case, "all"))
    assert_close(losses(case, served), trained, FLOAT64, "loss")
    in_activation_space = losses(case, build(BY_NAME["vha_2_groups_tied"], "all"))
    assert np.abs(in_activation_space - trained).max() > 1e-3


@pytest.mark.parametrize("name", ["gqa_2_fewer_kv_heads_than_ranks", "gva_fewer_value_heads_than_ranks"])
def test_a_part_of_a_projection_is_rounded_as_the_projection(name: str) -> None:
    """With more tensor ranks than KV heads a rank multiplies with some columns of W_K and W_V only."""
    model = build(BY_NAME[name], "all")
    attention = model.layers[0].self_attn
    whole = attention.v_proj.weight.numpy()
    columns = slice(0, whole.shape[1] // 2)
    x = np.random.default_rng(0).standard_normal((1, 5, len(whole)))
    placement = Placement.replicated(tuple(whole.shape), partial_gradient=True)
    part = OneHeadLinear(Scope.standalone("v_proj"), placement, Constant(0.0), columns)
    part.weight, part.products = attention.v_proj.weight, attention.v_proj.products
    result = part(paddle.to_tensor(x))
    expected = quantized(x[0], "along rows") @ quantized(whole[:, columns], "blocks")
    assert_close(result.numpy()[0], expected, FLOAT64, "values")
