"""The models of the cells: shapes, attention kinds, feed-forward. Letters as in docs/glossary.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from tools.recipe_book.values import Scalar, Section, Value, assumed, derived, paper, plain, upstream
from vha_paddle.config import Attention
from vha_paddle.tensors import attention_tensors

_ATTENTION: TypeAdapter[Attention] = TypeAdapter(Attention)
_PUBLIC = "public Qwen3-30B-A3B"
_GATE = "not stated; Qwen3 has none"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size of model; `heads` and `kv_heads` are those of its grouped-query baseline."""

    label: str
    architecture: Value
    layers: Value
    hidden: Value
    heads: Value
    kv_heads: Value
    head_dim: Value
    lr: Value
    tied: Value
    intermediate: Value | None = None
    experts: Section | None = None

    def known(self, value: Scalar, note: str = "") -> Value:
        """A value that the research configs hold, which are those of the dense models."""
        if self.experts is None:
            return upstream(value, note)
        return assumed(value, "as in the dense models" + f"; {note}" * bool(note))


_QWEN3 = paper("qwen3", "of the runs on 50B tokens")
_ARCHITECTURE = assumed("qwen3", "the paper says it of the runs on 50B tokens")


def _dense(label: str, layers: int, hidden: int, intermediate: Value, heads: int, lr: float, head_dim: Value) -> Scale:
    return Scale(
        label=label,
        architecture=_QWEN3,
        layers=upstream(layers),
        hidden=upstream(hidden),
        intermediate=intermediate,
        heads=upstream(heads),
        kv_heads=paper(8),
        head_dim=head_dim,
        lr=upstream(lr),
        tied=upstream(True),
    )


def _experts(width: Value, why: str) -> Section:
    return {
        "num_experts": assumed(128, why),
        "num_experts_per_tok": assumed(8, why),
        "moe_intermediate_size": width,
        "norm_topk_prob": assumed(True, why),
        "shared_expert_intermediate_size": assumed(0, f"{why}: no shared expert"),
        "router_aux_loss_coef": assumed(1e-3, f"{why}: balanced over the global batch"),
    }


def _small_moe(label: str, architecture: Value, layers: int, kv_heads: Value, target: str) -> Scale:
    like = f"unknown; like {_PUBLIC}"
    return Scale(
        label=label,
        architecture=architecture,
        layers=assumed(layers, f"unknown; with the widths below it gives about {target}"),
        hidden=assumed(1536, "unknown; between 0.6B's and 1.7B's"),
        heads=assumed(16, "unknown; as at 0.6B and 1.7B"),
        kv_heads=kv_heads,
        head_dim=assumed(128, "unknown; as in the dense models"),
        lr=assumed(2e-4, "unknown; as at 1.7B and 4B"),
        tied=assumed(True, "unknown; as in the dense models"),
        experts=_experts(assumed(512, f"unknown; gives about {target}"), like),
    )


_BASELINE_8B = "GQA-8 as at the other scales; a cache of 'a quarter to half' of GQA's would also allow 4 here"
SCALES = {
    "0p6b": _dense("0.6B", 28, 1024, upstream(3072), 16, 2.5e-4, upstream(128)),
    "1p7b": _dense("1.7B", 28, 2048, upstream(6144, "the paper's table of FLOPs fits 5504"), 16, 2e-4, paper(128)),
    "4b": _dense("4B", 36, 2560, upstream(9728), 32, 2e-4, upstream(128)),
    "8b_a1b": _small_moe("8B-A1B", _QWEN3, 26, assumed(8, _BASELINE_8B), "8B in total, 1B active"),
    "10b_a1b": _small_moe("10B-A1B", _ARCHITECTURE, 32, paper(4), "10B in total, 1B active"),
    "30b_a3b": Scale(
        label="30B-A3B",
        architecture=_ARCHITECTURE,
        layers=assumed(48, f"{_PUBLIC}; the paper's whole shape is unknown"),
        hidden=assumed(2048, _PUBLIC),
        heads=assumed(48, f"as many as the paper's VHA model has virtual heads; {_PUBLIC} has 32"),
        kv_heads=paper(4),
        head_dim=assumed(128, _PUBLIC),
        lr=assumed(2e-4, "unknown; as at 1.7B and 4B"),
        tied=assumed(False, _PUBLIC),
        experts=_experts(assumed(768, _PUBLIC), _PUBLIC),
    ),
}


