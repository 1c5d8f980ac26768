"""The fold: trained Virtual Head Attention layers become plain grouped-query ones. Arrays are numpy's.

A physical head is q_i = x W_Q[i]; Premix makes of it one virtual head per group, q_i W_premix[g]. Both maps
are linear and nothing stands between them, so x (W_Q[i] W_premix[g]) is the same query: the products of all
pairs, in the group-major order n = g*P + i that a grouped-query kernel expects, are the query projection of
N = P*K plain heads. QK-norm and RoPE come after Premix and see no difference. On the way out Postmix mixes
the heads, y' = M y with M = I + B A^T, and out = sum_m y'[m] W_O[m], where W_O[m] is the block of H rows of
head m. Sum over m first: out = sum_n y[n] (sum_m M[m, n] W_O[m]), so the bracket is the new block n of W_O
(M transposed: the head that is read, n, is its second index). A bias of the query projection is one more row of
W_Q and goes through Premix like the others; all other tensors, the other biases too, are copied. The fold is exact
up to round-off, and only because no norm precedes Premix and no gate or activation follows Postmix: a gate on the
heads' outputs is copied where Postmix acts on what it lets through, M (gate * y), and refused where it comes after.

Weights are `[in, out]`. Letters: D hidden, P physical heads, K key/value heads (groups), N = P*K virtual
query heads, H head dim, Q width of a physical head (H unless `physical_head_dim` says otherwise), R postmix rank.
Source: arXiv 2610.17959, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vha_paddle.config import Attention, Model, VirtualHeadAttention
from vha_paddle.counts import folded, what_stays
from vha_paddle.errors import UserError
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, VHA_MAPS, account, check_shape, expected_tensors
from vha_paddle.rounding import all_finite, rounded
from vha_paddle.tensors import attention_tensors

_SELF_ATTENTION = ".self_attn."
_BLOCK_VALUES = 1 << 18  # of float64 that a fold works on at a time: 2 MiB stay in the cache, without new pages


def fold_premix(q_proj_DX: npt.ArrayLike, premix_KQH: npt.ArrayLike) -> np.ndarray:
    """Fold Premix into the query projection: block n = g*P + i is `q_proj[:, i] @ premix[g]`.

    Args:
        q_proj_DX: `[D, P*Q]`.
        premix_KQH: `[K, Q, H]`, applied from the right: `q @ premix[g]`.

    Returns:
        `[D, N*H]` in float64.

    Raises:
        UserError: shapes that do not fit.
    """
    q_proj, premix = np.asarray(q_proj_DX, np.float64), np.asarray(premix_KQH, np.float64)
    if q_proj.ndim != 2 or premix.ndim != 3 or not premix.size or q_proj.shape[1] % premix.shape[1]:
        raise UserError(
            f"q_proj {list(q_proj.shape)} and premix {list(premix.shape)} do not fit; "
            "they must be [D, P*Q] and [K, Q, H]"
        )
    q_proj_DPQ = q_proj.reshape(len(q_proj), -1, premix.shape[1])
    folded_DKPH = np.einsum("dpq,kqh->dkph", q_proj_DPQ, premix, optimize=True)
    return folded_DKPH.reshape(len(q_proj), -1)


def postmix_matrix(a_NR: npt.ArrayLike, b_NR: npt.ArrayLike) -> np.ndarray:
    """Postmix as one matrix over the heads, M = I + B A^T, for y' = M y; `[N, N]` in float64.

    Raises:
        UserError: the two factors differ in shape, or are not matrices.
    """
    a, b = np.asarray(a_NR, np.float64), np.asarray(b_NR, np.float64)
    if a.ndim != 2 or a.shape != b.shape:
        raise UserError(f"postmix_a {list(a.shape)} and postmix_b {list(b.shape)} do not fit; both must be [N, R]")
    return np.eye(len(a)) + b @ a.T


def fold_postmix(o_proj_XD: npt.ArrayLike, a_NR: npt.ArrayLike, b_NR: npt.ArrayLike) -> np.ndarray:
    """Fold Postmix into the output projection: block n of H rows becomes `sum_m M[m, n] * o_proj[m]`.

    Args:
        o_proj_XD: `[N*H, D]`.
        a_NR: `[N, R]`, what each head gives to the R channels.
        b_NR: `[N, R]`, what each head takes from them.

    Returns:
        `[N*H, D]` in float64.

    Raises:
        UserError: shapes that do not fit.
    """
    o_proj, postmix_NN = np.asarray(o_proj_XD, np.float64), postmix_matrix(a_NR, b_NR)
    heads = len(postmix_NN)
    if o_proj.ndim != 2 or o_proj.shape[0] % heads:
        raise UserError(f"o_proj {list(o_proj.shape)} does not fit a Postmix of {heads} heads; it must be [N*H, D]")
    o_proj_NHD = o_proj.reshape(heads, -1, o_proj.shape[1])
    return np.einsum("mn,mhd->nhd", postmix_NN, o_proj_NHD, optimize=True).reshape(o_proj.shape)


def fold_attention(
    tensors: Mapping[str, np.ndarray], attention: Attention, hidden_size: int, dtype: npt.DTypeLike, source: str
) -> dict[str, np.ndarray]:
    """Fold one layer's attention.

    Args:
        tensors: short name (as in `q_proj.weight`, `premix`) to floating-point array `[in, out]`.
        attention: the unfolded layer's section; it says which of Premix, Postmix and gate are there.
        hidden_size: D.
        dtype: of the result: float16, bfloat16, float32 or float64. The arithmetic is float64, rounded once.
        source: what an error calls the place that the tensors came from.

    Returns:
        The tensors of the grouped-query layer under the same short names. A tensor that the fold does not
        change and that has `dtype` already is the caller's own array.

    Raises:
        UserError: no Premix and no Postmix, a map that does not fold, a missing or unexpected tensor, a shape that
            does not fit, a dtype that is not floating point, a value that is not finite or does not fit in `dtype`.
    """
    dtype = _floating_dtype(dtype, f"{source}: the requested dtype")
    _refuse_nothing_to_fold(tensors, [attention], source)
    _refuse_what_stays(attention, "model.attention", source)
    expected = _shapes(attention, hidden_size)
    account(tensors, expected, source)
    checked = {name: _checked(name, tensors[name], expected[name], source) for name in expected}
    maps = {name: checked.pop(name) for name in VHA_MAPS if name in checked}
    return {name: _served(name, name, array, maps, dtype, source) for name, array in checked.items()}


def fold_state(
    state: Mapping[str, np.ndarray], model: Model, dtype: npt.DTypeLike, source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Fold a whole decoder, one tensor at a time; layers without maps are copied.

    The names are checked before this function returns. `state` may read an array when it is asked for it:
    each is asked for once, in the order of `expected_tensors(model)`, and one is held beside the layer's maps.

    Args:
        state: canonical name to floating-point array `[in, out]`.
        model: the unfolded model.
        dtype: of the result, as in `fold_attention`.
        source: what an error calls the state, such as its directory.

    Returns:
        An iterator over the (canonical name, array) pairs of the model that is served, `counts.folded(model)`.

    Raises:
        UserError: as `fold_attention`; for what a tensor holds, at the moment it is reached.
    """
    dtype = _floating_dtype(dtype, f"{source}: the requested dtype")
    _refuse_nothing_to_fold(state, model.attentions, source)
    check_foldable(model, source)
    account(state, expected_tensors(model), source)
    return _converted(state, model, folded(model), dtype, source)


