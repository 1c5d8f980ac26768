"""What is refused, each with its reason in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sources.upstream import oracle
from tests.sources.upstream.conftest import Open
from tests.sources.upstream.models import CORE, FORK, GATED_AFTER, MODELS, NORM_FIRST, config, weights
from tests.sources.upstream.oracle import Array, Upstream
from tests.sources.upstream.written import merged, write_config
from tests.tolerances import FLOAT64
from vha_paddle.errors import UserError
from vha_paddle.sources.upstream import open_upstream
from vha_paddle.sources.wrong_fold import NUM_TOKENS, SEED, fold_despite_gate

DENSE, FORKED, MIXTURE = MODELS["core"], MODELS["fork"], MODELS["core_mixture"]
FIRST = "layers.0.self_attn."


def ones(*shape: int) -> Array:
    return np.ones(shape)


def refused(open_changed: Open, *arguments: Any, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        open_changed(*arguments, **more)
    line = str(error.value)
    assert "\n" not in line
    return line


# name: model, tensors, configuration, what is stated, parts of the line
CASES: dict[str, tuple[Upstream, Mapping[str, Array | None], Mapping[str, Any], Mapping[str, Any], str]] = {
    # tensors that no layer of this package has
    "learned sink": (DENSE, {FIRST + "core_attention.softmax_offset": ones(6)}, {}, {}, "softmax_offset .*sink"),
    "sink of which one head is finite": (
        DENSE,
        {FIRST + "core_attention.softmax_offset": np.array([-math.inf] * 5 + [0.0])},
        {},
        {},
        "softmax_offset .*sink",
    ),
    "shared K = V": (DENSE, {FIRST + "shared_kv_proj.weight": ones(24, 12)}, {}, {}, "shared_kv_proj.*vha_shared_kv"),
    "norm over all heads": (
        DENSE,
        {FIRST + "q_norm.weight": ones(36), FIRST + "k_norm.weight": ones(12)},
        {},
        {},
        "q_norm.weight .*per_layer",
    ),
    "premix alpha": (FORKED, {FIRST + "vha_premix_alpha": ones(2)}, {}, {}, "vha_premix_alpha.*early generation"),
    "latent attention": (DENSE, {FIRST + "kv_b_proj.weight": ones(4, 4)}, {}, {}, "kv_b_proj.*latent attention"),
    "sparse attention": (DENSE, {FIRST + "sparse_vha_postmix_U": ones(4, 4)}, {}, {}, "sparse attention"),
    "gate bias": (GATED_AFTER["core"], {FIRST + "gate_proj.bias": ones(36)}, {}, {}, "gate_proj.bias .*gate"),
    "MLP bias": (DENSE, {"layers.1.mlp.down_proj.bias": ones(24)}, {}, {}, "mlp.down_proj.bias.*biases"),
    "output bias alone": (DENSE, {FIRST + "o_proj.bias": ones(24)}, {}, {}, "o_proj.bias stands without"),
    "unknown tensor": (DENSE, {"layers.0.mlp.adapter.weight": ones(2)}, {}, {}, "mlp.adapter.weight: no tensor"),
    "unknown tensor outside": (DENSE, {"lm_head.bias": ones(40)}, {}, {}, "lm_head.bias: no tensor"),
    "selection bias": (
        MIXTURE,
        {"layers.0.mlp.gate.e_score_correction_bias": np.arange(4.0)},
        {},
        {},
        "e_score_correction_bias: a selection bias",
    ),
    "factor per expert": (
        MIXTURE,
        {"layers.1.mlp.gate.routed_scaling_factor_param": 2 * ones(4)},
        {},
        {},
        "routed_scaling_factor_param: a factor",
    ),
    "latent experts": (MIXTURE, {"layers.0.mlp.fc1_latent_proj.weight": ones(24, 8)}, {}, {}, "fc1_latent_proj"),
    # tensors that contradict each other
    "half a Postmix": (DENSE, {FIRST + "vha_postmix_V": None}, {}, {}, "vha_postmix_U stands without"),
    "half a norm": (DENSE, {FIRST + "k_norm.weight": None}, {}, {}, "q_norm.weight stands alone"),
    "no Premix in one layer": (DENSE, {FIRST + "vha_premix_weight": None}, {}, {}, "vha_premix_weight"),
    "no maps in one layer": (
        FORKED,
        {FIRST + name: None for name in ("vha_premix_weight", "vha_postmix_U", "vha_postmix_V")},
        {},
        {},
        "layers.0.self_attn has neither",
    ),
    "no maps at all": (
        DENSE,
        {name: None for name in weights(DENSE) if "vha" in name},
        {},
        {},
        "no VHA checkpoint, and there is nothing to fold",
    ),
    "maps of P rows": (
        FORKED,
        {FIRST + f"vha_postmix_{name}": ones(4, 3) for name in "UV"},
        {},
        {},
        r"vha_postmix_U has shape \[4, 3\], not \[8, 3\]",
    ),
    "a Premix that is not square": (FORKED, {FIRST + "vha_premix_weight": ones(2, 5, 6)}, {}, {}, "5 x 6.*square"),
    "narrow values": (DENSE, {FIRST + "v_proj.weight": ones(24, 8)}, {}, {}, "v_proj.weight .*v_head_dim"),
    "fused gate of physical heads": (
        FORKED,
        {FIRST + "qkv_proj.weight": ones(24, 72)},
        {},
        {},
        "a gate of 4 heads, where attention has 8",
    ),
    "fused weight of another width": (FORKED, {FIRST + "qkv_proj.weight": ones(24, 54)}, {}, {}, "has 54 columns"),
    "output projection of physical heads": (
        DENSE,
        {FIRST + "o_proj.weight": ones(18, 24)},
        {},
        {},
        r"o_proj.weight has shape \[18, 24\], not \[36, 24\]",
    ),
    "layer missing": (
        replace(DENSE, attention=(CORE,) * 3),
        {name: None for name in weights(replace(DENSE, attention=(CORE,) * 3)) if ".1." in name},
        {},
        {},
        "layer 1 is missing",
    ),
    "empty layers not said": (
        DENSE,
        {name: None for name in weights(DENSE) if "layers.0." in name},
        {"num_hidden_layers": 1},
        {},
        "num_empty_layers_add_in_head=null.*begin with number 1",
    ),
    "empty layers that are not there": (DENSE, {}, {"num_empty_layers_add_in_head": 2}, {}, "begin with number 0"),
    "integers": (DENSE, {FIRST + "q_norm.weight": np.ones(6, np.int64)}, {}, {}, "holds int64.*floating point"),
    "dense layer in a mixture": (
        MIXTURE,
        {name: None for name in weights(MIXTURE) if "layers.0.mlp." in name}
        | {"layers.0.mlp.up_gate_proj.weight": ones(24, 20), "layers.0.mlp.down_proj.weight": ones(10, 24)},
        {},
        {},
        "layer 1 has 4 experts.*layer 0 an MLP.*first_k_dense_replace",
    ),
    "expert missing": (
        MIXTURE,
        {name: None for name in weights(MIXTURE) if "layers.0.mlp.experts.2." in name},
        {},
        {},
        "experts are numbered",
    ),
    "experts of two widths": (
        MIXTURE,
        {"layers.0.mlp.experts.1.down_proj.weight": ones(8, 24)},
        {},
        {},
        r"experts.1.down_proj.weight has shape \[8, 24\]",
    ),
    # tied and untied
    "tied, another head": (DENSE, {"lm_head.weight": ones(40, 24)}, {}, {}, "tie_word_embeddings=true.*is not"),
    "tied, another shared head": (DENSE, {"shared_head.weight": ones(40, 24)}, {}, {}, "shared_head.weight is not"),
    "untied, no head": (DENSE, {}, {"tie_word_embeddings": False}, {}, "no output projection"),
    "untied, shared head": (
        DENSE,
        {"shared_head.weight": ones(40, 24)},
        {"tie_word_embeddings": False},
        {},
        "shared_head",
    ),
    # what the configuration must say
    **{
        f"{key} absent": (model, {}, {key: "absent"}, {}, f"{key} is missing")
        for model, keys in (
            (DENSE, ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings")),
            (MODELS["fork_no_premix"], ("num_key_value_heads",)),
            (MIXTURE, ("scoring_func", "norm_topk_prob", "num_experts_per_tok")),
            (MODELS["core_windows"], ("add_swa_attention_sink_bias",)),
        )
        for key in keys
    },
    "eps under another name": (
        FORKED,
        {},
        {"rms_norm_eps": "absent", "layernorm_epsilon": 1e-6},
        {},
        "rms_norm_eps is missing",
    ),
    "eps that is no number": (DENSE, {}, {"rms_norm_eps": "1e-6"}, {}, "rms_norm_eps=.*number above 0"),
    "eps beyond all floats": (DENSE, {}, {"rms_norm_eps": 10**400}, {}, "rms_norm_eps=.*number above 0"),
    "length beyond all tensors": (DENSE, {}, {"max_position_embeddings": 2**63}, {}, "max_position_.*below 2.63"),
    "window beyond all tensors": (MODELS["core_windows"], {}, {"sliding_window": 2**63 + 3}, {}, "sliding_window="),
    "flag that is no flag": (DENSE, {}, {"tie_word_embeddings": "yes"}, {}, "must be true or false"),
    # N and P
    "core with the physical heads": (DENSE, {}, {"num_attention_heads": 3}, {}, "count the virtual ones, 6"),
    "fork with the virtual heads": (FORKED, {}, {"num_attention_heads": 8}, {}, "count the physical ones, 4"),
    # a configuration of another model
    **{
        f"another {key}, {name}": (MODELS[name], {}, {key: value}, {}, f"{key}=.*belongs to another model")
        for name, pairs in (
            (
                "core",
                {
                    "num_attention_heads": 5,
                    "num_key_value_heads": 3,
                    "head_dim": 8,
                    "v_head_dim": 4,
                    "vha_postmix_rank": 1,
                    "vha_q_lora_rank": 4,
                    "vocab_size": 41,
                    "hidden_size": 32,
                    "num_hidden_layers": 3,
                    "intermediate_size": 21,
                    "use_qk_norm": False,
                    "gated_attention": True,
                    "attention_bias": True,
                    "use_bias": True,
                    "qk_norm_eps": 1e-6,
                    "n_routed_experts": 8,
                },
            ),
            ("fork", {"vha_enable_premix": False, "vha_enable_postmix": False}),
            ("core_mixture", {"n_routed_experts": 5, "moe_intermediate_size": 11, "n_shared_experts": 1}),
            ("core_windows", {"swa_num_attention_heads": 9, "swa_head_dim": 6, "swa_rope_theta": 1e4}),
        )
        for key, value in pairs.items()
    },
    # models that this package does not compute
    **{
        f"{key}={value}": (model, {}, {key: value}, {}, f"{key}=")
        for model, pairs in (
            (
                DENSE,
                {
                    "rotary_interleaved": True,
                    "rotary_percent": 0.5,
                    "partial_rotary_factor": 0.25,
                    "rope_scaling": {"factor": 4.0},
                    "rope_parameters": {"rope_type": "yarn"},
                    "rotary_dim": 4,
                    "qk_norm_type": "per_layer",
                    "qk_l2_norm": True,
                    "vha_shared_kv": True,
                    "use_vha_attention": False,
                    "multi_latent_attention": True,
                    "softmax_type": "off-by-one",
                    "softmax_scale": 0.1,
                    "hidden_act": "gelu",
                    "normalization": "LayerNorm",
                    "layernorm_zero_centered_gamma": True,
                    "attention_value_scale": -1.0,
                },
            ),
            (FORKED, {"attn_type": "gqa", "gpt_model_use_experimental_version": True}),
            (
                MIXTURE,
                {
                    "scoring_func": "sigmoid",
                    "topk_method": "noaux_tc",
                    "routed_scaling_factor": 2.5,
                    "n_group": 8,
                    "moe_shared_expert_gate": True,
                },
            ),
            (MODELS["core_windows"], {"sliding_window": [3, 0], "head_wise_swa_ratio": 0.5}),
        )
        for key, value in pairs.items()
    },
    # windows
    "a number that counts from 0 or 1": (
        MODELS["core_windows_alike"],
        {},
        {"window_attn_skip_freq": 2},
        {},
        "count layers from 0 or from 1.*list of 4",
    ),
    "full layers first": (
        MODELS["core_windows_alike"],
        {},
        {"window_attn_skip_freq": [0, 1, 0, 1]},
        {},
        r"full layers \[0, 2\]",
    ),
    "a pattern that the shapes deny": (
        MODELS["core_windows"],
        {},
        {"window_attn_skip_freq": [1, 0] * 3},
        {},
        "another pattern",
    ),
    "a list of another length": (
        MODELS["core_windows"],
        {},
        {"window_attn_skip_freq": [1, 1, 0]},
        {},
        "each of 6 layers",
    ),
    "types that deny the pattern": (
        MODELS["core_windows_alike"],
        {},
        {"layer_types": ["full_attention"] * 4},
        {},
        "another pattern",
    ),
    "types of another length": (
        MODELS["core_windows_alike"],
        {},
        {"layer_types": ["full_attention"] * 2},
        {},
        "each of 4 layers",
    ),
    "layers that slide without a window": (
        MODELS["core_windows_alike"],
        {},
        {"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {},
        "no window in use",
    ),
    "shapes that differ without a window": (
        MODELS["core_windows"],
        {},
        {"sliding_window": None},
        {},
        "layers of different shapes",
    ),
    "a sink that is not there": (
        MODELS["core_windows"],
        {},
        {"add_swa_attention_sink_bias": True},
        {},
        "layer 0 .*no core_attention.softmax_offset",
    ),
    "sinks that are not there": (DENSE, {}, {"softmax_type": "learnable"}, {}, "softmax_type.*no core_attention"),
    # orders
    "norm order not stated": (FORKED, {}, {}, {"norm_order": None}, "--norm-order premix-norm or --norm-order norm-"),
    "norm order without Premix": (
        MODELS["fork_no_premix"],
        {},
        {},
        {"norm_order": "premix-norm"},
        "--norm-order=premix-norm: has no effect without a Premix",
    ),
    "norm order without a norm": (
        MODELS["core_no_norm"],
        {},
        {},
        {"norm_order": "premix-norm"},
        "--norm-order=premix-norm: has no effect without a norm",
    ),
    "norm order against the code": (
        DENSE,
        {},
        {},
        {"norm_order": "norm-premix"},
        "--norm-order=norm-premix: contradicts PaddleFleet core",
    ),
    "gate order not stated": (
        MODELS["fork_gate"],
        {},
        {},
        {"gate_order": None},
        "--gate-order gate-postmix or --gate-order postmix-gate",
    ),
    "gate order without a gate": (
        FORKED,
        {},
        {},
        {"gate_order": "gate-postmix"},
        "--gate-order=gate-postmix: has no effect without a gate",
    ),
    "gate order without a Postmix": (
        Upstream(form="fork", attention=(replace(FORK, rank=None, gate="before"),) * 2),
        {},
        {},
        {"gate_order": "gate-postmix"},
        "has no effect without a Postmix",
    ),
    "gate order against the code": (
        GATED_AFTER["core"],
        {},
        {},
        {"gate_order": "gate-postmix"},
        "--gate-order=gate-postmix: contradicts PaddleFleet core",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_its_reason(case: str, open_changed: Open) -> None:
    model, tensors, values, stated, expected = CASES[case]
    line = refused(open_changed, model, tensors, values, **stated)
    assert re.search(expected, line), line


def test_without_a_configuration_it_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        open_upstream(merged(tmp_path, weights(DENSE)))
    for part in ("--config", "vocab_size=40", "num_hidden_layers=2", "rms_norm_eps", "rope_theta"):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}, 1', "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    merged(tmp_path, weights(DENSE))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json"):
        open_upstream(tmp_path)


@pytest.mark.parametrize("name", ["core_mixture", "fork_gate", "core_biases", "fork_no_premix"])
def test_no_shape_whatever_is_more_than_a_mistake(name: str, open_changed: Open) -> None:
    """Each tensor in turn as a number, empty, with an axis less, more, longer, and transposed."""
    model = MODELS[name]
    for each, tensor in weights(model).items():
        if each.startswith("layers.1."):
            continue
        shape = tensor.shape
        others = {(), (0,), (0,) * tensor.ndim, shape[1:], (*shape, 1), (shape[0] + 1, *shape[1:]), shape[::-1]}
        if each.endswith("mlp.gate.weight"):  # read either way
            others -= {shape[::-1]}
        for other in others - {shape}:
            line = refused(open_changed, model, {each: ones(*other)})
            assert re.search("shape|columns|heads|experts", line), line


def test_two_names_of_one_tensor_are_refused(open_changed: Open) -> None:
    extra = {"model.norm.weight": weights(DENSE)["norm.weight"]}
    assert "both norm.weight and model.norm.weight" in refused(open_changed, DENSE, extra)


def errors_of(model: Upstream, **other: str) -> list[float]:
    """By layer, what the program's attention loses if one order is taken for the other."""
    x = np.random.default_rng(SEED).standard_normal((1, NUM_TOKENS, model.hidden))
    errors = []
    for layer, attention in enumerate(model.attention):
        prefix = f"layers.{layer}.self_attn."
        tensors = {n.removeprefix(prefix): t for n, t in weights(model).items() if n.startswith(prefix)}
        right = oracle.attend(x, tensors, attention, model)
        wrong = oracle.attend(x, tensors, replace(attention, **other), model)
        errors.append(float(np.linalg.norm(wrong - right) / np.linalg.norm(right)))
    return errors


