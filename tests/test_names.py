"""Names, shapes and orientation of tensors, against transformers' Qwen3 and Qwen3-MoE and small cases by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_GROUPED, SMALL_MIXTURE, SMALL_VHA, small_model
from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.names import account, check_shape, expected_tensors, from_hf, hf_tensors, to_hf

GROUPED = small_model(SMALL_GROUPED, tie_word_embeddings=False)
MIXTURE = small_model(SMALL_GROUPED, tie_word_embeddings=False, **SMALL_MIXTURE)
VHA = small_model(SMALL_VHA, tie_word_embeddings=False)
LINEARS = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
LINEARS += [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
LINEARS += ["lm_head.weight", "model.layers.3.mlp.gate.weight"]
PARTS = ("gate_proj", "up_proj", "down_proj")


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


def alone(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The one tensor that a tensor of ours becomes."""
    (converted,) = to_hf(name, array)
    return converted


# Conversion


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("shape", [(2, 3), (3, 3)], ids=["rectangular", "square"])
def test_a_linear_weight_is_transposed_both_ways(name: str, shape: tuple[int, int]) -> None:
    ours = numbered(shape)
    there_name, there = alone(name, ours)
    back = from_hf(name, shape, {name: there})
    assert there_name == name
    assert back.flags.c_contiguous
    assert np.array_equal(back, ours)
    for row in range(shape[0]):
        for column in range(shape[1]):
            assert there[column, row] == ours[row, column]


def test_everything_but_the_linear_weights_is_copied_as_it_is() -> None:
    layer = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    names = [f"model.layers.12.{name}.weight" for name in layer]
    names += ["model.norm.weight", "model.embed_tokens.weight"]
    for name in names:
        array = numbered((3, 3))
        converted_name, converted = alone(name, array)
        assert converted_name == name
        assert np.array_equal(converted, array), name
        assert np.array_equal(from_hf(name, (3, 3), {name: array}), array), name


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 3, 3), (3, 3, 3)], ids=["rectangular", "square", "cube"])
def test_the_experts_of_a_layer_become_one_matrix_each(part: str, shape: tuple[int, int, int]) -> None:
    ours, name = numbered(shape), f"model.layers.7.mlp.experts.{part}"
    theirs = dict(to_hf(name, ours))
    assert list(theirs) == [f"model.layers.7.mlp.experts.{expert}.{part}.weight" for expert in range(shape[0])]
    for expert, matrix in enumerate(theirs.values()):
        assert np.array_equal(matrix, ours[expert].T)
    assert np.array_equal(from_hf(name, shape, dict(reversed(theirs.items()))), ours)


@pytest.mark.parametrize("model", [GROUPED, MIXTURE], ids=["dense", "mixture"])
def test_there_and_back_is_the_identity_and_shapes_are_known_before(model: Model) -> None:
    for name, shape in expected_tensors(model).items():
        array = numbered(shape)
        theirs = dict(to_hf(name, array))
        assert {hf_name: part.shape for hf_name, part in theirs.items()} == hf_tensors(name, shape)
        assert np.array_equal(from_hf(name, shape, theirs), array), name


def their_model(model: Model) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings", "vocab_size")
    sizes = model.model_dump(include=set(keys)) | model.attention.model_dump(exclude={"kind", "output_gate"})
    if model.experts is None:
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    del sizes["intermediate_size"]
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **model.experts.model_dump(include=set(keys))))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model", [GROUPED, MIXTURE], ids=["dense", "mixture"])
def test_a_converted_grouped_decoder_has_the_tensors_of_transformers(model: Model, tied: bool) -> None:
    model = model.model_copy(update={"tie_word_embeddings": tied})
    # named_parameters gives a tied pair once, under the embedding's name.
    theirs = {name: tuple(parameter.shape) for name, parameter in their_model(model).named_parameters()}
    converted: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_tensors(model).items():
        converted |= hf_tensors(name, shape)
    assert converted == theirs