def grouped(heads: Value, kv_heads: Value, head_dim: Value) -> dict[str, Value]:
    return {
        "kind": paper("grouped"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "output_gate": assumed(False, _GATE),
    }


def vha(heads: Value, rank: Value, head_dim: Value, **changes: Value) -> dict[str, Value]:
    """VHA with two KV heads; `changes` replaces or adds keys."""
    virtual = f"virtual: {int(heads.value) // 2} physical heads, seen by 2 groups"
    return {
        "kind": paper("vha"),
        "num_attention_heads": replace(heads, why="; ".join(filter(None, (heads.why, virtual)))),
        "num_key_value_heads": paper(2),
        "head_dim": head_dim,
        "premix": paper("linear"),
        "postmix": paper("linear"),
        "postmix_rank": rank,
        "premix_init": upstream("scaled", "I + 0.1/sqrt(128) * normal; the paper's Table 12 lists it without the root"),
        "premix_init_noise": paper(0.1),
        "postmix_init_std": upstream(0.01, "of A; B starts at zero (paper)"),
        "postmix_space": upstream("activation"),
        "output_gate": assumed("none", _GATE),
    } | changes


def without(section: dict[str, Value], *keys: str) -> dict[str, Value]:
    return {key: value for key, value in section.items() if key not in keys}


def mla(scale: Scale) -> Section:
    def section(heads: Value) -> Section:
        return {
            "kind": assumed("mla", "the paper says MLA; its form here is DeepSeek-V2's (docs/attention.md)"),
            "num_attention_heads": heads,
            "kv_lora_rank": paper(512),
            "qk_nope_head_dim": assumed(128, "unknown; DeepSeek-V2's"),
            "qk_rope_head_dim": derived(64, "with the 512 it gives the paper's 1.12 KB a token and layer"),
            "v_head_dim": assumed(128, "unknown; DeepSeek-V2's. No q_lora_rank: as in DeepSeek-V2-Lite"),
        }

    return _matched(scale, section)


def mfa(scale: Scale) -> Section:
    latent = int(scale.hidden.value) // 2

    def section(heads: Value) -> Section:
        return {
            "kind": assumed("mfa", "the paper says MFA; its form here is Step3's (docs/attention.md)"),
            "num_attention_heads": heads,
            "head_dim": assumed(256, "C is unknown; 2C values of cache are 1 KB, as VHA's"),
            "q_lora_rank": assumed(latent, "unknown; half of hidden_size"),
        }

    return _matched(scale, section)


def _matched(scale: Scale, section: Callable[[Value], Section]) -> Section:
    """The section with the even number of heads whose attention is nearest in size to the grouped baseline's."""
    goal = attention_size(grouped(scale.heads, scale.kv_heads, scale.head_dim), scale)

    def size(heads: int) -> int:
        return attention_size(section(assumed(heads, "")), scale)

    heads = min(range(2, 65, 2), key=lambda heads: abs(size(heads) - goal))
    why = f"unknown; gives {size(heads) / 1e6:.2f} M attention parameters a layer, GQA has {goal / 1e6:.2f} M"
    return section(assumed(heads, why))


def attention_size(section: Section, scale: Scale) -> int:
    """Parameters of one layer's attention."""
    attention = _ATTENTION.validate_python(plain(section))
    return sum(spec.size for spec in attention_tensors(attention, int(scale.hidden.value)))


def model_section(scale: Scale, attention: Section, positions: Value, sliding: Section | None = None) -> Section:
    """The `model` section of a recipe."""
    feed_forward: dict[str, Value] = {} if scale.intermediate is None else {"intermediate_size": scale.intermediate}
    nested: dict[str, Section] = {} if scale.experts is None else {"experts": scale.experts}
    if sliding is not None:
        nested["sliding_window"] = sliding
    return {
        "architecture": scale.architecture,
        "vocab_size": scale.known(151936, "the Qwen3 tokenizer has 151,669 ids; the other rows are never used"),
        "hidden_size": scale.hidden,
        **feed_forward,
        "num_hidden_layers": scale.layers,
        "max_position_embeddings": positions,
        "rms_norm_eps": scale.known(1e-6),
        "rope_theta": scale.known(1e6),
        "initializer_range": scale.known(0.02),
        "tie_word_embeddings": scale.tied,
        "attention": attention,
        **nested,
    }