def test_a_norm_before_premix_is_refused_with_what_a_fold_would_cost(open_changed: Open) -> None:
    line = refused(open_changed, NORM_FIRST)
    assert "norm-premix" in line and "its queries by" in line
    mean, worst = (float(figure) for figure in re.findall(r"by ([0-9.]+)", line)[:2])
    errors = errors_of(NORM_FIRST, norm="after")
    assert mean == pytest.approx(np.mean(errors), rel=0.05)  # two digits are shown
    assert worst == pytest.approx(max(errors), rel=0.05)
    assert min(errors) > 0.05


@pytest.mark.parametrize("form", GATED_AFTER)
def test_what_folding_despite_the_gate_would_cost_is_measured(form: str, open_changed: Open) -> None:
    source = open_changed(GATED_AFTER[form])
    measured = fold_despite_gate(source.weights, source.model)
    assert measured.outputs == pytest.approx(errors_of(GATED_AFTER[form], gate="before"), rel=FLOAT64)
    assert not any(measured.queries)
    assert "folding anyway would change the attention's outputs by" in str(measured)


def test_a_measured_error_is_none_where_the_order_makes_none(open_changed: Open) -> None:
    """With an orthogonal Premix and gains of 1 the norm commutes with it."""
    generator = np.random.default_rng(3)
    turns = {
        f"layers.{n}.self_attn.vha_premix_weight": np.stack([_rotation(generator) for _ in range(2)]) for n in (0, 1)
    }
    gains = {f"layers.{n}.self_attn.q_norm.weight": ones(6) for n in (0, 1)}
    line = refused(open_changed, NORM_FIRST, turns | gains)
    assert max(float(figure) for figure in re.findall(r"by ([0-9.e-]+)", line)) < 1e-12


def _rotation(generator: np.random.Generator) -> Array:
    return np.linalg.qr(generator.standard_normal((6, 6)))[0]


def test_a_configuration_in_the_folder_above_the_tensors_is_found(tmp_path: Path) -> None:
    path = merged(tmp_path / "step", weights(DENSE))
    write_config(path, config(DENSE))
    assert open_upstream(path / "model-00001-of-00001.safetensors").model.vocab_size == 40
