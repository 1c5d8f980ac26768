"""What is read: every container, the best copy of a tensor, forms of experts, parts that have no effect."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.sources.containers.fixtures import BFLOAT16, write_flex_folder
from tests.sources.upstream.conftest import Open
from tests.sources.upstream.models import CORE, MODELS, config, options, weights
from tests.sources.upstream.oracle import Array, Upstream
from tests.sources.upstream.written import FORMS, flex_with_masters, write_config
from vha_paddle.errors import UserError
from vha_paddle.sources.base import Source
from vha_paddle.sources.upstream import open_upstream

DENSE, MIXTURE = MODELS["core"], MODELS["core_mixture"]


def values(source: Source) -> dict[str, Array]:
    return {name: source.weights.read(name) for name in source.weights.specs}


def assert_same(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["core_untied", "fork", "core_mixture"])
def test_every_container_gives_the_same_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    model = MODELS[name]
    target = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float32)
    tensors = {each: tensor.astype(target) for each, tensor in weights(model).items()}
    described = write_config(tmp_path, config(model))
    sources = {
        form: open_upstream(write(tmp_path / form, tensors), described, **options(model))
        for form, write in FORMS.items()
    }
    first = values(sources["flex"])
    for source in sources.values():
        assert_same(values(source), first)
        assert source.model == sources["flex"].model
        for each, spec in source.weights.specs.items():
            assert (spec.shape, spec.dtype) == (first[each].shape, first[each].dtype)


@pytest.mark.parametrize("name", ["core_untied", "fork", "core_mixture"])
def test_master_weights_are_taken_in_place_of_what_was_rounded_from_them(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(model).items()}
    described = write_config(tmp_path, config(model))
    exact = open_upstream(FORMS["flex"](tmp_path / "exact", tensors), described, **options(model))
    source = open_upstream(flex_with_masters(tmp_path / "masters", tensors), described, **options(model))
    assert_same(values(source), values(exact))
    assert source.weights.left_out["model.norm.weight"] == "rounded from model.norm.weight.w_0"
    assert set(source.weights.left_out) == {f"model.{each}" for each in tensors}
    assert source.provenance["masters"] and source.provenance["step"] == 30
    assert all((source.path / file).is_file() for file in source.files)
    assert {file.split("/")[0] for file in source.files} == {"model_state", "master_weight"}


@pytest.mark.parametrize("path", [".", "..", "checkpoint-30", "checkpoint-30/model_state"])
def test_a_relative_path_reads_weights_and_masters(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(DENSE).items()}
    step = flex_with_masters(tmp_path, tensors)
    write_config(step, config(DENSE))
    monkeypatch.chdir({".": step, "..": step / "model_state"}.get(path, tmp_path))
    source = open_upstream(Path(path))
    assert source.provenance["masters"] and source.provenance["step"] == 30
    assert {file.split("/")[0] for file in source.files} == {"model_state", "master_weight"}
    assert all((source.path / file).is_file() for file in source.files)
    assert_same(values(source), values(open_upstream(step)))


def test_a_configuration_may_be_named_by_its_folder(tmp_path: Path) -> None:
    path = flex_with_masters(tmp_path / "checkpoint", weights(DENSE))
    described = write_config(tmp_path, config(DENSE))
    assert open_upstream(path, tmp_path).model == open_upstream(path, described).model
    write_config(path, config(DENSE))
    (line,) = open_upstream(path, tmp_path).warnings
    assert line == f"{path / 'config.json'} was not read, {described} was given in its place"
    assert not open_upstream(path, path).warnings


def write_with_masters(folder: Path, masters: dict[str, Array], weights_of_them: dict[str, Array]) -> Source:
    """A dense checkpoint of the core, its two folders of one id."""
    step = folder / "checkpoint-30"
    write_flex_folder(step / "model_state", {f"model.{name}": tensor for name, tensor in weights_of_them.items()})
    write_flex_folder(step / "master_weight", {f"model.{name}.w_0": tensor for name, tensor in masters.items()})
    return open_upstream(step, write_config(folder, config(DENSE)))


def test_masters_of_another_save_are_refused_when_they_are_read(tmp_path: Path) -> None:
    """Ids and shapes agree, and so do all tensors but one value of one."""
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(DENSE).items()}
    rounded = {each: tensor.astype(BFLOAT16) for each, tensor in tensors.items()}
    theirs = "layers.1.mlp.down_proj.weight"
    rounded[theirs][3, 5] += rounded[theirs].dtype.type(2.0**-5) * np.abs(rounded[theirs][3, 5])
    source = write_with_masters(tmp_path, tensors, rounded)
    for name in source.weights.specs:
        if name != f"model.{theirs}":
            source.weights.read(name)
    with pytest.raises(UserError, match=r"down_proj.weight.w_0 is not what model_state/ has of it: 1 of .* up to "):
        source.weights.read(f"model.{theirs}")


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)])
def test_weights_that_were_cut_off_pass_as_those_that_were_rounded_do(dtype: np.dtype, tmp_path: Path) -> None:
    """Paddle's CPU code has made bfloat16 of the upper half of a float32."""
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(DENSE).items()}
    step = np.float32(ml_dtypes.finfo(dtype).eps) / 2
    cut_off = {each: (tensor * (1 - step)).astype(dtype) for each, tensor in tensors.items()}
    source = write_with_masters(tmp_path, tensors, cut_off)
    assert values(source).keys() == source.weights.specs.keys()


