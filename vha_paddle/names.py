"""The names of a decoder's tensors in a Hugging Face directory, and their layout there.

Outside the experts the names are the same on both sides (that is why ours were chosen); what differs is the
orientation of a linear weight: `[in, out]` here, as Paddle keeps it, and `[out, in]` there. The experts of a layer are
one tensor `[E, in, out]` here and E matrices there. THIS FILE IS THE ONLY PLACE WHERE A STORED WEIGHT IS TRANSPOSED OR
ITS CHANNELS PUT IN ANOTHER ORDER. Which tensors a model has is said by `tensors.py` alone; whose names are used, by a
`Naming`:

    QWEN3          Qwen3, Qwen3-MoE, Llama. What VHA adds (`premix`, `postmix_a`, `postmix_b`) has no name there:
                   fold first (`fold.py`).
    deepseek(mla)  DeepSeek-V2 and V3, which turn channels 2j and 2j + 1 of RoPE together, as readers other than
                   transformers insist; here j and j + R/2 are turned. So the rows of W_Q and W_KVA interleave there.
    UNFOLDED       ours, for a model that is written as it was trained: every tensor of every kind.

Letters: D hidden, F feed-forward, E experts, R rotary channels.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vha_paddle.config import LatentAttention, Model
from vha_paddle.contiguous import transposed
from vha_paddle.errors import UserError
from vha_paddle.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, model_tensors

PREMIX, POSTMIX_A, POSTMIX_B = "premix", "postmix_a", "postmix_b"
VHA_MAPS = (PREMIX, POSTMIX_A, POSTMIX_B)  # short names of the tensors that a fold removes

Role = Literal["copied", "linear", "experts"]

_IN_LAYER = re.compile(r"(model\.layers\.(?:0|[1-9][0-9]*)\.)(.+)")
_EXPERTS = "mlp.experts."
_SHARED_EXPERT = "mlp.shared_expert."
_OUTER_ROLES: dict[str, Role] = {EMBEDDING: "copied", FINAL_NORM: "copied", LM_HEAD: "linear"}
_AXES: dict[Role, int] = {"linear": 2, "experts": 3}
_LAYER_MAPS = {f"self_attn.{name}" for name in VHA_MAPS}

_NAMES_SHOWN = 5  # in an error, which is one line
_SIMILARITY = 0.8  # of a suggested name; below it two different tensors of one layer pass for each other


@dataclass(frozen=True)
class Naming:
    """How a class of models names the tensors of a layer, and how it lays them out."""

    owner: str
    """Whose they are, as an error calls it."""
    roles: Mapping[str, Role]
    """What becomes of a tensor, by its canonical name within the layer."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """First part of a canonical name within the layer, and what stands there in its place."""
    rotary: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Weights whose rotary channels interleave there, by canonical name within the layer: of each head (or of all that
    there is), the channels before them and their number R."""
    head_is_written: bool = False
    """A tied embedding is written once more as output projection, for readers that tie nothing."""

    def role(self, name: str) -> Role:
        """What becomes of a tensor there.

        Raises:
            UserError: it has no counterpart.
        """
        in_layer = _IN_LAYER.fullmatch(name)
        short, roles = (in_layer[2], self.roles) if in_layer else (name, _OUTER_ROLES)
        if in_layer and short in _LAYER_MAPS and short not in roles:
            raise UserError(f"{name} has no name in a {self.owner} model; fold the weights before converting them")
        if short not in roles:
            raise UserError(f"{name} is no tensor of a {self.owner} decoder{_suggestion(short, roles)}")
        return roles[short]

    def name(self, name: str) -> str:
        """A canonical name as it is there."""
        for before, after in self.renamed.items():
            name = name.replace(f".{before}", f".{after}")
        return name

    def rows(self, name: str, num_rows: int) -> np.ndarray | None:
        """Of a weight `[out, in]` there, which output channel of ours each row is; None where they are in order."""
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None or in_layer[2] not in self.rotary:
            return None
        content, rotary = self.rotary[in_layer[2]]
        head = np.arange(content + rotary)
        head[content:] = content + np.arange(rotary).reshape(2, -1).T.reshape(-1)  # 0, R/2, 1, R/2 + 1, ...
        first = np.arange(0, num_rows, content + rotary)
        return (first[:, None] + head).reshape(-1)


def _linears(*names: str) -> dict[str, Role]:
    return {f"{name}.weight": "linear" for name in names}


def _copied(*names: str) -> dict[str, Role]:
    return {name: "copied" for name in names}


