"""What is said of VHA, claim by claim, beside what arithmetic gives.

The claims are those of the paper (arXiv 2610.17959) and of a public analysis of it that recounts its tables. Figures
that were measured on trained models are quoted and never asserted: no arithmetic gives them. The verdicts:

    agrees                follows from the shapes: rounds to what is stated, or is beyond a stated bound
    agrees (cache only)   so does the cache; what a whole step gives stands beside it
    differs               does not follow from the shapes
    quoted                arithmetic on figures that are themselves reported: that they add up, and no more
    cannot be computed
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.counts.cache import cache_bytes, kv_cache_bytes, kv_cache_values
from vha_paddle.counts.flops import FlopRule, forward_flops, forward_flops_by_part, training_flops
from vha_paddle.counts.folding import folded
from vha_paddle.counts.parameters import attention_parameters
from vha_paddle.counts.reading import weights_read
from vha_paddle.counts.shapes import TABLE5_INTERMEDIATE, named, vha
from vha_paddle.counts.topics import query_weights

WORDS = ("agrees", "agrees (cache only)", "differs", "quoted", "cannot be computed")
"""What a verdict begins with."""
QUALITY = "cannot be computed: quality of trained models"
MEASURED = "cannot be computed: measured (tools/fold_export.py --verify measures a fold)"

TABLE5 = FlopRule(sequence_length=4096, lm_head=False)
"""The convention of the paper's FLOP table."""


@dataclass(frozen=True)
class Claim:
    text: str
    stated: float | None
    """None where the claim is of something that is not computed."""
    unit: str
    digits: int
    """Decimals that the claim is stated to."""
    computed: float | None
    note: str = ""
    reason: str = ""
    """Why nothing is computed."""
    at_least: bool = False
    """What is stated is a lower bound."""
    basis: Literal["shapes", "cache", "reported"] = "shapes"
    """What is computed: what the claim says, from shapes; the cache's part of it; a sum of reported figures."""

    @property
    def verdict(self) -> str:
        """One of `WORDS`, and how far it differs or why it is not computed."""
        if self.stated is None or self.computed is None:
            return self.reason
        rounded = round(self.computed, self.digits)
        if math.isclose(rounded, self.stated) or (self.at_least and rounded > self.stated):
            return {"shapes": "agrees", "cache": "agrees (cache only)", "reported": "quoted"}[self.basis]
        return f"differs by {self.computed - self.stated:+.{self.digits + 1}f}"

    @property
    def word(self) -> str:
        return max((word for word in WORDS if self.verdict.startswith(word)), key=len)


def claims() -> list[Claim]:
    """Every claim that arithmetic can check, and the main ones that it cannot."""
    return [*_cache(), *_layer(), *_flops(), *_table5(), *_maps(), *_reported(), *_not_computed()]


def _computed(
    text: str, stated: float, unit: str, digits: int, value: float, note: str = "", *, at_least: bool = False
) -> Claim:
    return Claim(text, stated, unit, digits, value, note, at_least=at_least)


def _model(attention: str, intermediate_size: int | None = TABLE5_INTERMEDIATE, shape: str = "1.7B") -> Model:
    changes: dict[str, Any] = {} if intermediate_size is None else {"intermediate_size": intermediate_size}
    return named(shape, attention, **changes).model


def _kib(attention: str) -> float:
    return kv_cache_bytes(_model(attention).attention, "bfloat16") / 1024