def test_a_tensor_without_a_master_is_taken_as_it_is(tmp_path: Path) -> None:
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(DENSE).items()}
    path = flex_with_masters(tmp_path, tensors | {"lm_head.weight": tensors["embedding.embed_tokens.weight"]})
    source = open_upstream(path, write_config(tmp_path, config(DENSE)))
    assert "output projection" in source.weights.left_out["model.lm_head.weight"]
    assert source.weights.specs["model.embed_tokens.weight"].dtype == np.float32


@pytest.mark.parametrize("name", ["lm_head.weight", "shared_head.weight"])
def test_a_tied_head_is_left_out(name: str, open_changed: Open) -> None:
    source = open_changed(DENSE, {name: weights(DENSE)["embedding.embed_tokens.weight"]})
    assert source.weights.left_out == {name: "the embedding, which is the output projection too"}


def test_a_master_is_not_rounded_to_be_told_from_the_head(tmp_path: Path) -> None:
    """The head has no master, so the two are compared as the model ran with them."""
    tensors = {each: tensor.astype(np.float32) for each, tensor in weights(DENSE).items()}
    head = tensors["embedding.embed_tokens.weight"].copy()
    path = flex_with_masters(tmp_path, tensors | {"shared_head.weight": head})
    assert "model.shared_head.weight" in open_upstream(path, write_config(tmp_path, config(DENSE))).weights.left_out


