"""The names and logical shapes of a decoder's tensors, here and in Hugging Face's Qwen3.

The names are the same on both sides (that is why ours were chosen); what differs is the orientation of a
linear weight: `[in, out]` here, as Paddle keeps it, and `[out, in]` there. THIS FILE IS THE ONLY PLACE WHERE
A WEIGHT IS TRANSPOSED. `premix`, `postmix_a` and `postmix_b` have no name there: fold first (`fold.py`).

Letters: D hidden, P physical heads, K key/value heads, N = P*K virtual query heads, H head dim, R postmix
rank, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vha_paddle.errors import UserError

KINDS = ("grouped", "vha")
PREMIX, POSTMIX_A, POSTMIX_B = "premix", "postmix_a", "postmix_b"
VHA_MAPS = (PREMIX, POSTMIX_A, POSTMIX_B)  # short names of the tensors that a fold removes
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_IN_LAYER = re.compile(r"model\.layers\.(?:0|[1-9][0-9]*)\.(.+)")
_LAYER_LINEARS = {f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "o")}
_LAYER_LINEARS |= {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_LAYER_GAINS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
_LAYER_GAINS |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
_LAYER_MAPS = {f"self_attn.{name}" for name in VHA_MAPS}

_NAMES_SHOWN = 5  # in an error, which is one line
_SIMILARITY = 0.8  # of a suggested name; below it two different tensors of one layer pass for each other


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What decides the names and the logical shapes of a decoder's tensors.

    Args:
        kind: "grouped" (MHA, MQA, GQA) or "vha".
        num_attention_heads: N, the query heads that attend; under "vha" the virtual ones.
        premix: whether the layers hold Premix, so that P = N / K physical heads make N virtual ones. Without
            it nothing expands the heads and `q_proj` is N heads wide.
        postmix_rank: R; 0 means that the layers hold no Postmix.
        tie_word_embeddings: whether the head is the embedding, and `lm_head.weight` absent.

    Raises:
        UserError: sizes that cannot make a decoder, or a kind that does not go with its maps.
    """

    kind: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    premix: bool
    postmix_rank: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
        for name in (*sizes, "num_attention_heads", "num_key_value_heads", "head_dim"):
            if vars(self)[name] < 1:
                raise UserError(f"{name} is {vars(self)[name]}; it must be at least 1")
        if self.postmix_rank < 0:
            raise UserError(f"postmix_rank is {self.postmix_rank}; it must be 0 (no Postmix) or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        has_maps = self.premix or self.postmix_rank > 0
        if has_maps != (self.kind == "vha"):
            raise UserError(
                f"kind is {self.kind!r} with premix={self.premix} and postmix_rank={self.postmix_rank}; "
                "vha needs at least one of the two maps, grouped has neither"
            )

    @property
    def num_projected_heads(self) -> int:
        """Heads that `q_proj` makes: P with Premix, N without."""
        heads = self.num_attention_heads
        return heads // self.num_key_value_heads if self.premix else heads

    def folded(self) -> DecoderShape:
        """The shape of the grouped decoder that the fold gives."""
        return replace(self, kind="grouped", premix=False, postmix_rank=0)


def attention_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Short name (as in `q_proj.weight`) to logical shape, for the tensors of one `self_attn`."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    heads, groups, rank = shape.num_attention_heads, shape.num_key_value_heads, shape.postmix_rank
    tensors: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (hidden, shape.num_projected_heads * head_dim),
        "k_proj.weight": (hidden, groups * head_dim),
        "v_proj.weight": (hidden, groups * head_dim),
        "o_proj.weight": (heads * head_dim, hidden),
        "q_norm.weight": (head_dim,),
        "k_norm.weight": (head_dim,),
    }
    if shape.premix:
        tensors[PREMIX] = (groups, head_dim, head_dim)
    if shape.postmix_rank:
        tensors |= {POSTMIX_A: (heads, rank), POSTMIX_B: (heads, rank)}
    return tensors


def expected_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Canonical name to logical shape, for every tensor of a decoder, in the order of its forward pass."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden)}
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
        for name, size in attention_tensors(shape).items():
            tensors[f"{prefix}self_attn.{name}"] = size
        tensors[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}mlp.gate_proj.weight"] = (hidden, ffn)
        tensors[f"{prefix}mlp.up_proj.weight"] = (hidden, ffn)
        tensors[f"{prefix}mlp.down_proj.weight"] = (ffn, hidden)
    tensors[FINAL_NORM] = (hidden,)
    if not shape.tie_word_embeddings:
        tensors[LM_HEAD] = (hidden, shape.vocab_size)
    return tensors


def to_hf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """One tensor of ours as Hugging Face's Qwen3 names and lays it out; linear weights become `[out, in]`.

    Raises:
        UserError: a name without a counterpart there, or a linear weight that is not a matrix.
    """
    return name, _reoriented(name, array)


def from_hf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """One tensor of Hugging Face's Qwen3 as we name it and lay it out; linear weights become `[in, out]`.

    Raises:
        UserError: a name without a counterpart here, or a linear weight that is not a matrix.
    """
    return name, _reoriented(name, array)


def _reoriented(name: str, array: np.ndarray) -> np.ndarray:
    """A linear weight transposed, anything else as it is; its own inverse, so it serves both directions."""
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer:
        role, linears, copied = in_layer[1], _LAYER_LINEARS, _LAYER_GAINS
    else:
        role, linears, copied = name, {LM_HEAD}, {EMBEDDING, FINAL_NORM}
    if in_layer and role in _LAYER_MAPS:
        raise UserError(f"{name} has no name in a Qwen3 model; fold the weights before converting them")
    if role in copied:
        return array
    if role not in linears:
        raise UserError(f"{name} is no tensor of a Qwen3 decoder{_suggestion(role, linears | copied)}")
    if array.ndim != 2:
        raise UserError(f"{name} has shape {list(array.shape)}; a linear weight must have two axes")
    return np.ascontiguousarray(array.T)


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