def _cache() -> Iterator[Claim]:
    unit = "KiB per token and layer"
    yield _computed("GQA-8 at 1.7B caches 4 KB per token and layer", 4, unit, 0, _kib("gqa"))
    yield _computed("VHA, served as GQA-2, caches 1 KB", 1, unit, 0, _kib("vha"))
    yield _computed("MLA caches 1.12 KB", 1.12, unit, 2, _kib("mla"), "a latent of 512; the rotary width 64 is assumed")
    yield _computed("VHA caches 4x fewer bytes than GQA-8", 4, "x", 0, _kib("gqa") / _kib("vha"))
    larger = kv_cache_bytes(_model("gqa", None, "30B-A3B").attention, "bfloat16") / 1024
    yield _computed("MHA-12 caches 6 KB", 6, unit, 0, _kib("12-12"))
    yield _computed("GQA-4 caches 2 KB", 2, unit, 0, larger)
    yield _computed("MQA caches 0.5 KB", 0.5, unit, 1, _kib("16-1"))
    for end, stated, ratio, note in (
        ("upper", 4, _kib("gqa") / _kib("vha"), _whole_steps("1.7B", "16-8")),
        ("lower", 2, larger / _kib("vha"), _whole_steps("30B-A3B", "32-4", "48-4")),
    ):
        text = f"2-4x in memory-bound decoding: {end} end"
        yield replace(_computed(text, stated, "x", 0, ratio, note), basis="cache")
    width = kv_cache_values(_model("mla").attention)
    yield _computed("an absorbed MLA query lives in a 576-wide space", 576, "channels", 0, width)


def _whole_steps(shape: str, *baselines: str) -> str:
    """How much less a decoder step of VHA reads, weights counted: what its speed can gain where memory is the limit."""
    gains = []
    for heads in baselines:
        for batch in (1, 64):
            gqa, own = (_step_bytes(_model(name, None, shape), batch, 4096) for name in (heads, "vha"))
            gains.append(f"{gqa / own:.2f}x at batch {batch} against GQA {heads}")
    return f"a step reads weights too: {', '.join(gains)}; 4,096 tokens each, {shape}"


def _step_bytes(model: Model, batch: int, context: int) -> float:
    served = folded(model)
    return weights_read(served, batch, "bfloat16") + batch * cache_bytes(served, context, "bfloat16")


def _layer() -> Iterator[Claim]:
    trained, served = _model("vha"), folded(_model("vha"))
    unit = "weights per layer"
    of_gqa, of_mha = (sum(attention_parameters(_model(name).attention, 2048).values()) for name in ("gqa", "12-12"))
    yield _computed("MHA-12 and GQA-8 differ in no attention weights", 0, unit, 0, of_mha - of_gqa)
    yield _computed("VHA trains this many query weights at 1.7B", 2_129_920, unit, 0, query_weights(trained))
    yield _computed("VHA serves this many after the fold", 4_194_304, unit, 0, query_weights(served))
    baseline = query_weights(_model("gqa"))
    share = 100 * (1 - query_weights(trained) / baseline)
    note = "exactly half without Premix's own weights"
    yield _computed("50 % of the query weights saved in training", 50, "%", 0, share, note)
    yield _computed("and none when served", 0, "%", 0, 100 * (1 - query_weights(served) / baseline))


def _flops() -> Iterator[Claim]:
    gqa, mha, own = (_parts(_model(name)) for name in ("gqa", "12-12", "vha"))
    unit = "GFLOPs per token, training"
    queries = gqa["q_proj"] - own["q_proj"]
    keys_values = gqa["k_proj"] + gqa["v_proj"] - own["k_proj"] - own["v_proj"]
    net = sum(gqa.values()) - sum(own.values())
    yield _computed("MHA-12 saves 0.70 against GQA-8, all of it scores", 0.70, unit, 2, gqa["scores"] - mha["scores"])
    yield _computed("halving W_Q saves 0.35", 0.35, unit, 2, queries)
    yield _computed("2 KV heads for 8 save 0.53", 0.53, unit, 2, keys_values)
    yield _computed("Premix and Postmix add 0.047", 0.047, unit, 3, own["premix"] + own["postmix"])
    yield _computed("VHA saves 0.83 in all", 0.83, unit, 2, net)
    share = 100 * keys_values / (queries + keys_values)
    yield _computed("about 60 % of the gross saving is K/V", 60, "%", 0, share)
    primary = "halving the queries is the primary source: half at {}"
    yield _computed(primary.format("1.7B"), 50, "%", 0, 100 - share, "at least, of the gross saving", at_least=True)
    gqa_4b, own_4b = (_parts(_model(name, None, "4B")) for name in ("gqa", "vha"))
    saved = {part: gqa_4b[part] - own_4b[part] for part in ("q_proj", "k_proj", "v_proj")}
    share = 100 * saved["q_proj"] / sum(saved.values())
    yield _computed("57 % of it is queries at 4B", 57, "%", 0, share)
    yield _computed(primary.format("4B"), 50, "%", 0, share, "at least, of the gross saving", at_least=True)
    net_4b = sum(gqa_4b.values()) - sum(own_4b.values())
    yield _computed("VHA saves 1.85 at 4B (recounted)", 1.85, unit, 2, net_4b, "rank 8")
    yield _computed("VHA saves 1.86 at 4B (the paper)", 1.86, unit, 2, net_4b, "rank 8")
    rank_4 = sum(_parts(named("4B", vha(32, 2, 4)).model).values())
    yield _computed("the same with rank 4", 1.86, unit, 2, sum(gqa_4b.values()) - rank_4, "the table may use rank 4")


