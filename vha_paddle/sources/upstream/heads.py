"""One layer's attention as it is stored: which parts it has, how wide they are, and where ours are in it.

    stored                         ours
    q_proj k_proj v_proj o_proj    the same
    qkv_proj, of the fork          q_proj, k_proj, v_proj: by key/value group P/K query heads (then N/K gate heads, if
                                   it is gated), the key head and the value head. Physical head p is head p % (P/K) of
                                   group p // (P/K)
    gate_proj                      g_proj
    vha_premix_weight [K, Q, H]    premix, applied from the right
    vha_postmix_U     [N, R]       postmix_a
    vha_postmix_V     [N, R]       postmix_b: y' = (I + V U^T) y

Letters: D hidden, N virtual heads, P physical heads, K key/value heads, H head dim, Q width of a physical head, R rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vha_paddle.config import VirtualHeadAttention
from vha_paddle.errors import UserError
from vha_paddle.sources.upstream.config import UpstreamConfig
from vha_paddle.sources.upstream.kinds import POSTMIX_A, POSTMIX_B, PREMIX, Kind
from vha_paddle.sources.upstream.stored import Part, Stored

Parts = dict[str, tuple[Part, ...]]
"""What the tensors of ours are made of, by canonical name (or the name within a layer): one part each, several for
experts that are stacked, none for zeros."""

_SINK = "core_attention.softmax_offset"
_QK_GAINS = ("q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Heads:
    """What a layer's tensors say of its attention."""

    num_virtual: int
    num_kv: int
    head_dim: int
    physical_head_dim: int
    has_premix: bool
    rank: int | None
    """Of Postmix; None where there is none."""
    has_gate: bool
    has_qk_norm: bool
    has_bias: bool
    has_sink: bool
    """Of -inf, which adds nothing; others are refused."""

    @property
    def num_physical(self) -> int:
        """Heads that W_Q makes."""
        return self.num_virtual // self.num_kv if self.has_premix else self.num_virtual

    @property
    def is_ordered(self) -> bool:
        """Whether a norm stands beside Premix, so that their order matters."""
        return self.has_premix and self.has_qk_norm

    def attention(self, gate_before_postmix: bool) -> VirtualHeadAttention:
        """As this package configures it."""
        values: dict[str, Any] = {}
        if not self.has_premix:
            values["premix"] = "none"
        elif self.physical_head_dim != self.head_dim:
            values |= {"physical_head_dim": self.physical_head_dim, "premix_init": "orthogonal"}
        if self.has_gate:
            values["output_gate"] = "before_postmix" if gate_before_postmix else "after_postmix"
        return VirtualHeadAttention(
            num_attention_heads=self.num_virtual,
            num_key_value_heads=self.num_kv,
            head_dim=self.head_dim,
            postmix="none" if self.rank is None else "linear",
            postmix_rank=self.rank,
            qk_norm=self.has_qk_norm,
            attention_bias=self.has_bias,
            **values,
        )


