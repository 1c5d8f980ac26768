"""Every claim has the verdict that arithmetic gives it."""

from __future__ import annotations

import json

import pytest

from vha_paddle.counts import claims, table5
from vha_paddle.counts.claims import MEASURED, QUALITY, TABLE5, WORDS, Claim, render, values
from vha_paddle.counts.flops import FlopRule
from vha_paddle.counts.shapes import named
from vha_paddle.errors import UserError
from vha_paddle.plan.decode import decode
from vha_paddle.plan.gpus import GPUS

FOUND = claims.claims()

# The claims that arithmetic does not bear out, with what it gives; every other one agrees.
DIFFER = {
    ("50 % of the query weights saved in training", "exactly half without Premix's own weights"): "differs by -0.8",
    ("VHA saves 1.86 at 4B (the paper)", "rank 8"): "differs by -0.006",
    ("the same for Qwen3-1.7B's own MLP, GQA-8", "MLP of 6144"): "differs by +0.664",
    ("7.9 % fewer training FLOPs at 1.7B", "MLP of 6144"): "differs by -0.50",
    ("7.9 % lower prefill FLOPs", "with the folded model, as served"): "differs by -2.92",
    (
        "halving the queries is the primary source: half at 1.7B",
        "at least, of the gross saving",
    ): "differs by -10.0",
    (
        "groups of large models readily reach 64",
        "at least; of the paper's largest model, while the paper speaks of larger ones",
    ): "differs by -40.0",
}
# Computed from formulas written out here, apart from the package.
S, D, H, LAYERS = 4096, 2048, 128, 28
COMPUTED = {
    "GQA-8 at 1.7B caches 4 KB per token and layer": 2 * 8 * H * 2 / 1024,
    "VHA, served as GQA-2, caches 1 KB": 2 * 2 * H * 2 / 1024,
    "MLA caches 1.12 KB": (512 + 64) * 2 / 1024,
    "VHA trains this many query weights at 1.7B": 8 * D * H + 2 * H * H,
    "VHA serves this many after the fold": 16 * D * H,
    "MHA-12 saves 0.70 against GQA-8, all of it scores": 3 * LAYERS * 4 * S * 4 * H / 1e9,
    "halving W_Q saves 0.35": 3 * LAYERS * 2 * 8 * D * H / 1e9,
    "2 KV heads for 8 save 0.53": 3 * LAYERS * 2 * 2 * 6 * D * H / 1e9,
    "Premix and Postmix add 0.047": 3 * LAYERS * 2 * (2 * 8 * H * H + 2 * 16 * 4 * H) / 1e9,
    "the released init starts 1.1 from the identity": 0.1 * H**0.5,
    "Table 12's init starts 12.8 from it": 0.1 * H,
    "the largest group is 24": 48 / 2,
    "MHA-12 caches 6 KB": 2 * 12 * H * 2 / 1024,
    "MQA caches 0.5 KB": 2 * H * 2 / 1024,
    "MHA-12 and GQA-8 differ in no attention weights": 4 * D * 12 * H - 2 * D * (16 + 8) * H,
    "halving the queries is the primary source: half at 1.7B": 100 * 8 / (8 + 12),
    "halving the queries is the primary source: half at 4B": 100 * 16 / (16 + 12),
    "a forward pass of GQA-8 takes 3.54": LAYERS * 2 * (D * (48 * H + 3 * 5504) + 2 * S * 16 * H) / 1e9,
}


QUOTED = {  # sums of reported figures
    "GQA with 2 KV heads loses one full point at 1.7B",
    "VHA leads GQA-8 by 0.41 at 1.7B",
    "MATH alone moves Math & STEM by 1.8",
    "RULER gap of 11.4",
    "and of 6.2 without Variable Tracking",
}


def test_the_verdict_of_every_claim() -> None:
    for claim in FOUND:
        expected = DIFFER.get((claim.text, claim.note), "agrees")
        if claim.text.startswith("2-4x in memory-bound decoding"):
            expected = "agrees (cache only)"
        if claim.text in QUOTED:
            expected = "quoted"
        if claim.stated is None:
            expected = MEASURED if claim.text.startswith("the fold is exact") else QUALITY
        assert claim.verdict == expected, claim
    assert set(DIFFER) <= {(claim.text, claim.note) for claim in FOUND}


def test_no_measured_quality_agrees() -> None:
    for claim in FOUND:
        if claim.unit == "points" or claim.text.startswith(("RULER", "MATH")):
            assert claim.word in ("quoted", "cannot be computed"), claim
    assert {claim.text for claim in FOUND if claim.word == "quoted"} == QUOTED


