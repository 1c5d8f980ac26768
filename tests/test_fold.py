"""The fold against the numpy oracle: exact where it must be, and data that can see each known wrong fold.

Every map is at the size that training reaches: at initialisation Postmix is the identity and Premix nearly
is, so that a transposed M or a wrong head order would pass. Premix is square, so that no shape tells its
orientation. The wrong folds are therefore computed here too, and must be far off on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import forward_spec
from tests.oracles import forward, ops
from tests.oracles.forward import within
from tests.tolerances import FLOAT64_FOLD, assert_close, relative_error
from tests.weights import trained_weights
from vha_paddle.config import GroupedAttention, Model
from vha_paddle.config.check_model import check_model
from vha_paddle.counts import folded
from vha_paddle.errors import UserError
from vha_paddle.fold import fold_attention, fold_postmix, fold_premix, fold_state, postmix_matrix
from vha_paddle.names import expected_tensors
from vha_paddle.tensors import attention_tensors

Arrays = dict[str, np.ndarray]
VISIBLE = 0.05  # the least relative error that proves the data able to see a fault


def vha(**keys: Any) -> dict[str, Any]:
    """A tiny VHA section; a key that is None is left out."""
    section = {"kind": "vha", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "postmix_rank": 2}
    return {key: value for key, value in (section | keys).items() if value is not None}


def model_of(attention: dict[str, Any], **keys: Any) -> Model:
    sizes = {"hidden_size": 7, "num_hidden_layers": 2, "intermediate_size": 9, "vocab_size": 11}
    values = sizes | {"tie_word_embeddings": True, "rope_theta": 1e4} | keys | {"attention": attention}
    model = Model.model_validate(values)
    check_model(model)
    return model


PREMIX_ONLY, POSTMIX_ONLY = {"postmix": "none", "postmix_rank": None}, {"premix": "none"}
WIDE, GATED = {"physical_head_dim": 10, "premix_init": "orthogonal"}, {"output_gate": "before_postmix"}
GROUPED = {"kind": "grouped", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
TINY = model_of(vha())
PAPER_1P7B = model_of(vha(num_attention_heads=16, head_dim=128, postmix_rank=4), hidden_size=2048)
LAYERS = {
    "tiny": TINY,
    "premix only": model_of(vha(**PREMIX_ONLY)),
    "postmix only": model_of(vha(**POSTMIX_ONLY)),
    "one group": model_of(vha(num_attention_heads=3, num_key_value_heads=1)),
    "one physical head": model_of(vha(num_attention_heads=3, num_key_value_heads=3)),
    "full rank postmix": model_of(vha(postmix_rank=6)),
    "postmix in weight space": model_of(vha(postmix_space="weight")),
    "wide physical heads": model_of(vha(**WIDE)),
    "narrow physical heads": model_of(vha(**WIDE | {"physical_head_dim": 4})),
    "wide physical heads, premix only": model_of(vha(**WIDE, **PREMIX_ONLY)),
    "gate before postmix": model_of(vha(**GATED)),
    "gate and postmix only": model_of(vha(**GATED, **POSTMIX_ONLY)),
    "gate and premix only": model_of(vha(**GATED, **PREMIX_ONLY)),
    "gate and wide physical heads": model_of(vha(**GATED, **WIDE)),
    "biases": model_of(vha(attention_bias=True)),
    "biases and wide physical heads": model_of(vha(attention_bias=True, **WIDE)),
    "paper 1.7B": PAPER_1P7B,
}
SLIDING = {"window": 3, "full_every": 2}
DECODERS = {
    "both tied": TINY,
    "both untied": model_of(vha(), tie_word_embeddings=False),
    "premix only": model_of(vha(**PREMIX_ONLY)),
    "postmix only": model_of(vha(**POSTMIX_ONLY)),
    "wide physical heads and gate": model_of(vha(**GATED, **WIDE)),
    "biases, full layers vha": model_of(
        vha(attention_bias=True),
        num_hidden_layers=4,
        sliding_window=SLIDING | {"attention": GROUPED | {"attention_bias": True}},
    ),
    "hybrid": model_of(vha(), num_hidden_layers=4, sliding_window=SLIDING),
    "hybrid, full layers vha": model_of(vha(), num_hidden_layers=4, sliding_window=SLIDING | {"attention": GROUPED}),
    "hybrid, sliding layers vha": model_of(GROUPED, num_hidden_layers=3, sliding_window=SLIDING | {"attention": vha()}),
    "hybrid of two vha": model_of(vha(), sliding_window=SLIDING | {"attention": vha(**GATED, num_key_value_heads=3)}),
    "mixture of experts": model_of(vha(), intermediate_size=None, experts=EXPERTS),
    "mixture with a shared expert": model_of(
        vha(), intermediate_size=None, experts=EXPERTS | {"shared_expert_intermediate_size": 3}
    ),
}
WITHOUT_SHARED = [name for name in DECODERS if "shared" not in name]  # what the oracle computes


def layer_of(model: Model) -> tuple[Arrays, np.ndarray]:
    """The weights of the first layer's attention, and an input."""
    generator = np.random.default_rng(0)
    one_layer = model.model_copy(update={"num_hidden_layers": 1, "vocab_size": 1, "intermediate_size": 1})
    weights = within(trained_weights(one_layer, seed=0), "model.layers.0.self_attn.")
    return weights, generator.standard_normal((2, 5, model.hidden_size))