def _parts(model: Model) -> dict[str, float]:
    return {part: 3 * flops / 1e9 for part, flops in forward_flops_by_part(model, TABLE5).items()}


def _table5() -> Iterator[Claim]:
    unit = "GFLOPs per token, training"
    for name, label, stated in (("gqa", "GQA-8", 10.61), ("12-12", "MHA-12", 9.91), ("vha", "VHA", 9.78)):
        value = training_flops(_model(name), TABLE5) / 1e9
        yield _computed(f"Table 5, 1.7B, {label}", stated, unit, 2, value, f"MLP of {TABLE5_INTERMEDIATE}")
    real = training_flops(_model("gqa", None), TABLE5) / 1e9
    yield _computed("the same for Qwen3-1.7B's own MLP, GQA-8", 10.61, unit, 2, real, "MLP of 6144")
    for width, note in ((TABLE5_INTERMEDIATE, f"MLP of {TABLE5_INTERMEDIATE}"), (None, "MLP of 6144")):
        gqa, own = (training_flops(_model(name, width), TABLE5) for name in ("gqa", "vha"))
        yield _computed("7.9 % fewer training FLOPs at 1.7B", 7.9, "%", 1, 100 * (1 - own / gqa), note)
    gqa = forward_flops(_model("gqa"), TABLE5)
    saved = gqa - forward_flops(_model("vha"), replace(TABLE5, folded=True))
    unfolded = 100 * (1 - forward_flops(_model("vha"), TABLE5) / gqa)
    yield _computed("7.9 % lower prefill FLOPs", 7.9, "%", 1, unfolded, "with the model as it was trained")
    yield _computed("7.9 % lower prefill FLOPs", 7.9, "%", 1, 100 * saved / gqa, "with the folded model, as served")
    yield _computed("a forward pass of GQA-8 takes 3.54", 3.54, "GFLOPs per token", 2, gqa / 1e9)
    yield _computed("prefill with the folded model saves 0.18", 0.18, "GFLOPs per token", 2, saved / 1e9)
    yield _computed("that is about 5.0 %", 5.0, "%", 1, 100 * saved / gqa)


def _maps() -> Iterator[Claim]:
    attention = _attention("vha")
    width, noise = attention.head_dim, attention.premix_init_noise
    yield _computed(
        "8 physical heads and 2 groups make 16 virtual ones", 16, "heads", 0, attention.num_physical_heads * 2
    )
    unit = "||W - I||_F, expected"
    # a matrix of standard normals has H^2 entries, so its norm is about H
    yield _computed("the released init starts 1.1 from the identity", 1.1, unit, 1, noise / math.sqrt(width) * width)
    yield _computed("Table 12's init starts 12.8 from it", 12.8, unit, 1, noise * width)
    large = _attention("vha", "30B-A3B")
    yield _computed("the largest group is 24", 24, "heads", 0, large.query_group_size)
    note = "at least; of the paper's largest model, while the paper speaks of larger ones"
    text = "groups of large models readily reach 64"
    yield _computed(text, 64, "heads", 0, large.query_group_size, note, at_least=True)
    full = min(32, attention.num_attention_heads)
    yield _computed("rank 32 at 16 heads is full rank", 16, "rank of B A^T at most", 0, full)
    for shape, stated in (("1.7B", 4), ("4B", 8), ("30B-A3B", 12)):
        rank = _attention("vha", shape).num_attention_heads // 4
        yield _computed(f"Postmix has rank {stated} at {shape}", stated, "rank", 0, rank, "virtual heads / 4")


