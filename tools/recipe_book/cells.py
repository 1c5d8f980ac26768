"""Every recipe of the paper's tables, and ours beside them: file name, cells, values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.recipe_book.models import SCALES, Scale, grouped, mfa, mla, model_section, vha, without
from tools.recipe_book.training import DENSE_50B, MOE_50B, MOE_500B, STAGES, WARM_START, Training, recipe
from tools.recipe_book.values import Section, Value, assumed, derived, paper, upstream

_PREMIX_KEYS = ("premix_init", "premix_init_noise")
_POSTMIX_KEYS = ("postmix_rank", "postmix_init_std", "postmix_space")
_SEED_1P7B = upstream(42, "in its 1.7B config only; the paper states no seed")
_SEED = assumed(42, "unknown; as in upstream's 1.7B config")
_SEED_OURS = "ours; upstream's repeats set none and differ in their output folder only"
_DECAY = upstream("zero", "there only names with 'bias' or 'norm' are exempt; the paper does not say")
_1P7B = SCALES["1p7b"]
_RANK_4 = paper(4, "N / 4")
_RANK_4_0P6B = upstream(4, "N / 4")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One recipe file."""

    file: str
    """Without `.yaml`; also the run's name."""
    where: str
    """The cells of the paper that it serves."""
    variant: str
    scale: Scale
    values: dict[str, Section]


def cells() -> dict[str, list[Cell]]:
    """All recipes under the heading that recipes/README.md lists them by."""
    return {
        "Table 1: four variants at four scales, 50B tokens": list(_table_1()),
        "Table 2: head layouts at 1.7B": list(_table_2()),
        "Table 4: parts and ranks of VHA at 1.7B": list(_table_4()),
        "Appendix B: repeated runs at 0.6B": list(_appendix_b()),
        "30B-A3B, 500B tokens": list(_table_3()),
        "10B-A1B hybrids, in three stages": list(_hybrids()),
        "Ours, at 1.7B": list(_ours()),
    }


def _cell(
    file: str,
    where: str,
    variant: str,
    scale: Scale,
    attention: Section,
    run: Training,
    *,
    seed: Value = _SEED,
    decay: Value = _DECAY,
    start: Value | None = None,
    sliding: Section | None = None,
    longest: Value | None = None,
) -> Cell:
    positions = longest or derived(run.sequence_length.value, "what is trained; Qwen3 itself promises 40,960")
    has_maps = attention["kind"] == paper("vha")
    model = model_section(scale, attention, positions, sliding)
    values = recipe(file, scale, model, run, decay if has_maps else None, seed, start)
    return Cell(file=file, where=where, variant=variant, scale=scale, values=values)


def _1p7b(file: str, where: str, variant: str, attention: Section, decay: Value = _DECAY) -> Cell:
    return _cell(file, where, variant, _1P7B, attention, DENSE_50B, seed=_SEED_1P7B, decay=decay)


def _vha_1p7b(rank: Value = _RANK_4, **changes: Value) -> dict[str, Value]:
    return vha(upstream(16), rank, _1P7B.head_dim, **changes)


def _table_1() -> Iterator[Cell]:
    ranks = {
        "0p6b": _RANK_4_0P6B,
        "1p7b": _RANK_4,
        "4b": paper(8, "N / 4"),
        "8b_a1b": derived(4, "N / 4, as elsewhere"),
    }
    for key, rank in ranks.items():
        scale = SCALES[key]
        variants = {
            f"GQA-{scale.kv_heads.value}": grouped(scale.heads, scale.kv_heads, scale.head_dim),
            "MLA": mla(scale),
            "MFA": mfa(scale),
            "VHA": vha(scale.heads, rank, scale.head_dim),
        }
        for variant, attention in variants.items():
            where = f"Table 1 ({scale.label}, {variant})"
            if key == "1p7b":
                where += {"GQA-8": "; Table 2 (GQA 16-8)", "VHA": "; Table 2 (VHA); Table 4 (both, rank 4)"}.get(
                    variant, ""
                )
            file = f"table1_{key}_{variant.lower().replace('-', '')}"
            run = DENSE_50B if scale.experts is None else MOE_50B
            seed = _SEED_1P7B if key == "1p7b" else _SEED
            yield _cell(file, where, variant, scale, attention, run, seed=seed)


def _table_2() -> Iterator[Cell]:
    width = _1P7B.head_dim
    mha = grouped(paper(12), paper(12, "every query head has its own"), width)
    yield _1p7b("table2_1p7b_mha12", "Table 2 (MHA-12)", "MHA-12", mha)
    gqa2 = grouped(paper(16), paper(2), width)
    yield _1p7b("table2_1p7b_gqa16_2", "Table 2 (GQA 16-2)", "GQA 16-2", gqa2)
    half = grouped(paper(8, "half of GQA-8's; o_proj reads 8 heads too"), paper(2), width)
    yield _1p7b("table2_1p7b_gqa8_2", "Table 2 (half-head GQA 8-2-2)", "GQA 8-2-2", half)
    mqa = grouped(assumed(16, "as in GQA-8; ours, not in the paper"), assumed(1, "multi-query"), width)
    yield _1p7b("table2_1p7b_mqa", "none: beside Table 2", "MQA", mqa)