def fold(weights: Mapping[str, np.ndarray], model: Model = TINY, dtype: Any = np.float64) -> Arrays:
    return fold_attention(weights, model.attention, model.hidden_size, dtype, "layer")


def run_layer(x: np.ndarray, weights: Arrays, model: Model) -> np.ndarray:
    spec = forward_spec(model)
    return forward.attention(x, weights, spec.layers[0], spec)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in attention_tensors(model.attention, model.hidden_size)}


# Equality


@pytest.mark.parametrize("case", LAYERS)
def test_a_folded_layer_equals_the_vha_layer(case: str) -> None:
    model = LAYERS[case]
    weights, x = layer_of(model)
    expected, actual = run_layer(x, weights, model), run_layer(x, fold(weights, model), folded(model))
    assert_close(actual, expected, FLOAT64_FOLD, "output")


@pytest.mark.parametrize("case", LAYERS)
def test_a_folded_layer_has_the_tensors_of_a_grouped_one(case: str) -> None:
    model = LAYERS[case]
    assert isinstance(folded(model).attention, GroupedAttention)
    shapes = {name: array.shape for name, array in fold(layer_of(model)[0], model).items()}
    assert shapes == shapes_of(folded(model))


@pytest.mark.parametrize("case", WITHOUT_SHARED)
def test_a_folded_decoder_gives_the_same_logits(case: str) -> None:
    model = DECODERS[case]
    weights = trained_weights(model, seed=1)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 7))
    served = dict(fold_state(weights, model, np.float64, "state"))
    expected = forward.logits(weights, tokens, forward_spec(model))
    actual = forward.logits(served, tokens, forward_spec(folded(model)))
    assert_close(actual, expected, FLOAT64_FOLD, "logits")


@pytest.mark.parametrize("case", DECODERS)
def test_a_folded_decoder_has_the_tensors_of_the_served_model(case: str) -> None:
    model = DECODERS[case]
    assert not folded(model).has_maps
    shapes = {
        name: array.shape for name, array in fold_state(trained_weights(model, seed=1), model, np.float64, "state")
    }
    assert shapes == expected_tensors(folded(model))
    assert list(shapes) == list(expected_tensors(folded(model)))


@pytest.mark.parametrize("case", DECODERS)
def test_what_the_fold_does_not_change_is_copied(case: str) -> None:
    model = DECODERS[case]
    weights = trained_weights(model, seed=1)
    folds = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.o_proj.weight")
    for name, array in fold_state(weights, model, np.float64, "state"):
        if not name.endswith(folds):
            assert array is weights[name], name


