"""The fold against the numpy oracle: exact where it must be, and data that can see each known wrong fold.

Every map is at the size that training reaches: at initialisation Postmix is the identity and Premix nearly
is, so that a transposed M or a wrong head order would pass. Premix is square, so that no shape tells its
orientation. The wrong folds are therefore computed here too, and must be far off on the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests.oracles import ops
from tests.oracles.attention import attention_forward
from tests.oracles.decoder import attention_weights, decoder_logits
from tests.oracles.spec import OracleSpec, random_attention_weights, random_weights
from tests.tolerances import FLOAT64_FOLD, assert_close, relative_error
from vha_paddle.errors import UserError
from vha_paddle.fold import fold_attention, fold_postmix, fold_premix, fold_state, postmix_matrix
from vha_paddle.names import DecoderShape, attention_tensors, expected_tensors

Arrays = dict[str, np.ndarray]

VISIBLE = 0.05  # the least relative error that proves the data able to see a fault

TINY = OracleSpec(
    kind="vha",
    hidden_size=7,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=6,
    premix=True,
    postmix_rank=2,
    num_hidden_layers=2,
    intermediate_size=9,
    vocab_size=11,
)
PAPER_1P7B = replace(TINY, hidden_size=2048, num_attention_heads=16, head_dim=128, postmix_rank=4)
PREMIX_ONLY, POSTMIX_ONLY = replace(TINY, postmix_rank=0), replace(TINY, premix=False)
LAYERS = {
    "tiny": TINY,
    "premix only": PREMIX_ONLY,
    "postmix only": POSTMIX_ONLY,
    "one group": replace(TINY, num_attention_heads=3, num_key_value_heads=1),
    "one physical head": replace(TINY, num_attention_heads=3, num_key_value_heads=3),
    "full rank postmix": replace(TINY, postmix_rank=6),
    "paper 1.7B": PAPER_1P7B,
}
DECODERS = {
    "both tied": TINY,
    "both untied": replace(TINY, tie_word_embeddings=False),
    "premix only": PREMIX_ONLY,
    "postmix only": POSTMIX_ONLY,
}


def shape_of(spec: OracleSpec) -> DecoderShape:
    return DecoderShape(**{name: vars(spec)[name] for name in DecoderShape.__dataclass_fields__})


def grouped(spec: OracleSpec) -> OracleSpec:
    return replace(spec, kind="grouped", premix=False, postmix_rank=0)


def layer_of(spec: OracleSpec) -> tuple[Arrays, np.ndarray]:
    """A layer's weights and its input."""
    generator = np.random.default_rng(0)
    return random_attention_weights(spec, generator), generator.standard_normal((2, 5, spec.hidden_size))


def fold(weights: Mapping[str, np.ndarray], spec: OracleSpec = TINY) -> Arrays:
    return fold_attention(weights, shape_of(spec), np.float64, "layer")


# Equality


@pytest.mark.parametrize("case", LAYERS)
def test_a_folded_layer_equals_the_vha_layer(case: str) -> None:
    spec = LAYERS[case]
    weights, x = layer_of(spec)
    expected, _ = attention_forward(x, weights, spec)
    actual, _ = attention_forward(x, fold(weights, spec), grouped(spec))
    assert_close(actual, expected, FLOAT64_FOLD, "output")


@pytest.mark.parametrize("case", DECODERS)
def test_a_folded_decoder_gives_the_same_logits(case: str) -> None:
    spec = DECODERS[case]
    weights = random_weights(spec, seed=1)
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (2, 5))
    folded = dict(fold_state(weights, shape_of(spec), np.float64, "state"))
    expected, actual = decoder_logits(weights, tokens, spec), decoder_logits(folded, tokens, grouped(spec))
    assert_close(actual, expected, FLOAT64_FOLD, "logits")


@pytest.mark.parametrize("case", DECODERS)
def test_a_folded_decoder_has_the_tensors_of_a_grouped_one(case: str) -> None:
    shape = shape_of(DECODERS[case])
    weights = random_weights(DECODERS[case], seed=1)
    shapes = {name: array.shape for name, array in fold_state(weights, shape, np.float64, "state")}
    assert shapes == expected_tensors(shape.folded())
    assert list(shapes) == list(expected_tensors(shape.folded()))