def _attention(name: str, shape: str = "1.7B") -> VirtualHeadAttention:
    attention = _model(name, None, shape).attention
    assert isinstance(attention, VirtualHeadAttention)
    return attention


def _reported() -> Iterator[Claim]:
    """Differences between figures that are themselves reported."""
    note, unit = "of the reported figures", "points"
    for text, stated, digits, difference in (
        ("GQA with 2 KV heads loses one full point at 1.7B", 1.00, 2, 54.09 - 53.09),
        ("VHA leads GQA-8 by 0.41 at 1.7B", 0.41, 2, 54.50 - 54.09),
        ("MATH alone moves Math & STEM by 1.8", 1.8, 1, (48.84 - 43.42) / 3),
        ("RULER gap of 11.4", 11.4, 1, 84.4 - 73.0),
        ("and of 6.2 without Variable Tracking", 6.2, 1, 83.9 - 77.7),
    ):
        yield replace(_computed(text, stated, unit, digits, difference, note), basis="reported")


def _not_computed() -> Iterator[Claim]:
    for text in (
        "VHA has the highest 8-task average at all four scales",
        "VHA beats MLA and GQA-4 at 30B-A3B after 500B tokens",
        "RULER 84.4 against 73.0 for the 10B-A1B hybrid",
        "VHA beats GQA in 19, MLA in 28 and MFA in 21 of 32 cells",
        "Premix alone gives 53.31, Postmix alone 53.95, both 54.50",
        "ranks 4, 32, 128 give 54.50, 54.24, 54.15",
        "SiLU inside Premix or Postmix loses 0.67 to 0.83 points",
        "GQA 50.00 +- 0.34 and VHA 50.40 +- 0.07 over repeated 0.6B runs",
    ):
        yield Claim(text, None, "", 0, None, reason=QUALITY)
    yield Claim("the fold is exact to 5.5e-15", None, "", 0, None, reason=MEASURED)


def chosen(only: str | None) -> list[Claim]:
    """The claims whose verdict begins with a word, or all."""
    return [claim for claim in claims() if only is None or claim.verdict.startswith(only)]


def values(only: str | None = None) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "claim": claim.text,
            "stated": claim.stated,
            "computed": claim.computed,
            "unit": claim.unit,
            "verdict": claim.verdict,
            "note": claim.note,
        }
        for claim in chosen(only)
    ]


def render(only: str | None = None) -> str:
    """Text: a row for each claim, and how many have each verdict."""
    lines = [f"{'claim':<58}{'stated':>12}{'computed':>16}  verdict"]
    found = chosen(only)
    for claim in found:
        if claim.stated is None or claim.computed is None:
            lines.append(f"{claim.text:<58}{'':>12}{'':>16}  {claim.verdict}")
            continue
        stated = f"{claim.stated:,.{claim.digits}f}"
        note = f" ({claim.note})" if claim.note else ""
        lines.append(f"{claim.text:<58}{stated:>12}{claim.computed:>16,.4f}  {claim.verdict}; {claim.unit}{note}")
    counts = Counter(claim.word for claim in found)
    tally = ", ".join(f"{word} {counts[word]}" for word in WORDS if counts[word])
    lines.append(f"{len(found)} claims: {tally}")
    return "\n".join(lines)