def test_the_premix_fold_is_group_major() -> None:
    weights, _ = layer_of(TINY)
    result, head_dim = fold_premix(weights["q_proj.weight"], weights["premix"]), 6
    group, physical = 1, 2
    virtual = group * 3 + physical
    expected = weights["q_proj.weight"][:, physical * head_dim :][:, :head_dim] @ weights["premix"][group]
    assert_close(result[:, virtual * head_dim :][:, :head_dim], expected, FLOAT64_FOLD, "virtual head 5")


def test_wide_physical_heads_are_taken_to_the_width_that_attends() -> None:
    weights, _ = layer_of(model_of(vha(**WIDE)))
    result = fold_premix(weights["q_proj.weight"], weights["premix"])
    expected = weights["q_proj.weight"][:, 20:30] @ weights["premix"][1]
    assert_close(result[:, 30:36], expected, FLOAT64_FOLD, "virtual head 5")


def test_postmix_matrix_is_identity_plus_b_a_transposed() -> None:
    a, b = np.array([[1.0], [2.0]]), np.array([[10.0], [20.0]])
    assert np.array_equal(postmix_matrix(a, b), [[11.0, 20.0], [20.0, 41.0]])


def test_arithmetic_is_float64_and_rounded_once() -> None:
    weights, _ = layer_of(TINY)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        low = {name: array.astype(dtype) for name, array in weights.items()}
        expected = fold({name: array.astype(np.float64) for name, array in low.items()})
        for name, array in fold(low, dtype=dtype).items():
            assert array.dtype == dtype, name
            assert np.array_equal(array, expected[name].astype(dtype)), f"{name} in {np.dtype(dtype).name}"


def test_folding_leaves_its_input_unchanged() -> None:
    weights, _ = layer_of(TINY)
    before = {name: array.copy() for name, array in weights.items()}
    fold(weights)
    assert all(np.array_equal(weights[name], before[name]) for name in before)


# Wrong folds: each must be far off, or the tests above would prove nothing


def by_head(o_proj: np.ndarray, model: Model) -> np.ndarray:
    return o_proj.reshape(model.attention.num_attention_heads, model.attention.head_dim, -1)


def transposed_postmix(weights: Arrays, model: Model) -> Arrays:
    postmix = np.eye(model.attention.num_attention_heads) + weights["postmix_b"] @ weights["postmix_a"].T
    wrong = np.einsum("nm,mhd->nhd", postmix, by_head(weights["o_proj.weight"], model))
    return {**fold(weights, model), "o_proj.weight": wrong.reshape(-1, model.hidden_size)}


def skipped_postmix(weights: Arrays, model: Model) -> Arrays:
    return {**fold(weights, model), "o_proj.weight": weights["o_proj.weight"]}


def head_major_premix(weights: Arrays, model: Model) -> Arrays:
    attention, D = model.attention, model.hidden_size
    q_proj = fold(weights, model)["q_proj.weight"].reshape(D, attention.num_key_value_heads, -1, attention.head_dim)
    return {**fold(weights, model), "q_proj.weight": q_proj.swapaxes(1, 2).reshape(D, -1)}


def transposed_premix(weights: Arrays, model: Model) -> Arrays:
    premix = weights["premix"]
    return fold({**weights, "premix": premix.swapaxes(1, 2).reshape(premix.shape)}, model)


def mixed_gate(weights: Arrays, model: Model) -> Arrays:
    """Postmix folded into the gate's columns too, as if the gate were another projection of the heads."""
    mix = np.kron(postmix_matrix(weights["postmix_a"], weights["postmix_b"]).T, np.eye(model.attention.head_dim))
    return {**fold(weights, model), "g_proj.weight": weights["g_proj.weight"] @ mix}