def test_a_folded_layer_has_the_tensors_of_a_grouped_one() -> None:
    shapes = {name: array.shape for name, array in fold(layer_of(TINY)[0]).items()}
    assert shapes == attention_tensors(shape_of(TINY).folded())


def test_the_premix_fold_is_group_major() -> None:
    weights, _ = layer_of(TINY)
    folded, head_dim = fold_premix(weights["q_proj.weight"], weights["premix"]), TINY.head_dim
    group, physical = 1, 2
    virtual = group * 3 + physical
    expected = weights["q_proj.weight"][:, physical * head_dim :][:, :head_dim] @ weights["premix"][group]
    assert_close(folded[:, virtual * head_dim :][:, :head_dim], expected, FLOAT64_FOLD, "virtual head 5")


def test_postmix_matrix_is_identity_plus_b_a_transposed() -> None:
    a, b = np.array([[1.0], [2.0]]), np.array([[10.0], [20.0]])
    assert np.array_equal(postmix_matrix(a, b), [[11.0, 20.0], [20.0, 41.0]])


def test_arithmetic_is_float64_and_rounded_once() -> None:
    weights, _ = layer_of(TINY)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        low = {name: array.astype(dtype) for name, array in weights.items()}
        expected = fold({name: array.astype(np.float64) for name, array in low.items()})
        actual = fold_attention(low, shape_of(TINY), dtype, "layer")
        for name, array in actual.items():
            assert array.dtype == dtype, name
            assert np.array_equal(array, expected[name].astype(dtype)), f"{name} in {np.dtype(dtype).name}"


def test_folding_leaves_its_input_unchanged() -> None:
    weights, _ = layer_of(TINY)
    before = {name: array.copy() for name, array in weights.items()}
    fold(weights)
    assert all(np.array_equal(weights[name], before[name]) for name in before)


# Wrong folds: each must be far off, or the tests above would prove nothing


def by_head(o_proj: np.ndarray, spec: OracleSpec) -> np.ndarray:
    return o_proj.reshape(spec.num_attention_heads, spec.head_dim, -1)


def transposed_postmix(weights: Arrays, spec: OracleSpec) -> Arrays:
    postmix = np.eye(spec.num_attention_heads) + weights["postmix_b"] @ weights["postmix_a"].T
    o_proj_NHD = by_head(weights["o_proj.weight"], spec)
    wrong = np.einsum("nm,mhd->nhd", postmix, o_proj_NHD)
    return {**fold(weights, spec), "o_proj.weight": wrong.reshape(-1, spec.hidden_size)}


def skipped_postmix(weights: Arrays, spec: OracleSpec) -> Arrays:
    return {**fold(weights, spec), "o_proj.weight": weights["o_proj.weight"]}


def head_major_premix(weights: Arrays, spec: OracleSpec) -> Arrays:
    q_proj_DKPH = fold(weights, spec)["q_proj.weight"].reshape(
        spec.hidden_size, spec.num_key_value_heads, -1, spec.head_dim
    )
    return {**fold(weights, spec), "q_proj.weight": q_proj_DKPH.swapaxes(1, 2).reshape(spec.hidden_size, -1)}


def transposed_premix(weights: Arrays, spec: OracleSpec) -> Arrays:
    return fold({**weights, "premix": weights["premix"].swapaxes(1, 2)}, spec)


WRONG_FOLDS: dict[str, Callable[[Arrays, OracleSpec], Arrays]] = {
    "M transposed": transposed_postmix,
    "M left out": skipped_postmix,
    "head-major": head_major_premix,
    "premix transposed": transposed_premix,
}
SIZES = {"tiny": TINY, "paper 1.7B": PAPER_1P7B}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", WRONG_FOLDS)
def test_a_wrong_fold_is_visible(fault: str, size: str) -> None:
    spec = SIZES[size]
    weights, x = layer_of(spec)
    expected, _ = attention_forward(x, weights, spec)
    actual, _ = attention_forward(x, WRONG_FOLDS[fault](weights, spec), grouped(spec))
    assert relative_error(actual, expected) >= VISIBLE


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_with_its_norm_before_premix_does_not_fold(size: str) -> None:
    spec = SIZES[size]
    weights, x = layer_of(spec)
    expected = norm_first_forward(x, weights, spec)
    actual, _ = attention_forward(x, fold(weights, spec), grouped(spec))
    assert relative_error(actual, expected) >= VISIBLE


