"""The names of a decoder's tensors in Hugging Face's Qwen3 and Qwen3-MoE, and their orientation there.

Outside the experts the names are the same on both sides (that is why ours were chosen); what differs is the
orientation of a linear weight: `[in, out]` here, as Paddle keeps it, and `[out, in]` there. The experts of a layer are
one tensor `[E, in, out]` here and E matrices there. THIS FILE IS THE ONLY PLACE WHERE A WEIGHT IS TRANSPOSED.
What VHA adds (`premix`, `postmix_a`, `postmix_b`) has no name there: fold first (`fold.py`). Which tensors a model has
is said by `tensors.py` alone.

Letters: D hidden, F feed-forward, E experts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from vha_paddle.config import Model
from vha_paddle.errors import UserError
from vha_paddle.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, model_tensors

PREMIX, POSTMIX_A, POSTMIX_B = "premix", "postmix_a", "postmix_b"
VHA_MAPS = (PREMIX, POSTMIX_A, POSTMIX_B)  # short names of the tensors that a fold removes

Role = Literal["copied", "linear", "experts"]

_IN_LAYER = re.compile(r"(model\.layers\.(?:0|[1-9][0-9]*)\.)(.+)")
_EXPERTS = "mlp.experts."
_LAYER_ROLES: dict[str, Role] = {
    **{f"self_attn.{part}_proj.weight": "linear" for part in ("q", "k", "v", "o")},
    **{f"self_attn.{part}_proj.bias": "copied" for part in ("q", "k", "v", "o")},
    **{f"mlp.{part}_proj.weight": "linear" for part in ("gate", "up", "down")},
    "mlp.gate.weight": "linear",  # the router
    **{f"{_EXPERTS}{part}_proj": "experts" for part in ("gate", "up", "down")},
    "input_layernorm.weight": "copied",
    "post_attention_layernorm.weight": "copied",
    "self_attn.q_norm.weight": "copied",
    "self_attn.k_norm.weight": "copied",
}
_OUTER_ROLES: dict[str, Role] = {EMBEDDING: "copied", FINAL_NORM: "copied", LM_HEAD: "linear"}
_AXES: dict[Role, int] = {"linear": 2, "experts": 3}
_LAYER_MAPS = {f"self_attn.{name}" for name in VHA_MAPS}

_NAMES_SHOWN = 5  # in an error, which is one line
_SIMILARITY = 0.8  # of a suggested name; below it two different tensors of one layer pass for each other


def expected_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """Canonical name to logical shape, for every tensor of a decoder, in the order of its forward pass."""
    return {spec.name: spec.shape for spec in model_tensors(model)}


def hf_tensors(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """What one tensor of ours becomes: name to shape, as Hugging Face's Qwen3 or Qwen3-MoE has it.

    Args:
        name: canonical name.
        shape: logical shape.

    Raises:
        UserError: a name without a counterpart there, or a weight with another number of axes.
    """
    role = _role(name)
    if role == "copied":
        return {name: tuple(shape)}
    if len(shape) != _AXES[role]:
        what = {"linear": "a linear weight must have two axes", "experts": "experts must be [E, in, out]"}[role]
        raise UserError(f"{name} has shape {list(shape)}; {what}")
    transposed = (shape[-1], shape[-2])
    if role == "linear":
        return {name: transposed}
    before, _, part = name.rpartition(".")
    return {f"{before}.{expert}.{part}.weight": transposed for expert in range(shape[0])}


def to_hf(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """One tensor of ours as Hugging Face names and lays it out: the tensors of `hf_tensors`, one at a time.

    Raises:
        UserError: as `hf_tensors`.
    """
    names = hf_tensors(name, array.shape)
    if _role(name) == "copied":
        yield name, array
        return
    matrices = array if array.ndim == _AXES["experts"] else array[None]
    for hf_name, matrix in zip(names, matrices, strict=True):
        yield hf_name, np.ascontiguousarray(matrix.T)


def from_hf(name: str, shape: Sequence[int], theirs: Mapping[str, np.ndarray]) -> np.ndarray:
    """One tensor of ours out of those that Hugging Face has in its place; the inverse of `to_hf`.

    Args:
        name: canonical name.
        shape: logical shape.
        theirs: holds at least the tensors of `hf_tensors`, in their shapes; others are not asked for.

    Raises:
        UserError: as `hf_tensors`.
    """
    parts = [theirs[hf_name] for hf_name in hf_tensors(name, shape)]
    role = _role(name)
    if role == "experts":
        return np.stack([part.T for part in parts])
    return np.ascontiguousarray(parts[0].T) if role == "linear" else parts[0]


def _role(name: str) -> Role:
    """What becomes of a tensor there; refuses one without a counterpart."""
    in_layer = _IN_LAYER.fullmatch(name)
    short, roles = (in_layer[2], _LAYER_ROLES) if in_layer else (name, _OUTER_ROLES)
    if in_layer and short in _LAYER_MAPS:
        raise UserError(f"{name} has no name in a Qwen3 model; fold the weights before converting them")
    if short not in roles:
        raise UserError(f"{name} is no tensor of a Qwen3 decoder{_suggestion(short, roles)}")
    return roles[short]


def account(found: Iterable[str], expected: Iterable[str], source: str) -> None:
    """Require that the tensors of `source` are exactly the expected ones.

    Raises:
        UserError: tensors missing or unexpected; both are named, with the name that was probably meant.
    """
    found, expected = list(found), list(expected)
    have, want = set(found), set(expected)
    missing = [name for name in expected if name not in have]
    unexpected = [name for name in found if name not in want]
    faults = []
    if missing:
        faults.append(f"missing {_listed(missing)}")
    if unexpected:
        hints = [name + _suggestion(name, missing) for name in unexpected[:_NAMES_SHOWN]]
        faults.append(f"unexpected {_listed(hints + unexpected[_NAMES_SHOWN:])}")
    if faults:
        raise UserError(f"{source}: {'; '.join(faults)}; it must hold exactly the described model's tensors")


def check_shape(name: str, actual: Sequence[int], expected: Sequence[int], source: str) -> None:
    """Require one tensor's shape.

    Raises:
        UserError: the shapes differ; the line names the tensor and both shapes.
    """
    if tuple(actual) != tuple(expected):
        raise UserError(
            f"{source}: {name} has shape {list(actual)}, the described model needs {list(expected)}; "
            "check the sizes in its configuration"
        )


def _listed(names: Sequence[str]) -> str:
    """The first few names and the count of the others."""
    others = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {others} more" if others > 0 else "")


def _suggestion(name: str, candidates: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest candidate, or nothing."""
    close = difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=_SIMILARITY)
    return f" (did you mean {close[0]}?)" if close else ""
