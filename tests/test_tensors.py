"""The table of parameters against the models that are built: names, order, logical shapes, and what a rank holds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import paddle
import pytest

from tests.cases import CASES, Case
from vha_paddle.model.decoder import build_decoder
from vha_paddle.names import VHA_MAPS
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.placement import Placement, info_of
from vha_paddle.tensors import Held, embedding_tensor, end_tensors, group_of, layer_tensors, model_tensors

DEGREES = {1: "one", 2: "tensor_2", 4: "tensor_4"}


@pytest.fixture(autouse=True)
def without_fleets_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """fleet's layers ask for a generator and a strategy that its start makes; no values are drawn, nothing is run."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.layers.mpu.random import RNGStatesTracker

    monkeypatch.setattr(fleet.fleet, "_user_defined_strategy", fleet.DistributedStrategy(), raising=False)
    monkeypatch.setattr(RNGStatesTracker, "rng_state", lambda self: contextlib.nullcontext())


def mesh_of(degree: int, rank: int) -> Mesh:
    """One tensor rank, alone in its process: a model can be built on it, not run."""
    group = SimpleNamespace(nranks=degree, rank=rank, id=0)
    return Mesh(rank, degree, rank, degree, group) if degree > 1 else Mesh()


def held(placement: Placement) -> Held:
    if placement.axis is not None:
        return "split"
    return "partial" if placement.partial_gradient else "stream"


@pytest.mark.parametrize(
    ("case", "degree"),
    [(case, degree) for case in CASES for degree, layout in DEGREES.items() if case.fits(layout)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_table_is_what_is_built(case: Case, degree: int) -> None:
    model = case.recipe(DEGREES[degree]).model
    layers = [spec for layer in range(model.num_hidden_layers) for spec in layer_tensors(model, layer, degree)]
    expected = [embedding_tensor(model), *layers, *end_tensors(model)]
    for rank in {0, degree - 1}:
        with paddle.LazyGuard():
            built = build_decoder(model, mesh_of(degree, rank), seed=0).parameters()
        placements = [info_of(parameter).placement for parameter in built]
        assert [info_of(parameter).name for parameter in built] == [spec.name for spec in expected]
        assert [placement.shape for placement in placements] == [spec.shape for spec in expected]
        assert [held(placement) for placement in placements] == [spec.held for spec in expected]
        assert [parameter.size for parameter in built] == [spec.local_size(degree) for spec in expected]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matrices_decay_gains_and_biases_do_not_and_maps_as_the_recipe_says(case: Case) -> None:
    with paddle.LazyGuard():
        built = build_decoder(case.recipe().model, Mesh(), seed=0).parameters()
    for parameter in built:
        info = info_of(parameter)
        short = info.name.rpartition(".")[2]
        of_vector = "bias" if short == "bias" else "gain"
        expected = of_vector if parameter.ndim == 1 else short.partition("_")[0] if short in VHA_MAPS else "matrix"
        assert info.decay == expected, info.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tensors_of_a_model_have_names_of_their_own_and_those_of_one_process(case: Case) -> None:
    model = case.recipe().model
    layers = [spec for layer in range(model.num_hidden_layers) for spec in layer_tensors(model, layer)]
    assert model_tensors(model) == [embedding_tensor(model), *layers, *end_tensors(model)]
    assert len({spec.name for spec in model_tensors(model)}) == len(model_tensors(model))


@pytest.mark.parametrize(
    ("group", "names"),
    {
        "embedding": ("model.embed_tokens.weight",),
        "attention": tuple(
            f"model.layers.3.self_attn.{part}"
            for part in ("q_proj.weight", "q_proj.bias", "g_proj.weight", "kv_b_proj.weight", "key_map", "pre_compose")
        ),
        "premix": ("model.layers.0.self_attn.premix",),
        "postmix": ("model.layers.0.self_attn.postmix_a", "model.layers.11.self_attn.postmix_b"),
        "feed_forward": ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.shared_expert.down_proj.weight"),
        "router": ("model.layers.0.mlp.gate.weight",),
        "experts": ("model.layers.0.mlp.experts.gate_proj", "model.layers.0.mlp.experts.down_proj"),
        "norms": (
            "model.norm.weight",
            *(f"model.layers.1.{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")),
            *(f"model.layers.1.self_attn.{part}.weight" for part in ("q_norm", "k_norm", "kv_a_layernorm")),
        ),
        "head": ("lm_head.weight",),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_parameter_belongs_to_the_group_of_its_kind(group: str, names: tuple[str, ...]) -> None:
    assert [group_of(name) for name in names] == [group] * len(names)