def norm_first_forward(x: np.ndarray, weights: Arrays, spec: OracleSpec) -> np.ndarray:
    """Another layer: QK-norm on the physical heads, then Premix."""
    B, S, _ = x.shape
    _, cache = attention_forward(x, weights, spec)
    normed, _ = ops.rms_norm(cache["q_physical"], weights["q_norm.weight"], spec.rms_norm_eps)
    q_BSNH = np.einsum("bspi,kij->bskpj", normed, weights["premix"]).reshape(B, S, -1, spec.head_dim)
    _, k_BSKH, v_BSKH, _ = cache["core"]
    y_BSNH, _ = ops.causal_attention(ops.rope(q_BSNH, cache["angles"]), k_BSKH, v_BSKH)
    y_BSNH = np.einsum("mn,bsnh->bsmh", cache["M"], y_BSNH)
    return y_BSNH.reshape(B, S, -1) @ weights["o_proj.weight"]


@pytest.mark.parametrize("order, folds", [("gate, then postmix", True), ("postmix, then gate", False)])
@pytest.mark.parametrize("size", SIZES)
def test_postmix_folds_behind_a_gate_and_not_before_it(size: str, order: str, folds: bool) -> None:
    spec = SIZES[size]
    weights, x = layer_of(spec)
    generator = np.random.default_rng(2)
    gate_DX = generator.standard_normal((spec.hidden_size, weights["o_proj.weight"].shape[0]))
    _, cache = attention_forward(x, weights, spec)
    gate_BSNH = ops.sigmoid(x @ gate_DX / np.sqrt(spec.hidden_size)).reshape(cache["y"].shape)
    if folds:
        y_BSNH = np.einsum("mn,bsnh->bsmh", cache["M"], gate_BSNH * cache["y"])
    else:
        y_BSNH = gate_BSNH * cache["y_mixed"]
    expected = y_BSNH.reshape(*x.shape[:2], -1) @ weights["o_proj.weight"]

    folded = fold(weights, spec)
    _, served = attention_forward(x, folded, grouped(spec))
    actual = (gate_BSNH * served["y"]).reshape(*x.shape[:2], -1) @ folded["o_proj.weight"]
    if folds:
        assert_close(actual, expected, FLOAT64_FOLD, "output")
    else:
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


def test_a_state_is_read_once_and_one_layer_at_a_time() -> None:
    state = LazyState(random_weights(TINY, seed=1))
    tensors = fold_state(state, shape_of(TINY), np.float64, "state")
    assert state.read == []
    for name, _ in tensors:
        if name == "model.layers.0.self_attn.q_proj.weight":
            assert len(state.read) == 2 + len(attention_tensors(shape_of(TINY)))
        if name == "model.layers.0.mlp.down_proj.weight":
            assert not any(read.startswith("model.layers.1.") for read in state.read)
    assert sorted(state.read) == sorted(state.arrays)


# Refusals


def assert_refused(weights: Arrays, *fragments: str, spec: OracleSpec = TINY) -> None:
    """A UserError of one line that holds every fragment."""
    with pytest.raises(UserError) as error:
        fold(weights, spec)
    message = str(error.value)
    assert "\n" not in message and message.startswith("layer: ")
    assert all(fragment in message for fragment in fragments), message


def changed(name: str, array: np.ndarray) -> Arrays:
    return {**layer_of(TINY)[0], name: array}


def test_a_second_fold_is_refused() -> None:
    assert_refused(fold(layer_of(TINY)[0]), "nothing to fold", "folded already?")


def test_a_second_fold_is_refused_however_the_model_is_described() -> None:
    assert_refused(fold(layer_of(TINY)[0]), "nothing to fold", "folded already?", spec=grouped(TINY))


def test_vha_weights_described_as_grouped_are_refused() -> None:
    assert_refused(layer_of(TINY)[0], "'grouped'", spec=grouped(TINY))


