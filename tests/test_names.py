"""Names, shapes and orientation of tensors, against transformers' Qwen3 and against small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vha_paddle.errors import UserError
from vha_paddle.names import (
    DecoderShape,
    account,
    attention_tensors,
    check_shape,
    expected_tensors,
    from_hf,
    to_hf,
)

GROUPED = DecoderShape(
    kind="grouped",
    num_hidden_layers=2,
    hidden_size=10,
    intermediate_size=9,
    vocab_size=11,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    premix=False,
    postmix_rank=0,
    tie_word_embeddings=False,
)
VHA = replace(GROUPED, kind="vha", premix=True, postmix_rank=3)
LINEARS = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
LINEARS += [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
LINEARS += ["lm_head.weight"]


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


# Conversion


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("shape", [(2, 3), (3, 3)], ids=["rectangular", "square"])
def test_a_linear_weight_is_transposed_both_ways(name: str, shape: tuple[int, int]) -> None:
    ours = numbered(shape)
    for convert in (to_hf, from_hf):
        converted_name, converted = convert(name, ours)
        assert converted_name == name
        assert converted.flags.c_contiguous
        for row in range(shape[0]):
            for column in range(shape[1]):
                assert converted[column, row] == ours[row, column]


def test_everything_but_the_linear_weights_is_copied_as_it_is() -> None:
    layer = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    names = [f"model.layers.12.{name}.weight" for name in layer]
    names += ["model.norm.weight", "model.embed_tokens.weight"]
    for name in names:
        array = numbered((3, 3))
        for convert in (to_hf, from_hf):
            assert convert(name, array)[0] == name
            assert np.array_equal(convert(name, array)[1], array), name


def test_there_and_back_is_the_identity() -> None:
    for name, shape in expected_tensors(GROUPED).items():
        array = numbered(shape)
        back_name, back = from_hf(*to_hf(name, array))
        assert back_name == name
        assert np.array_equal(back, array)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_converted_grouped_decoder_has_the_tensors_of_transformers(tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = replace(GROUPED, tie_word_embeddings=tied)
    sizes = vars(shape).copy()
    for ours_only in ("kind", "premix", "postmix_rank"):
        del sizes[ours_only]
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    # named_parameters gives a tied pair once, under the embedding's name.
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    converted = dict(to_hf(name, np.zeros(size)) for name, size in expected_tensors(shape).items())
    assert {name: array.shape for name, array in converted.items()} == theirs


@pytest.mark.parametrize("short", ["premix", "postmix_a", "postmix_b"])
def test_an_unfolded_map_has_no_name_in_qwen3(short: str) -> None:
    name = f"model.layers.0.self_attn.{short}"
    with pytest.raises(UserError, match=f"{name} has no name in a Qwen3 model; fold"):
        to_hf(name, np.ones((2, 2)))


@pytest.mark.parametrize(
    "name, meant",
    [
        ("model.layers.0.self_attn.q_porj.weight", "self_attn.q_proj.weight"),
        ("model.layers.0.mlp.up_projection.weight", "mlp.up_proj.weight"),
        ("model.embed_token.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_foreign_name_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    for convert in (to_hf, from_hf):
        with pytest.raises(UserError) as error:
            convert(name, np.ones((2, 2)))
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
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_known_name_in_a_wrong_place_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no tensor of a Qwen3 decoder"):
        from_hf(name, np.ones((2, 2)))


def test_a_linear_weight_must_be_a_matrix() -> None:
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \[2, 2, 2\]"):
        to_hf("lm_head.weight", np.ones((2, 2, 2)))


# Expected tensors


def test_expected_tensors_of_a_vha_layer() -> None:
    assert attention_tensors(VHA) == {
        "q_proj.weight": (10, 3 * 4),
        "k_proj.weight": (10, 2 * 4),
        "v_proj.weight": (10, 2 * 4),
        "o_proj.weight": (6 * 4, 10),
        "q_norm.weight": (4,),
        "k_norm.weight": (4,),
        "premix": (2, 4, 4),
        "postmix_a": (6, 3),
        "postmix_b": (6, 3),
    }


def test_without_premix_the_query_projection_makes_every_head() -> None:
    tensors = attention_tensors(replace(VHA, premix=False))
    assert tensors["q_proj.weight"] == (10, 6 * 4)
    assert "premix" not in tensors and "postmix_a" in tensors


def test_without_postmix_its_factors_are_absent() -> None:
    tensors = attention_tensors(replace(VHA, postmix_rank=0))
    assert "premix" in tensors and "postmix_a" not in tensors and "postmix_b" not in tensors


def test_a_tied_head_has_no_tensor() -> None:
    tied = expected_tensors(replace(GROUPED, tie_word_embeddings=True))
    assert set(expected_tensors(GROUPED)) - set(tied) == {"lm_head.weight"}
    assert expected_tensors(GROUPED)["lm_head.weight"] == (10, 11)


def test_expected_tensors_are_in_the_order_of_the_forward_pass() -> None:
    names = list(expected_tensors(VHA))
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    first, second = (names.index(f"model.layers.{layer}.self_attn.premix") for layer in (0, 1))
    assert first < names.index("model.layers.0.mlp.down_proj.weight") < second


def test_the_paper_model_has_the_paper_parameter_counts() -> None:
    vha = DecoderShape(
        kind="vha",
        num_hidden_layers=28,
        hidden_size=2048,
        intermediate_size=6144,
        vocab_size=151936,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        premix=True,
        postmix_rank=4,
        tie_word_embeddings=True,
    )
    gqa8 = replace(vha.folded(), num_key_value_heads=8)
    for shape, millions in ((vha, 1574.695), (gqa8, 1720.575)):
        count = sum(int(np.prod(size)) for size in expected_tensors(shape).values())
        assert round(count / 1e6, 3) == millions, shape.kind


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "mla"}, "kind is 'mla'; it must be one of grouped, vha"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"postmix_rank": -1}, "postmix_rank is -1"),
        (
            {"num_attention_heads": 5},
            "num_attention_heads is 5; it must be a multiple of num_key_value_heads=2",
        ),
        ({"kind": "grouped"}, "kind is 'grouped' with premix=True and postmix_rank=3"),
        ({"premix": False, "postmix_rank": 0}, "vha needs at least one of the two maps"),
    ],
)
def test_a_shape_that_makes_no_decoder_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        replace(VHA, **change)
    assert message in str(error.value)


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