@pytest.mark.parametrize("short", ["premix", "postmix_a", "postmix_b"])
def test_an_unfolded_map_has_no_name_in_qwen3(short: str) -> None:
    name = f"model.layers.0.self_attn.{short}"
    with pytest.raises(UserError, match=f"{name} has no name in a Qwen3 model; fold"):
        alone(name, np.ones((2, 2)))


@pytest.mark.parametrize(
    "name, meant",
    [
        ("model.layers.0.self_attn.q_porj.weight", "self_attn.q_proj.weight"),
        ("model.layers.0.mlp.up_projection.weight", "mlp.up_proj.weight"),
        ("model.layers.0.mlp.experts.up_porj", "mlp.experts.up_proj"),
        ("model.embed_token.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_foreign_name_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(UserError) as error:
        hf_tensors(name, (2, 2))
    assert name in str(error.value) and f"(did you mean {meant}?)" in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_proj.weight",
        "premix",
        "model.layers.0.lm_head.weight",
        "model.layers.01.self_attn.q_proj.weight",
        "model.layers.-1.mlp.up_proj.weight",
        "model.layers.0.model.norm.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.self_attn.g_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
    ],
)
def test_a_known_name_in_a_wrong_place_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no tensor of a Qwen3 decoder"):
        from_hf(name, (2, 2), {name: np.ones((2, 2))})


def test_a_linear_weight_must_be_a_matrix_and_experts_a_stack_of_them() -> None:
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \[2, 2, 2\]; .* two axes"):
        alone("lm_head.weight", np.ones((2, 2, 2)))
    with pytest.raises(UserError, match=r"mlp\.experts\.up_proj has shape \[2, 2\]; experts must be \[E, in, out\]"):
        alone("model.layers.0.mlp.experts.up_proj", np.ones((2, 2)))


# Accounts


def refused_account(found: list[str], expected: list[str]) -> str:
    with pytest.raises(UserError) as error:
        account(found, expected, "weights")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_exact_account_passes_in_any_order() -> None:
    names = list(expected_tensors(VHA))
    account(reversed(names), names, "weights")


def test_missing_tensors_are_named() -> None:
    names = list(expected_tensors(VHA))
    gone = ["model.layers.1.self_attn.postmix_b", "model.norm.weight"]
    message = refused_account([name for name in names if name not in gone], names)
    assert message.startswith("weights: missing model.layers.1.self_attn.postmix_b, model.norm.weight;")
    assert "unexpected" not in message


def test_unexpected_tensors_are_named() -> None:
    names = list(expected_tensors(VHA))
    message = refused_account([*names, "model.layers.2.self_attn.premix"], names)
    assert message.startswith("weights: unexpected model.layers.2.self_attn.premix;")
    assert "missing" not in message and "did you mean" not in message


def test_a_misspelt_tensor_is_named_with_the_one_that_was_meant() -> None:
    names = list(expected_tensors(VHA))
    found = [name.replace("layers.1.self_attn.v_proj", "layers.1.self_attn.v_porj") for name in names]
    message = refused_account(found, names)
    right, wrong = (f"model.layers.1.self_attn.v_{part}.weight" for part in ("proj", "porj"))
    assert f"missing {right};" in message
    assert f"unexpected {wrong} (did you mean {right}?)" in message


def test_a_long_account_is_cut_and_counted() -> None:
    message = refused_account([], [f"tensor_{index}" for index in range(8)])
    assert "missing tensor_0, tensor_1, tensor_2, tensor_3, tensor_4 and 3 more;" in message
    message = refused_account([f"tensor_{index}" for index in range(7)], [])
    assert "unexpected tensor_0, tensor_1, tensor_2, tensor_3, tensor_4 and 2 more;" in message


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    check_shape("premix", [2, 4, 4], (2, 4, 4), "weights")
    with pytest.raises(UserError, match=r"weights: premix has shape \[4, 2\], .* needs \[2, 4\]"):
        check_shape("premix", (4, 2), (2, 4), "weights")