@pytest.mark.parametrize("name", attention_tensors(shape_of(TINY)))
def test_a_missing_tensor_is_refused_by_name(name: str) -> None:
    weights, _ = layer_of(TINY)
    del weights[name]
    assert_refused(weights, f"missing {name};")


@pytest.mark.parametrize("name", ["gate_proj.weight", "q_proj.bias", "premix_scale"])
def test_an_unexpected_tensor_is_refused_by_name(name: str) -> None:
    assert_refused(changed(name, np.ones(3)), f"unexpected {name};")


def test_a_misspelt_tensor_is_refused_with_both_names() -> None:
    weights, _ = layer_of(TINY)
    weights["postmx_b"] = weights.pop("postmix_b")
    assert_refused(weights, "missing postmix_b;", "unexpected postmx_b (did you mean postmix_b?)")


def test_a_postmix_that_the_model_does_not_declare_is_refused() -> None:
    assert_refused(layer_of(TINY)[0], "unexpected postmix_a, postmix_b", spec=PREMIX_ONLY)


@pytest.mark.parametrize("name", attention_tensors(shape_of(TINY)))
def test_a_shape_that_does_not_fit_is_refused(name: str) -> None:
    array = layer_of(TINY)[0][name]
    wider = np.concatenate([array, array], axis=-1)
    assert_refused(changed(name, wider), name, str(list(wider.shape)), str(list(array.shape)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", attention_tensors(shape_of(TINY)))
def test_a_value_that_is_not_finite_is_refused(name: str, value: float) -> None:
    weights, _ = layer_of(TINY)
    weights[name].flat[-1] = value
    assert_refused(weights, name, "not finite")


def test_bfloat16_kept_as_integers_is_refused() -> None:
    bits = layer_of(TINY)[0]["premix"].astype(ml_dtypes.bfloat16).view(np.uint16)
    assert_refused(changed("premix", bits), "premix", "uint16", "bfloat16")


def test_an_integer_result_is_refused() -> None:
    with pytest.raises(UserError, match="requested dtype is int32"):
        fold_attention(layer_of(TINY)[0], shape_of(TINY), np.int32, "layer")


def test_a_value_beyond_the_requested_dtype_is_refused() -> None:
    weights, _ = layer_of(TINY)
    weights["v_proj.weight"] *= 1e6
    with pytest.raises(UserError, match=r"v_proj\.weight exceeds the range of float16"):
        fold_attention(weights, shape_of(TINY), np.float16, "layer")


@pytest.mark.parametrize(
    "q_proj, premix",
    [((7, 18), (2, 6, 5)), ((7, 18), (6, 6)), ((7, 17), (2, 6, 6)), ((7, 3, 6), (2, 6, 6))],
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
    state = LazyState(random_weights(TINY, seed=1))
    del state.arrays["model.layers.1.self_attn.premix"]
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.self_attn\.premix;"):
        fold_state(state, shape_of(TINY), np.float64, "state")
    assert state.read == []


def test_a_folded_state_is_refused() -> None:
    shape = shape_of(TINY)
    folded = dict(fold_state(random_weights(TINY, seed=1), shape, np.float64, "state"))
    with pytest.raises(UserError, match=r"state: .*nothing to fold; is it folded already\?"):
        fold_state(folded, shape, np.float64, "state")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_a_value_of_a_state_that_is_not_finite_is_refused(name: str) -> None:
    spec = DECODERS["both untied"]
    weights = random_weights(spec, seed=1)
    weights[name].flat[0] = np.nan
    with pytest.raises(UserError, match=f"{name} holds values that are not finite"):
        dict(fold_state(weights, shape_of(spec), np.float64, "state"))


def test_one_layer_of_a_state_folds_as_that_layer_alone() -> None:
    weights = random_weights(TINY, seed=1)
    folded = dict(fold_state(weights, shape_of(TINY), np.float32, "state"))
    alone = fold_attention(attention_weights(weights, 1), shape_of(TINY), np.float32, "layer")
    for name, array in alone.items():
        assert np.array_equal(folded[f"model.layers.1.self_attn.{name}"], array), name