def test_empty_layers_before_the_first_are_counted_out(open_changed: Open) -> None:
    shifted: dict[str, Array | None] = {}
    for name, tensor in weights(DENSE).items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            shifted |= {name: None} if number == "0" else {}
            shifted[f"layers.{int(number) + 3}.{rest}"] = tensor
    shifted |= {name: None for name in weights(DENSE) if name.startswith(("layers.0.", "layers.1.", "layers.2."))}
    source = open_changed(DENSE, shifted, {"num_empty_layers_add_in_head": 3})
    expected = weights(DENSE)["layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(source.weights.read("model.layers.1.self_attn.o_proj.weight"), expected)


def test_layers_of_multi_token_prediction_are_left_out(open_changed: Open) -> None:
    names = ("eh_proj.weight", "enorm.weight", "transformer_layer.self_attn.q_proj.weight")
    source = open_changed(DENSE, {f"layers.2.{name}": np.ones((3, 3)) for name in names})
    assert set(source.weights.left_out) == {f"layers.2.{name}" for name in names}


def test_a_sink_of_minus_infinity_adds_nothing(open_changed: Open) -> None:
    sinks = {f"layers.{layer}.self_attn.core_attention.softmax_offset": np.full(6, -math.inf) for layer in (0, 1)}
    source = open_changed(DENSE, sinks, {"softmax_type": "learnable"})
    assert set(source.weights.left_out) == set(sinks)


def test_a_selection_bias_of_zero_and_factors_of_one_change_nothing(open_changed: Open) -> None:
    extra = {"layers.0.mlp.gate.e_score_correction_bias": np.zeros(4)}
    extra |= {"layers.1.mlp.gate.routed_scaling_factor_param": np.ones(4)}
    assert set(open_changed(MIXTURE, extra).weights.left_out) == set(extra)


def grouped(tensors: dict[str, Array]) -> dict[str, Array | None]:
    """Experts below one another."""
    changed: dict[str, Array | None] = {name: None for name in tensors if ".mlp.experts." in name}
    for layer in (0, 1):
        for part, new in (("up_gate_proj", "weight1"), ("down_proj", "weight2")):
            parts = [tensors[f"layers.{layer}.mlp.experts.{expert}.{part}.weight"] for expert in range(4)]
            changed[f"layers.{layer}.mlp.grouped_gemm_experts.{new}"] = np.concatenate(parts)
    return changed


def sonic(tensors: dict[str, Array]) -> dict[str, Array | None]:
    return {name: np.ascontiguousarray(tensor.T) for name, tensor in tensors.items() if ".mlp.experts." in name}


@pytest.mark.parametrize("intermediate", [10, 12, 24])  # 12: the fused weight is square; 24: the other one
@pytest.mark.parametrize("form", [grouped, sonic])
def test_forms_of_experts_hold_the_same_ones(
    form: object, intermediate: int, open_changed: Open, tmp_path: Path
) -> None:
    model = replace(MIXTURE, intermediate=intermediate)
    plain = values(open_changed(model))
    assert_same(values(open_changed(model, form(weights(model)))), plain)  # type: ignore[operator]


def test_a_router_may_be_stored_either_way(open_changed: Open) -> None:
    plain = values(open_changed(MIXTURE))
    turned = {
        f"layers.{layer}.mlp.gate.weight": weights(MIXTURE)[f"layers.{layer}.mlp.gate.weight"].T for layer in (0, 1)
    }
    assert_same(values(open_changed(MIXTURE, {name: np.ascontiguousarray(t) for name, t in turned.items()})), plain)


def test_a_bias_that_the_checkpoint_lacks_is_zero(open_changed: Open) -> None:
    source = open_changed(MODELS["core_biases"])
    name = "model.layers.0.self_attn.o_proj.bias"
    assert source.weights.specs[name].stored == ()
    np.testing.assert_array_equal(source.weights.read(name), np.zeros(24))


def test_windows_become_a_section(open_changed: Open) -> None:
    sliding = open_changed(MODELS["core_windows"]).model.sliding_window
    assert sliding is not None and (sliding.window, sliding.full_every) == (3, 3)
    assert sliding.attention is not None and sliding.attention.num_attention_heads == 6
    alike = open_changed(MODELS["core_windows_alike"]).model.sliding_window
    assert alike is not None and alike.attention is None


@pytest.mark.parametrize("frequency", [3, [1, 1, 0, 1, 1, 0]])
def test_shapes_tell_from_where_layers_are_counted(frequency: object, open_changed: Open) -> None:
    source = open_changed(MODELS["core_windows"], values={"window_attn_skip_freq": frequency})
    assert source.model.sliding_window is not None and source.model.sliding_window.full_every == 3


def test_layer_types_say_which_layers_slide(open_changed: Open) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    source = open_changed(
        MODELS["core_windows_alike"], values={"window_attn_skip_freq": "absent", "layer_types": types}
    )
    assert source.model.sliding_window is not None


def test_what_was_assumed_is_said(open_changed: Open, tmp_path: Path) -> None:
    said = "\n".join(open_changed(MODELS["fork"], values={"rms_norm_eps": 1e-6, "never_heard_of": 1}).warnings)
    for part in ("rms_norm_eps=1e-06", "1e-05", "--norm-order=premix-norm", "never_heard_of"):
        assert part in said
    quiet = open_changed(MODELS["fork"], values={"rms_norm_eps": 1e-5}).warnings
    assert not any("rms_norm_eps" in line for line in quiet)
    assert open_changed(DENSE).warnings == ()
    assert "0.612" in open_changed(MODELS["core_biases"]).warnings[0]


def test_a_given_configuration_is_read_and_not_the_one_that_lies_there(open_changed: Open, tmp_path: Path) -> None:
    open_changed(DENSE)
    given = write_config(tmp_path / "other", config(DENSE) | {"rms_norm_eps": 0.5})
    source = open_upstream(tmp_path, given)
    assert source.model.rms_norm_eps == 0.5
    assert "config.json was not read" in source.warnings[0]


def test_a_tokenizer_beside_the_tensors_is_found(tmp_path: Path) -> None:
    path = FORMS["flex"](tmp_path, weights(DENSE))
    described = write_config(tmp_path, config(DENSE))
    assert open_upstream(path, described).tokenizer is None
    (path / "tokenizer.json").write_text("{}")
    assert open_upstream(path, described).tokenizer == path


def test_narrow_queries_have_a_premix_of_their_shape(open_changed: Open) -> None:
    attention = open_changed(MODELS["core_narrow_queries"]).model.attention
    assert (attention.physical_head_dim, attention.head_dim) == (4, 6)


def test_heads_of_one_group_count_the_same_either_way(open_changed: Open) -> None:
    assert open_changed(MODELS["core_one_group"]).model.attention.num_physical_heads == 3


def test_a_core_checkpoint_takes_a_flag_that_says_what_its_code_does(open_changed: Open) -> None:
    gated = Upstream(form="core", attention=(replace(CORE, gate="after"),) * 2)
    source = open_changed(gated, norm_order="premix-norm", gate_order="postmix-gate")
    assert source.model.attention.output_gate == "after_postmix"
