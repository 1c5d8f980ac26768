"""The recipe files, and what becomes of a checkpoint of each. A new recipe is one row."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"

SCALES = ("0p6b", "1p7b", "4b", "8b_a1b")

FOLDS = {
    "quickstart",
    *(f"table1_{scale}_vha" for scale in SCALES),
    "table4_1p7b_premix_only",
    "table4_1p7b_postmix_only",
    *(f"table4_1p7b_rank{rank}" for rank in (1, 2, 8, 32, 128)),
    *(f"appendix_b_0p6b_vha_seed{seed}" for seed in (1, 2, 3, 4)),
    "30b_a3b_vha_fp8",
    "ours_1p7b_vha_decay_identity",
    "ours_1p7b_vha_decay_none",
    "ours_1p7b_vha_weight_space",
    "ours_1p7b_vha_from_gqa2",
}
"""Folded into a stock directory."""

PLAIN = {
    *(f"table1_{scale}_gqa8" for scale in SCALES),
    *(f"table2_1p7b_{variant}" for variant in ("mha12", "gqa16_2", "gqa8_2", "mqa")),
    *(f"appendix_b_0p6b_gqa_seed{seed}" for seed in (1, 2, 3)),
    "30b_a3b_gqa4_fp8",
}
"""Nothing to fold; a stock directory as it is."""

STAGES = ("stage1_8k", "stage2_32k", "stage3_128k")
FOLDS_WITHOUT_STOCK_CLASS = {
    "ours_1p7b_vha_gate_before_postmix": "model.attention.output_gate=before_postmix: no stock Qwen3 has a gate",
    **{f"10b_a1b_hybrid_vha_{stage}": "model.sliding_window with model.experts" for stage in STAGES},
}
"""The weights fold; the export's reason for refusing the rest."""

REFUSED = {
    "table4_1p7b_silu_premix": "model.attention.premix=silu: SiLU lies between Premix and the attention core",
    "table4_1p7b_silu_postmix": "model.attention.postmix=silu: SiLU lies between Postmix's two factors",
    **{f"10b_a1b_hybrid_gqa_{stage}": "model.sliding_window with model.experts" for stage in STAGES},
    **{f"table1_{scale}_mla": "model.attention.kind=mla" for scale in SCALES},
    "30b_a3b_mla_fp8": "model.attention.kind=mla",
    **{f"table1_{scale}_mfa": "model.attention.kind=mfa: has nothing to fold" for scale in SCALES},
}
"""Neither folds nor has a stock class; the reason."""

ALL = sorted({*FOLDS, *PLAIN, *FOLDS_WITHOUT_STOCK_CLASS, *REFUSED})


def path_of(name: str) -> Path:
    return RECIPES / f"{name}.yaml"