def gate_reordered(weights: Arrays, model: Model) -> Arrays:
    """The gate's heads in the order of physical heads."""
    attention, D = model.attention, model.hidden_size
    gate = weights["g_proj.weight"].reshape(D, attention.num_key_value_heads, -1, attention.head_dim)
    return {**fold(weights, model), "g_proj.weight": gate.swapaxes(1, 2).reshape(D, -1)}


WRONG_FOLDS: dict[str, Callable[[Arrays, Model], Arrays]] = {
    "M transposed": transposed_postmix,
    "M left out": skipped_postmix,
    "head-major": head_major_premix,
    "premix transposed": transposed_premix,
}
WRONG_GATES: dict[str, Callable[[Arrays, Model], Arrays]] = {"mixed gate": mixed_gate, "gate reordered": gate_reordered}
SIZES = {
    "tiny": TINY,
    "paper 1.7B": PAPER_1P7B,
    "wide physical heads": model_of(vha(**WIDE)),
    "gate": model_of(vha(**GATED)),
}


def assert_visible(wrong: Callable[[Arrays, Model], Arrays], model: Model) -> None:
    weights, x = layer_of(model)
    expected, actual = run_layer(x, weights, model), run_layer(x, wrong(weights, model), folded(model))
    assert relative_error(actual, expected) >= VISIBLE


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", WRONG_FOLDS)
def test_a_wrong_fold_is_visible(fault: str, size: str) -> None:
    assert_visible(WRONG_FOLDS[fault], SIZES[size])


@pytest.mark.parametrize("fault", WRONG_GATES)
def test_a_wrong_gate_is_visible(fault: str) -> None:
    assert_visible(WRONG_GATES[fault], SIZES["gate"])


@pytest.mark.parametrize("size", ["tiny", "paper 1.7B"])
def test_a_layer_with_its_norm_before_premix_does_not_fold(size: str) -> None:
    """Another layer: QK-norm on the physical heads, then Premix."""
    model = SIZES[size]
    weights, x = layer_of(model)
    attention, (B, S, _) = model.attention, x.shape
    heads = [B, S, -1, attention.head_dim]
    q_BSPH, k_BSKH, v_BSKH = ((x @ weights[f"{part}_proj.weight"]).reshape(heads) for part in "qkv")
    q_BSPH, _ = ops.rms_norm(q_BSPH, weights["q_norm.weight"], model.rms_norm_eps)
    k_BSKH, _ = ops.rms_norm(k_BSKH, weights["k_norm.weight"], model.rms_norm_eps)
    q_BSNH = np.einsum("bspi,kij->bskpj", q_BSPH, weights["premix"]).reshape(heads)
    angles = ops.rope_angles(S, attention.head_dim, model.rope_theta)
    y_BSNH, _ = ops.causal_attention(ops.rope(q_BSNH, angles), ops.rope(k_BSKH, angles), v_BSKH)
    mix_NN = postmix_matrix(weights["postmix_a"], weights["postmix_b"])
    expected = np.einsum("mn,bsnh->bsmh", mix_NN, y_BSNH).reshape(B, S, -1) @ weights["o_proj.weight"]
    actual = run_layer(x, fold(weights, model), folded(model))
    assert relative_error(actual, expected) >= VISIBLE


@pytest.mark.parametrize("attention", [vha(), vha(num_attention_heads=16, head_dim=128, postmix_rank=4)])
def test_a_gate_after_postmix_folded_as_one_before_it_is_visible(attention: dict[str, Any]) -> None:
    after = model_of(attention | {"output_gate": "after_postmix"}, hidden_size=64)
    before = model_of(attention | {"output_gate": "before_postmix"}, hidden_size=64)
    weights, x = layer_of(after)
    expected, actual = run_layer(x, weights, after), run_layer(x, fold(weights, before), folded(before))
    assert relative_error(actual, expected) >= VISIBLE


# Streaming