class AttentionReader:
    """Of one layer; `heads` and `parts` are the result.

    Raises:
        UserError: a tensor is missing, has a shape that does not go with the others, or has no place in this package.
    """

    def __init__(self, stored: Stored, kind: Kind, prefix: str, hidden_size: int, config: UpstreamConfig) -> None:
        """
        Args:
            prefix: of the layer's attention, up to `self_attn.`.
        """
        self.stored, self.kind, self.prefix, self.D = stored, kind, prefix, hidden_size
        self.parts: Parts = {}
        maps = self._maps()
        self.heads = self._fused_heads(maps, config) if kind.has_fused_qkv else self._separate_heads(maps)
        self._check_maps()
        if kind.has_fused_qkv:
            self._split_qkv()
        else:
            self._take_projections()
        self._take_rest()

    def _maps(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the maps that are there, checked for themselves."""
        shapes = {name: self.stored.shape(self.prefix + name) for name in self._present(PREMIX, POSTMIX_A, POSTMIX_B)}
        if (POSTMIX_A in shapes) != (POSTMIX_B in shapes):
            there, lost = (POSTMIX_A, POSTMIX_B) if POSTMIX_A in shapes else (POSTMIX_B, POSTMIX_A)
            raise self._refusal(there, f"stands without {self.prefix}{lost}; Postmix needs both")
        for name, axes in ((PREMIX, 3), (POSTMIX_A, 2), (POSTMIX_B, 2)):
            if name in shapes and (len(shapes[name]) != axes or not all(shapes[name])):
                raise self._refusal(name, f"has shape {list(shapes[name])}; it must have {axes} axes")
        if not shapes:
            raise UserError(
                f"{self.stored.path}: {self.prefix.rstrip('.')} has neither Premix nor Postmix, unlike other layers; "
                "it cannot be read"
            )
        return shapes

    def _separate_heads(self, maps: dict[str, tuple[int, ...]]) -> Heads:
        """Of a layer with projections of their own, which always has all maps."""
        for name in (PREMIX, POSTMIX_A):
            self.stored.shape(self.prefix + name)
        K, Q, H = maps[PREMIX]
        N, R = maps[POSTMIX_A]
        return self._heads(N, K, H, Q, has_premix=True, rank=R, has_gate=bool(self._present("gate_proj.weight")))

    def _fused_heads(self, maps: dict[str, tuple[int, ...]], config: UpstreamConfig) -> Heads:
        """Of a layer of the fork, where each map may be absent."""
        rows, width = self.stored.matrix(self.prefix + "o_proj.weight")[0], self._width("qkv_proj.weight")
        rank = maps[POSTMIX_A][1] if POSTMIX_A in maps else None
        if PREMIX in maps:
            K, Q, H = maps[PREMIX]
            N = rows // H
        else:
            K = config.count("num_key_value_heads", "without Premix the tensors do not tell the key/value heads")
            N = maps[POSTMIX_A][0]
            Q = H = rows // N
        heads = self._heads(N, K, H, Q, has_premix=PREMIX in maps, rank=rank, has_gate=False)
        projected = (heads.num_physical + 2 * K) * Q
        if width == projected + N * H:
            return replace(heads, has_gate=True)
        if width == projected + heads.num_physical * H:
            raise self._refusal(
                "qkv_proj.weight",
                f"has {width} columns: a gate of {heads.num_physical} heads, where attention has {N}; the fork's code "
                "cannot multiply the two",
            )
        if width != projected:
            raise self._refusal(
                "qkv_proj.weight",
                f"has {width} columns; {heads.num_physical} query heads and 2 x {K} key and value heads of {H} have "
                f"{projected}, and {projected + N * H} with a gate",
            )
        return heads

    def _heads(self, N: int, K: int, H: int, Q: int, has_premix: bool, rank: int | None, has_gate: bool) -> Heads:
        """What does not depend on how the projections are stored."""
        if not K or N % K:
            raise self._refusal(
                PREMIX if has_premix else POSTMIX_A,
                f"and o_proj make {N} heads of {K} key/value heads; that must divide",
            )
        if self.kind.has_fused_qkv and Q != H:
            raise self._refusal(PREMIX, f"has matrices of {Q} x {H}; the fork's are square")
        gains = self._present(*_QK_GAINS)
        if len(gains) == 1:
            raise self._refusal(gains[0], "stands alone; queries and keys both have a norm or neither has")
        biases = self._present("qkv_proj.bias", "q_proj.bias", "k_proj.bias", "v_proj.bias")
        has_sink = bool(self._present(_SINK))
        return Heads(N, K, H, Q, has_premix, rank, has_gate, bool(gains), bool(biases), has_sink)

    def _check_maps(self) -> None:
        heads, prefix = self.heads, self.prefix
        N, K, H = heads.num_virtual, heads.num_kv, heads.head_dim
        if heads.rank is not None:
            for name in (POSTMIX_A, POSTMIX_B):
                self.stored.check_shape(prefix + name, (N, heads.rank), f"{N} heads need it")
        if heads.has_qk_norm:
            for name, count in (("q_norm.weight", N), ("k_norm.weight", K)):
                if count > 1 and self.stored.shape(prefix + name) == (count * H,):
                    raise self._refusal(
                        name,
                        f"has {count * H} values: qk_norm_type per_layer, one norm over all {count} heads; what a fold "
                        "makes of one head would change the norm of all, and stock models have none",
                    )
                self.stored.check_shape(prefix + name, (H,), f"a norm per head of {H} channels has it")
        if heads.has_sink:
            self._leave_neutral_sink()

    def _leave_neutral_sink(self) -> None:
        """A sink adds exp(offset) to the denominators of the softmax: nothing where it is -inf."""
        name = self.prefix + _SINK
        if not bool((self.stored.read(name) == -math.inf).all()):
            raise self._refusal(
                _SINK,
                "is a learned attention sink, which adds to the denominator of every softmax; no stock Qwen3 has one",
            )
        self.stored.leave(name, "an attention sink of -inf in every head, which adds nothing")

    def _split_qkv(self) -> None:
        """The fork's fused projection, and its bias."""
        heads = self.heads
        K, H, gates = heads.num_kv, heads.head_dim, heads.num_virtual // heads.num_kv if heads.has_gate else 0
        if heads.num_physical % K:
            raise self._refusal(
                "qkv_proj.weight",
                f"has {heads.num_physical} query heads for {K} groups; the fork stores as many in each",
            )
        queries = heads.num_physical // K
        width = queries + gates + 2
        self.stored.check_shape(self.prefix + "qkv_proj.weight", (self.D, K * width * H), "the heads need it")
        columns: dict[str, int | slice] = {"q_proj": slice(0, queries), "k_proj": width - 2, "v_proj": width - 1}
        if gates:
            columns["g_proj"] = slice(queries, queries + gates)
        for name, column in columns.items():
            weight = self.stored.use(self.prefix + "qkv_proj.weight")
            every = slice(None)
            self.parts[f"{name}.weight"] = (Part(weight, (self.D, K, width, H), (every, every, column)),)
            if heads.has_bias and name != "g_proj":
                bias = self.stored.use(self.prefix + "qkv_proj.bias")
                self.parts[f"{name}.bias"] = (Part(bias, (K, width, H), (every, column)),)
        if heads.has_bias and gates:
            raise self._refusal("qkv_proj.bias", "gives the gate a bias, which no gate of this package has")

    def _take_projections(self) -> None:
        heads = self.heads
        N, K, H = heads.num_virtual, heads.num_kv, heads.head_dim
        values = self._width("v_proj.weight")
        if values != K * H and values % K == 0:
            raise self._refusal(
                "v_proj.weight",
                f"makes {K} value heads of {values // K} channels (v_head_dim) beside key heads of {H}; a stock Qwen3 "
                "has one head_dim",
            )
        for name, columns in (
            ("q_proj", heads.num_physical * heads.physical_head_dim),
            ("k_proj", K * H),
            ("v_proj", K * H),
        ):
            self.parts[f"{name}.weight"] = (self._linear(f"{name}.weight", self.D, columns),)
            if heads.has_bias:
                self.stored.check_shape(f"{self.prefix}{name}.bias", (columns,), "its projection needs it")
                self.parts[f"{name}.bias"] = (Part(self.stored.use(f"{self.prefix}{name}.bias")),)
        if heads.has_gate:
            self.parts["g_proj.weight"] = (self._linear("gate_proj.weight", self.D, N * H),)
        if self._present("gate_proj.bias"):
            raise self._refusal("gate_proj.bias", "no gate of this package has a bias")

    def _take_rest(self) -> None:
        """Maps, norms and the output projection."""
        heads = self.heads
        names = {POSTMIX_A: "postmix_a", POSTMIX_B: "postmix_b"} if heads.rank is not None else {}
        if heads.has_premix:
            names[PREMIX] = "premix"
        if heads.has_qk_norm:
            names |= {name: name for name in _QK_GAINS}
        for theirs, ours in names.items():
            self.parts[ours] = (Part(self.stored.use(self.prefix + theirs)),)
        self.parts["o_proj.weight"] = (self._linear("o_proj.weight", heads.num_virtual * heads.head_dim, self.D),)
        has_output_bias = bool(self._present("o_proj.bias"))
        if has_output_bias and not heads.has_bias:
            raise self._refusal("o_proj.bias", "stands without biases of q, k and v; here all four have one or none")
        if has_output_bias:
            self.stored.check_shape(self.prefix + "o_proj.bias", (self.D,), "its projection needs it")
            self.parts["o_proj.bias"] = (Part(self.stored.use(self.prefix + "o_proj.bias")),)
        elif heads.has_bias:
            self.parts["o_proj.bias"] = ()

    def _linear(self, name: str, rows: int, columns: int) -> Part:
        """A linear weight, `[rows, columns]` here."""
        shape = (columns, rows) if self.kind.is_out_in else (rows, columns)
        self.stored.check_shape(self.prefix + name, shape, "the shapes of VHA's maps and of the embedding need it")
        return Part(self.stored.use(self.prefix + name), is_transposed=self.kind.is_out_in)

    def _width(self, name: str) -> int:
        """Output channels of a linear weight."""
        return self.stored.matrix(self.prefix + name)[0 if self.kind.is_out_in else 1]

    def _present(self, *names: str) -> list[str]:
        return [name for name in names if self.prefix + name in self.stored]

    def _refusal(self, name: str, fault: str) -> UserError:
        return UserError(f"{self.stored.path}: {self.stored.name(self.prefix + name)} {fault}; it cannot be read")