_DENSE = _linears("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_MIXTURE: dict[str, Role] = {
    **_linears("mlp.gate"),  # the router
    **{f"{_EXPERTS}{part}_proj": "experts" for part in ("gate", "up", "down")},
}
_SHARED = _linears(*(f"{_SHARED_EXPERT}{part}_proj" for part in ("gate", "up", "down")))
_NORMS = _copied("input_layernorm.weight", "post_attention_layernorm.weight")
_GROUPED: dict[str, Role] = {
    **_linears(*(f"self_attn.{part}_proj" for part in "qkvo")),
    **_copied(*(f"self_attn.{part}_proj.bias" for part in "qkvo")),
    **_copied("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}
_LATENT: dict[str, Role] = {
    **_linears(*(f"self_attn.{part}_proj" for part in ("q", "q_a", "q_b", "kv_b", "o"))),
    **_linears("self_attn.kv_a_proj_with_mqa"),
    **_copied("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
}
_OTHER_KINDS: dict[str, Role] = {
    **_copied(*_LAYER_MAPS),
    **_linears(*(f"self_attn.{part}_proj" for part in ("g", "k_rope", "compose", "diagonal"))),
    **_copied(*(f"self_attn.{name}" for name in ("key_map", "pre_compose", "post_compose", "compose_factors"))),
}

QWEN3 = Naming("Qwen3", {**_GROUPED, **_DENSE, **_MIXTURE, **_NORMS})
UNFOLDED = Naming("vha_paddle", {**_GROUPED, **_LATENT, **_OTHER_KINDS, **_DENSE, **_MIXTURE, **_SHARED, **_NORMS})


def deepseek(attention: LatentAttention, tied: bool) -> Naming:
    """DeepSeek-V2's and V3's names and layout; `tied` where the embedding is the output projection."""
    head = (attention.qk_nope_head_dim, attention.qk_rope_head_dim)
    return Naming(
        "DeepSeek",
        {**_LATENT, **_DENSE, **_MIXTURE, **_SHARED, **_NORMS},
        renamed={_SHARED_EXPERT: "mlp.shared_experts."},
        rotary={
            "self_attn.q_proj.weight": head,
            "self_attn.q_b_proj.weight": head,
            "self_attn.kv_a_proj_with_mqa.weight": (attention.kv_lora_rank, attention.qk_rope_head_dim),
        },
        head_is_written=tied,
    )


def expected_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """Canonical name to logical shape, for every tensor of a decoder, in the order of its forward pass."""
    return {spec.name: spec.shape for spec in model_tensors(model)}


def hf_tensors(name: str, shape: Sequence[int], naming: Naming = QWEN3) -> dict[str, tuple[int, ...]]:
    """What one tensor of ours becomes: name to shape in a Hugging Face directory.

    Args:
        name: canonical name.
        shape: logical shape.
        naming: whose names and layout.

    Raises:
        UserError: a name without a counterpart there, or a weight with another number of axes.
    """
    role, there = naming.role(name), naming.name(name)
    if role == "copied":
        again = [LM_HEAD] if name == EMBEDDING and naming.head_is_written else []
        return dict.fromkeys([there, *again], tuple(shape))
    if len(shape) != _AXES[role]:
        what = {"linear": "a linear weight must have two axes", "experts": "experts must be [E, in, out]"}[role]
        raise UserError(f"{name} has shape {list(shape)}; {what}")
    turned = (shape[-1], shape[-2])
    if role == "linear":
        return {there: turned}
    before, _, part = there.rpartition(".")
    return {f"{before}.{expert}.{part}.weight": turned for expert in range(shape[0])}


def to_hf(name: str, array: np.ndarray, naming: Naming = QWEN3) -> Iterator[tuple[str, np.ndarray]]:
    """One tensor of ours as it is named and laid out there: the tensors of `hf_tensors`, one at a time. A matrix is a
    view of ours, not in C order: who writes it copies it anyway (`contiguous.py`).

    Raises:
        UserError: as `hf_tensors`.
    """
    names = hf_tensors(name, array.shape, naming)
    if naming.role(name) == "copied":
        yield from ((hf_name, array) for hf_name in names)
        return
    matrices = array if array.ndim == _AXES["experts"] else array[None]
    rows = naming.rows(name, array.shape[-1])
    for hf_name, matrix in zip(names, matrices, strict=True):
        yield hf_name, (matrix if rows is None else matrix[:, rows]).T


def from_hf(name: str, shape: Sequence[int], theirs: Mapping[str, np.ndarray], naming: Naming = QWEN3) -> np.ndarray:
    """One tensor of ours out of those that a directory has in its place; the inverse of `to_hf`.

    Args:
        name: canonical name.
        shape: logical shape.
        theirs: holds at least the tensors of `hf_tensors`, in their shapes; others are not asked for.
        naming: whose names and layout.

    Raises:
        UserError: as `hf_tensors`.
    """
    parts = [theirs[hf_name] for hf_name in hf_tensors(name, shape, naming)]
    role = naming.role(name)
    if role == "experts":
        return np.stack([transposed(part) for part in parts])
    if role == "copied":
        return parts[0]
    rows = naming.rows(name, len(parts[0]))
    return transposed(parts[0] if rows is None else parts[0][np.argsort(rows)])


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