def test_what_is_said_of_decoding_has_whole_steps_beside_it() -> None:
    """With weights the cache's factor is not reached; the figures are those of a step on a GPU bound by memory."""
    notes = {claim.text: claim.note for claim in FOUND if claim.word == "agrees (cache only)"}
    assert len(notes) == 2
    upper, lower = notes.values()
    for note, shape, heads in ((upper, "1.7B", "16-8"), (lower, "30B-A3B", "32-4"), (lower, "30B-A3B", "48-4")):
        for batch in (1, 64):
            gqa, own = (decode(named(shape, name).model, batch, 4096, GPUS["h200"]) for name in (heads, "vha"))
            assert gqa.limit == own.limit == "memory"
            gain = own.tokens_per_second / gqa.tokens_per_second
            assert f"{gain:.2f}x at batch {batch} against GQA {heads}" in note
        assert note.endswith(f"4,096 tokens each, {shape}")


@pytest.mark.parametrize("only", ["agrees", "differs", "quoted", "cannot"])
def test_claims_can_be_chosen_by_verdict(only: str) -> None:
    found = values(only)
    assert found and all(claim["verdict"].startswith(only) for claim in found)
    assert len(render(only).splitlines()) == len(found) + 2


def test_the_last_line_counts_the_verdicts() -> None:
    words = [claim.word for claim in FOUND]
    assert set(words) == set(WORDS)
    tally = ", ".join(f"{word} {words.count(word)}" for word in WORDS)
    assert render().splitlines()[-1] == f"{len(FOUND)} claims: {tally}"
    differing = sum(claim.verdict.startswith("differs") for claim in FOUND)
    assert render("differs").splitlines()[-1] == f"{differing} claims: differs {differing}"


def test_what_is_computed_follows_from_the_formulas() -> None:
    by_text = {claim.text: claim.computed for claim in FOUND}
    for text, value in COMPUTED.items():
        assert by_text[text] == pytest.approx(value, rel=1e-12), text


def test_the_saving_of_a_folded_prefill() -> None:
    by_text = {claim.text: claim.computed for claim in FOUND}
    assert by_text["prefill with the folded model saves 0.18"] == pytest.approx(0.1762, abs=5e-5)
    assert by_text["that is about 5.0 %"] == pytest.approx(4.98, abs=5e-3)


def test_at_least_twenty_claims_are_computed_and_quality_is_not() -> None:
    assert sum(claim.stated is not None for claim in FOUND) >= 20
    assert sum(claim.verdict.startswith("cannot be computed") for claim in FOUND) >= 5


def test_a_claim_agrees_when_it_rounds_to_what_is_stated() -> None:
    assert Claim("", 0.35, "", 2, 0.3523).verdict == "agrees"
    assert Claim("", 0.35, "", 2, 0.3561).verdict == "differs by +0.006"
    assert Claim("", 12.8, "", 1, 12.4).verdict == "differs by -0.40"
    assert Claim("", 12.8, "", 1, 12.4, basis="reported").verdict == "differs by -0.40"
    assert Claim("", 50, "", 0, 57.1, at_least=True).verdict == "agrees"
    assert Claim("", 50, "", 0, 49.2, at_least=True).verdict == "differs by -0.8"


def test_values_survive_json_and_the_text_has_a_row_for_each() -> None:
    assert json.loads(json.dumps(values())) == values()
    lines = render().splitlines()
    assert len(lines) == 2 + len(FOUND)
    assert all(claim.text in line for claim, line in zip(FOUND, lines[1:-1], strict=True))


def test_table_5_is_reproduced_with_its_own_width_and_not_with_the_models() -> None:
    rows = {row.label: row for row in table5.rows(TABLE5)}
    found = {label: (row.printed, round(row.table_width, 4), round(row.real_width, 4)) for label, row in rows.items()}
    assert found == {
        "1.7B GQA-8": (10.61, 10.6137, 11.2743),
        "1.7B MHA-12": (9.91, 9.9090, 10.5696),
        "1.7B VHA, rank 4": (9.78, 9.7797, 10.4403),
        "1.7B GQA-8 less MHA-12": (0.70, 0.7046, 0.7046),
        "1.7B GQA-8 less VHA": (0.83, 0.8340, 0.8340),
        "4B GQA-8 less VHA, rank 8": (1.86, 1.8544, 1.8544),
        "4B GQA-8 less VHA, rank 4": (1.86, 1.8615, 1.8615),
    }


def test_the_tables_convention_can_be_replaced() -> None:
    with_head = table5.rows(FlopRule(sequence_length=4096), 6144)[0]
    assert round(with_head.table_width, 3) == round(with_head.real_width, 3) == 13.141
    causal = table5.rows(FlopRule(sequence_length=4096, lm_head=False, causal=True), 6144)[0]
    assert round(causal.real_width, 3) == 9.865
    with pytest.raises(UserError, match="model.intermediate_size='wide': must be a valid integer"):
        table5.rows(TABLE5, "wide")
