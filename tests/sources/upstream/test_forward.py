"""The upstream programs' own logits, from the converted tensors: in this package's decoder, and folded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests.sources.upstream import oracle
from tests.sources.upstream.models import GATED_AFTER, MODELS, config, exported, options, weights
from tests.sources.upstream.oracle import Array, Upstream
from tests.sources.upstream.written import merged, write_config
from tests.tolerances import FLOAT64, assert_close
from vha_paddle.config import Model
from vha_paddle.counts import folded
from vha_paddle.fold import fold_state
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sources.base import Source
from vha_paddle.sources.upstream import open_upstream

TOKENS = np.random.default_rng(5).integers(0, 40, (2, 7))

EXPORTED = {name: model for name, model in MODELS.items() if model.form == "core" and not model.shared}


def opened(folder: Path, model: Upstream, tensors: Mapping[str, Array]) -> Source:
    write_config(folder, config(model))
    return open_upstream(merged(folder, tensors), **options(model))


def decoder_logits(model: Model, tensors: Mapping[str, Array]) -> Array:
    """Of this package's decoder, in float64."""
    decoder = build_decoder(model, Mesh(), seed=0, dtype="float64")
    named = decoder.named_tensors()
    assert set(named) == set(tensors)
    for name, parameter in named.items():
        parameter.set_value(tensors[name].astype(np.float64))
    with paddle.no_grad():
        return decoder(paddle.to_tensor(TOKENS)).numpy()


def converted(source: Source) -> dict[str, Array]:
    return {name: source.weights.read(name) for name in source.weights.specs}


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_and_the_folded_one_give_the_logits_of_the_program(name: str, tmp_path: Path) -> None:
    model, tensors = MODELS[name], weights(MODELS[name])
    source = opened(tmp_path, model, tensors)
    expected = oracle.logits(tensors, model, TOKENS)
    found = converted(source)
    assert_close(decoder_logits(source.model, found), expected, FLOAT64, name)
    plain = dict(fold_state(found, source.model, "float64", name))
    assert_close(decoder_logits(folded(source.model), plain), expected, FLOAT64, f"{name}, folded")
    assert not folded(source.model).has_maps


@pytest.mark.parametrize("name", EXPORTED)
def test_an_unfolded_export_gives_the_same_tensors(name: str, tmp_path: Path) -> None:
    model, tensors = EXPORTED[name], weights(EXPORTED[name])
    here = opened(tmp_path / "training", model, tensors)
    values = {key: value for key, value in config(model).items() if "vha" not in key and key != "gated_attention"}
    write_config(tmp_path / "export", values | {"num_empty_layers_add_in_head": 2})  # its layers count from 0
    there = open_upstream(merged(tmp_path / "export", exported(tensors, model)))
    assert there.kind != here.kind
    assert there.model == here.model
    for tensor in here.weights.specs:
        np.testing.assert_array_equal(there.weights.read(tensor), here.weights.read(tensor), tensor)


@pytest.mark.parametrize("form", GATED_AFTER)
def test_a_gate_after_postmix_is_read_and_only_premix_folds(form: str, tmp_path: Path) -> None:
    model, tensors = GATED_AFTER[form], weights(GATED_AFTER[form])
    source = opened(tmp_path, model, tensors)
    assert source.model.attention.output_gate == "after_postmix"
    expected = oracle.logits(tensors, model, TOKENS)
    assert_close(decoder_logits(source.model, converted(source)), expected, FLOAT64, form)
    assert folded(source.model).attention.postmix == "linear"