def _table_4() -> Iterator[Cell]:
    alone = assumed("none", "the paper says 'Premix alone'; here it makes 16 heads of 8, and nothing mixes them")
    no_postmix = without(_vha_1p7b(postmix=alone), *_POSTMIX_KEYS)
    yield _1p7b("table4_1p7b_premix_only", "Table 4 (Premix only)", "Premix only", no_postmix)
    alone = assumed("none", "the paper says 'Postmix alone'; here W_Q makes all 16 heads")
    no_premix = without(_vha_1p7b(premix=alone), *_PREMIX_KEYS)
    no_premix["num_attention_heads"] = assumed(16, "as many as with Premix; none is virtual")
    yield _1p7b("table4_1p7b_postmix_only", "Table 4 (Postmix only)", "Postmix only", no_premix)
    for part in ("premix", "postmix"):
        name = part.capitalize()
        where = f"the paper says SiLU in {name}, not where in it: docs/vha.md has our place. It does not fold"
        silu = _vha_1p7b(**{part: assumed("silu", where)})
        yield _1p7b(f"table4_1p7b_silu_{part}", f"Table 4 (SiLU in {name})", f"SiLU in {name}", silu)
    full = "16 or more is full rank: B A^T is 16 x 16"
    skipped = "a rank that the paper skips; ours"
    for rank in (assumed(1, skipped), assumed(2, skipped), assumed(8, skipped), paper(32, full), paper(128, full)):
        where = f"Table 4 (rank {rank.value})" if rank.origin == "paper" else "none: between the ranks of Table 4"
        yield _1p7b(f"table4_1p7b_rank{rank.value}", where, f"VHA, rank {rank.value}", _vha_1p7b(rank))


def _appendix_b() -> Iterator[Cell]:
    scale = SCALES["0p6b"]
    variants = {
        "GQA-8": (3, grouped(scale.heads, scale.kv_heads, scale.head_dim)),
        "VHA": (4, vha(scale.heads, _RANK_4_0P6B, scale.head_dim)),
    }
    for variant, (repeats, attention) in variants.items():
        for number in range(1, repeats + 1):
            file = f"appendix_b_0p6b_{variant.split('-')[0].lower()}_seed{number}"
            where = f"Appendix B ({variant}, run {number} of {repeats})"
            seed = assumed(number, _SEED_OURS)
            yield _cell(file, where, variant, scale, attention, DENSE_50B, seed=seed)


def _table_3() -> Iterator[Cell]:
    scale = SCALES["30b_a3b"]
    variants = {
        "GQA-4": grouped(scale.heads, scale.kv_heads, scale.head_dim),
        "MLA": mla(scale),
        "VHA": vha(paper(48), paper(12, "N / 4"), scale.head_dim),
    }
    for variant, attention in variants.items():
        file = f"30b_a3b_{variant.lower().replace('-', '')}_fp8"
        yield _cell(file, f"Table 3 (30B-A3B, {variant})", variant, scale, attention, MOE_500B)


def _hybrids() -> Iterator[Cell]:
    scale = SCALES["10b_a1b"]
    arms = {
        "GQA": grouped(scale.heads, scale.kv_heads, scale.head_dim),
        "VHA": vha(scale.heads, derived(4, "N / 4, as elsewhere"), scale.head_dim),
    }
    kind = assumed("grouped", "in both arms: the paper says that only the full layers differ")
    alike = "2 in both arms: the paper says that only the full layers differ, not what these have"
    sliding: Section = {
        "window": assumed(1024, "unknown"),
        "full_every": paper(4, "full : sliding = 1 : 3; which of the four is full is unknown"),
        "attention": grouped(scale.heads, assumed(2, alike), scale.head_dim) | {"kind": kind},
    }
    longest = derived(131072, "the last stage's")
    for variant, attention in arms.items():
        before: str | None = None
        for number, (stage, run) in enumerate(STAGES.items(), 1):
            file = f"10b_a1b_hybrid_{variant.lower()}_{stage}"
            start = None if before is None else derived(f"runs/{before}", "the stage before")
            where = f"Table 6 ({variant}), stage {number} of 3"
            yield _cell(
                file, where, f"{variant} hybrid", scale, attention, run, start=start, sliding=sliding, longest=longest
            )
            before = file


def _ours() -> Iterator[Cell]:
    nothing = "none: Table 1's VHA with one change"
    gate = assumed("before_postmix", "the change: a gate that folds; upstream's stands after Postmix and does not")
    yield _1p7b("ours_1p7b_vha_gate_before_postmix", nothing, "VHA, gate", _vha_1p7b(output_gate=gate))
    identity = assumed("identity", "the change: decay limits the departure from I that the maps exist to learn")
    yield _1p7b("ours_1p7b_vha_decay_identity", nothing, "VHA, decay to I", _vha_1p7b(), identity)
    none = assumed("none", "the change: the maps do not decay")
    yield _1p7b("ours_1p7b_vha_decay_none", nothing, "VHA, no decay", _vha_1p7b(), none)
    space = assumed("weight", "the change: the same function, without activations or communication per token")
    yield _1p7b("ours_1p7b_vha_weight_space", nothing, "VHA, weight space", _vha_1p7b(postmix_space=space))
    yield _cell(
        "ours_1p7b_vha_from_gqa2",
        "none: GQA 16-2 of Table 2, trained on as VHA",
        "VHA from GQA-2",
        _1P7B,
        _vha_1p7b(),
        WARM_START,
        seed=_SEED_1P7B,
        start=assumed("warm/ours_1p7b_vha_from_gqa2", "made of runs/table2_1p7b_gqa16_2 by tools/warm_start.py"),
    )