def convert_state(
    state: Mapping[str, np.ndarray], model: Model, served: Model, dtype: npt.DTypeLike | None, source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """A whole decoder as another model that differs in nothing but maps: those that `served` does not have are folded,
    all other tensors are copied. Otherwise as `fold_state`, which calls it with `counts.folded(model)`.

    Args:
        served: the model itself, or one that the fold of some of its maps makes of it.
        dtype: as in `fold_state`; None to round nothing: what is folded is float64, all else as it is.

    Raises:
        UserError: as `fold_state`.
    """
    wanted = _floating_dtype(dtype, f"{source}: the requested dtype") if dtype is not None else None
    account(state, expected_tensors(model), source)
    return _converted(state, model, served, wanted, source)


def check_foldable(model: Model, source: str) -> None:
    """Require that every map of the model folds.

    Raises:
        UserError: one does not; the line names its key, the reason and the remedy.
    """
    for section, attention in model.attention_sections.items():
        _refuse_what_stays(attention, section, source)


def _converted(
    state: Mapping[str, np.ndarray], model: Model, served: Model, dtype: np.dtype | None, source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The generator behind the functions above, apart so that names are checked at the call, not at an item."""
    stays, maps, of_layer = expected_tensors(served), dict[str, np.ndarray](), ""
    for name, shape in expected_tensors(model).items():
        layer, _, short_name = name.partition(_SELF_ATTENTION)
        if layer != of_layer:
            maps, of_layer = {}, layer
        array = _checked(name, state[name], shape, source)
        if name in stays:
            array = _served(name, short_name, array, maps, dtype, source)
            yield name, array
        else:
            maps[short_name] = array  # a layer's maps come before what they are folded into
        del array  # not to be held while the next one is read


def _served(
    name: str, short_name: str, array: np.ndarray, maps: Mapping[str, np.ndarray], dtype: np.dtype | None, source: str
) -> np.ndarray:
    """One tensor as it is served: with the layer's maps folded into it if they are its, rounded once, if at all.

    Rows of W_Q, and columns of W_O, fold by themselves, so that what is float64 stays small.
    """
    fold_dtype = np.dtype(np.float64) if dtype is None else dtype
    if short_name == "q_proj.weight" and PREMIX in maps:
        width = maps[PREMIX].shape[0] * array.shape[1] // maps[PREMIX].shape[1] * maps[PREMIX].shape[2]
        result = np.empty((len(array), width), fold_dtype)
        for rows in _blocks(len(array), width):
            result[rows] = rounded(fold_premix(array[rows], maps[PREMIX]), fold_dtype)
    elif short_name == "q_proj.bias" and PREMIX in maps:
        result = rounded(fold_premix(array[None], maps[PREMIX])[0], fold_dtype)
    elif short_name == "o_proj.weight" and POSTMIX_A in maps:
        result = np.empty(array.shape, fold_dtype)
        for columns in _blocks(array.shape[1], len(array)):
            block = fold_postmix(array[:, columns], maps[POSTMIX_A], maps[POSTMIX_B])
            result[:, columns] = rounded(block, fold_dtype)
    else:
        result = array if dtype is None else rounded(array, dtype)
    if result is not array and not all_finite(result):
        # a value beyond the range, which would only show when it is served
        raise UserError(f"{source}: {name} exceeds the range of {result.dtype.name}; choose bfloat16 or float32")
    return result


def _blocks(count: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK_VALUES // width)
    return (slice(start, start + step) for start in range(0, count, step))


def _shapes(attention: Attention, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in attention_tensors(attention, hidden_size)}


def _refuse_nothing_to_fold(names: Iterable[str], attentions: Iterable[Attention], source: str) -> None:
    """A second fold must not pass for a first: it would copy every tensor and report success."""
    if not any(name.rpartition(".")[2] in VHA_MAPS for name in names):
        raise UserError(f"{source}: no premix and no postmix: nothing to fold; is it folded already?")
    kinds = [attention.kind for attention in attentions]
    if "vha" not in kinds:
        raise UserError(f"{source}: described as kind {kinds[0]!r}; only a vha model folds, check its kind")


def _refuse_what_stays(attention: Attention, where: str, source: str) -> None:
    """A map with something nonlinear between it and the projection that it would fold into."""
    if not isinstance(attention, VirtualHeadAttention):
        return
    for name, reason in what_stays(attention).items():
        key, value, remedy = name, "silu", "linear"
        if attention.output_gate == "after_postmix" and name == "postmix" and attention.postmix == "linear":
            key, value, remedy = "output_gate", "after_postmix", "before_postmix"
        raise UserError(
            f"{source}: {where}.{key}={value}: {reason}, so {name.capitalize()} does not fold; "
            f"train with {key}={remedy}, or use the checkpoint as it is"
        )


def _floating_dtype(dtype: npt.DTypeLike, what: str) -> np.dtype:
    """Only floating point: bfloat16 kept as bare uint16 patterns would be read as numbers up to 65535."""
    dtype = np.dtype(dtype)
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise UserError(f"{what} is {dtype.name}; it must be floating point (view bfloat16 patterns as bfloat16)")
    return dtype


def _checked(name: str, array: np.ndarray, expected: tuple[int, ...], source: str) -> np.ndarray:
    """The array, once its shape, dtype and values are known to be sound."""
    check_shape(name, array.shape, expected, source)
    _floating_dtype(array.dtype, f"{source}: the dtype of {name}")
    if not all_finite(array):
        raise UserError(f"{source}: {name} holds values that are not finite; use an earlier checkpoint")
    return array