class LazyState(Mapping[str, np.ndarray]):
    """A state that records which arrays were read."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.read: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.append(name)
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def test_a_state_is_read_once_and_one_tensor_at_a_time() -> None:
    state = LazyState(trained_weights(TINY, seed=1))
    tensors = fold_state(state, TINY, np.float64, "state")
    assert state.read == []
    for name, _ in tensors:
        assert state.read[-1] == name, "read before its turn"
    assert state.read == list(expected_tensors(TINY))


# Refusals


def assert_refused(weights: Arrays, *fragments: str, model: Model = TINY) -> None:
    """A UserError of one line that holds every fragment."""
    with pytest.raises(UserError) as error:
        fold(weights, model)
    message = str(error.value)
    assert "\n" not in message and message.startswith("layer: ")
    assert all(fragment in message for fragment in fragments), message


def changed(name: str, array: np.ndarray) -> Arrays:
    return {**layer_of(TINY)[0], name: array}


def test_a_second_fold_is_refused() -> None:
    assert_refused(fold(layer_of(TINY)[0]), "nothing to fold", "folded already?")


def test_a_second_fold_is_refused_however_the_model_is_described() -> None:
    assert_refused(fold(layer_of(TINY)[0]), "nothing to fold", "folded already?", model=folded(TINY))


def test_vha_weights_described_as_grouped_are_refused() -> None:
    assert_refused(layer_of(TINY)[0], "'grouped'", model=folded(TINY))


STAYS = {
    "premix": ({"premix": "silu"}, "model.attention.premix=silu: SiLU lies", "train with premix=linear"),
    "postmix": ({"postmix": "silu"}, "model.attention.postmix=silu: SiLU lies", "train with postmix=linear"),
    "gate": (
        {"output_gate": "after_postmix"},
        "model.attention.output_gate=after_postmix: the gate lies between Postmix and W_O, so Postmix does not fold",
        "train with output_gate=before_postmix",
    ),
    "silu and gate": ({"postmix": "silu", "output_gate": "after_postmix"}, "model.attention.postmix=silu", "linear"),
}


@pytest.mark.parametrize(("keys", "what", "remedy"), STAYS.values(), ids=STAYS)
def test_a_map_that_does_not_fold_is_refused_with_its_key(keys: dict[str, Any], what: str, remedy: str) -> None:
    model = model_of(vha(**keys))
    assert_refused(layer_of(model)[0], what, remedy, model=model)
    with pytest.raises(UserError, match=rf"state: {what}.*{remedy}"):
        fold_state(trained_weights(model, seed=1), model, np.float64, "state")


def test_a_sliding_layers_map_that_does_not_fold_is_refused_with_its_key() -> None:
    model = model_of(vha(), sliding_window=SLIDING | {"attention": vha(premix="silu")})
    with pytest.raises(UserError, match=r"model\.sliding_window\.attention\.premix=silu"):
        fold_state(trained_weights(model, seed=1), model, np.float64, "state")


@pytest.mark.parametrize("name", shapes_of(TINY))
def test_a_missing_tensor_is_refused_by_name(name: str) -> None:
    weights, _ = layer_of(TINY)
    del weights[name]
    assert_refused(weights, f"missing {name};")


@pytest.mark.parametrize("name", ["g_proj.weight", "q_proj.bias", "premix_scale"])
def test_an_unexpected_tensor_is_refused_by_name(name: str) -> None:
    assert_refused(changed(name, np.ones(3)), f"unexpected {name};")


def test_a_misspelt_tensor_is_refused_with_both_names() -> None:
    weights, _ = layer_of(TINY)
    weights["postmx_b"] = weights.pop("postmix_b")
    assert_refused(weights, "missing postmix_b;", "unexpected postmx_b (did you mean postmix_b?)")


def test_a_postmix_that_the_model_does_not_declare_is_refused() -> None:
    assert_refused(layer_of(TINY)[0], "unexpected postmix_a, postmix_b", model=model_of(vha(**PREMIX_ONLY)))


@pytest.mark.parametrize("name", shapes_of(TINY))
def test_a_shape_that_does_not_fit_is_refused(name: str) -> None:
    array = layer_of(TINY)[0][name]
    wider = np.concatenate([array, array], axis=-1)
    assert_refused(changed(name, wider), name, str(list(wider.shape)), str(list(array.shape)))


def test_a_rectangular_premix_the_other_way_round_is_refused() -> None:
    model = model_of(vha(**WIDE))
    weights, _ = layer_of(model)
    weights["premix"] = weights["premix"].swapaxes(1, 2)
    assert_refused(weights, "premix has shape [2, 6, 10]", "needs [2, 10, 6]", model=model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", shapes_of(TINY))
def test_a_value_that_is_not_finite_is_refused(name: str, value: float) -> None:
    weights, _ = layer_of(TINY)
    weights[name].flat[-1] = value
    assert_refused(weights, name, "not finite")


def test_bfloat16_kept_as_integers_is_refused() -> None:
    bits = layer_of(TINY)[0]["premix"].astype(ml_dtypes.bfloat16).view(np.uint16)
    assert_refused(changed("premix", bits), "premix", "uint16", "bfloat16")


def test_an_integer_result_is_refused() -> None:
    with pytest.raises(UserError, match="requested dtype is int32"):
        fold(layer_of(TINY)[0], dtype=np.int32)


def test_a_value_beyond_the_requested_dtype_is_refused() -> None:
    weights, _ = layer_of(TINY)
    weights["v_proj.weight"] *= 1e6
    with pytest.raises(UserError, match=r"v_proj\.weight exceeds the range of float16"):
        fold(weights, dtype=np.float16)


@pytest.mark.parametrize(
    "q_proj, premix",
    [((7, 18), (2, 5, 6)), ((7, 18), (6, 6)), ((7, 17), (2, 6, 6)), ((7, 3, 6), (2, 6, 6)), ((7, 18), (2, 0, 6))],
)
def test_fold_premix_refuses_shapes_that_do_not_fit(q_proj: tuple, premix: tuple) -> None:
    with pytest.raises(UserError, match="do not fit"):
        fold_premix(np.ones(q_proj), np.ones(premix))


@pytest.mark.parametrize(
    "o_proj, a, b",
    [((36, 7), (6, 2), (6, 3)), ((36, 7), (6,), (6,)), ((35, 7), (6, 2), (6, 2)), ((36,), (6, 2), (6, 2))],
)
def test_fold_postmix_refuses_shapes_that_do_not_fit(o_proj: tuple, a: tuple, b: tuple) -> None:
    with pytest.raises(UserError, match="not fit"):
        fold_postmix(np.ones(o_proj), np.ones(a), np.ones(b))


def test_a_state_is_refused_by_name_before_any_array_is_read() -> None:
    state = LazyState(trained_weights(TINY, seed=1))
    del state.arrays["model.layers.1.self_attn.premix"]
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.self_attn\.premix;"):
        fold_state(state, TINY, np.float64, "state")
    assert state.read == []


def test_a_folded_state_is_refused() -> None:
    served = dict(fold_state(trained_weights(TINY, seed=1), TINY, np.float64, "state"))
    with pytest.raises(UserError, match=r"state: .*nothing to fold; is it folded already\?"):
        fold_state(served, TINY, np.float64, "state")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_a_value_of_a_state_that_is_not_finite_is_refused(name: str) -> None:
    model = DECODERS["both untied"]
    weights = trained_weights(model, seed=1)
    weights[name].flat[0] = np.nan
    with pytest.raises(UserError, match=f"{name} holds values that are not finite"):
        dict(fold_state(weights, model, np.float64, "state"))


def test_one_layer_of_a_state_folds_as_that_layer_alone() -> None:
    weights = trained_weights(TINY, seed=1)
    served = dict(fold_state(weights, TINY, np.float32, "state"))
    alone = fold(within(weights, "model.layers.1.self_attn."), dtype=np.float32)
    for name, array in alone.items():
        assert np.array_equal(served[f"model.layers.1.self_attn.{name}"], array), name
