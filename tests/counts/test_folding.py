"""What is served: which maps fold, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.counts.models import BIAS_WITHOUT_NORM, HYBRID, TINY, grouped, tiny, vha
from vha_paddle import counts
from vha_paddle.config import Attention, Model, VirtualHeadAttention
from vha_paddle.config.check_model import check_model

GQA = grouped(8, 2, head_dim=6)
GATED = grouped(8, 2, head_dim=6, output_gate=True)
LEFT: dict[str, Any] = {"head_dim": 6, "postmix_rank": 3, "num_attention_heads": 8, "num_key_value_heads": 2}


def left(**others: Any) -> VirtualHeadAttention:
    return VirtualHeadAttention(kind="vha", **(LEFT | others))


@pytest.mark.parametrize(
    ("attention", "served"),
    [
        (vha(8, 2, 3, 6), GQA),
        (vha(8, 2, None, 6, postmix="none"), GQA),
        (vha(8, 2, 3, 6, premix="none"), GQA),
        (vha(8, 2, 3, 6, physical_head_dim=4, premix_init="orthogonal"), GQA),
        (vha(8, 2, 3, 6, postmix_space="weight"), GQA),
        (vha(8, 2, 3, 6, output_gate="before_postmix"), GATED),
        (vha(8, 2, 3, 6, **BIAS_WITHOUT_NORM), TINY["gqa_bias"]),
        (
            vha(8, 2, 3, 6, premix="silu", **BIAS_WITHOUT_NORM),
            left(premix="silu", postmix="none", postmix_rank=None, **BIAS_WITHOUT_NORM),
        ),
        (vha(8, 2, None, 6, postmix="none", output_gate="before_postmix"), GATED),
        (vha(8, 2, 3, 6, output_gate="after_postmix"), left(premix="none", output_gate="after_postmix")),
        (
            vha(8, 2, 3, 6, physical_head_dim=4, premix_init="orthogonal", output_gate="after_postmix"),
            left(premix="none", output_gate="after_postmix"),
        ),
        (vha(8, 2, 3, 6, premix="silu"), left(premix="silu", postmix="none", postmix_rank=None)),
        (
            vha(8, 2, 3, 6, premix="silu", postmix_space="weight"),
            left(premix="silu", postmix="none", postmix_rank=None),
        ),
        (vha(8, 2, 3, 6, postmix="silu"), left(premix="none", postmix="silu")),
        (vha(8, 2, 3, 6, premix="silu", postmix="silu"), left(premix="silu", postmix="silu")),
        (
            vha(8, 2, 3, 6, premix="silu", output_gate="after_postmix"),
            left(premix="silu", output_gate="after_postmix"),
        ),
    ],
)
def test_what_is_linear_and_next_to_a_projection_folds(attention: VirtualHeadAttention, served: Attention) -> None:
    assert counts.folded_attention(attention) == served
    model = tiny(attention)
    assert counts.folded(model) == model.model_copy(update={"attention": served})
    check_model(counts.folded(model))  # what is left obeys the rules of a recipe


@pytest.mark.parametrize("kind", ["gqa", "gqa_gate", "mla", "mfa", "gva", "dcmha"])
def test_another_kind_is_served_as_it_is_trained(kind: str) -> None:
    assert counts.folded(tiny(TINY[kind])) == tiny(TINY[kind])


def test_both_kinds_of_layers_of_a_hybrid_fold() -> None:
    hybrid = HYBRID.model_copy(update={"attention": vha(8, 4, 2, 6)})
    served: Model = counts.folded(tiny(TINY["vha"], sliding_window=hybrid))
    assert [served.attention_of(layer) for layer in range(3)] == [grouped(8, 4, 6)] * 2 + [GQA]


@pytest.mark.parametrize(
    ("others", "stays"),
    [
        ({}, set()),
        ({"premix": "silu"}, {"premix"}),
        ({"postmix": "silu"}, {"postmix"}),
        ({"output_gate": "after_postmix"}, {"postmix"}),
        ({"output_gate": "before_postmix"}, set()),
    ],
)
def test_what_stays_is_named(others: dict[str, Any], stays: set[str]) -> None:
    assert set(counts.what_stays(vha(8, 2, 3, 6, **others))) == stays
