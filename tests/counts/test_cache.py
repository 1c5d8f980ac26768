"""Cache bytes of every kind, by hand."""

from __future__ import annotations

import pytest

from tests.counts.models import HYBRID, TINY, tiny
from vha_paddle import counts

VALUES = {
    "mha": 2 * 4 * 6,
    "gqa": 2 * 2 * 6,
    "gqa_gate": 2 * 2 * 6,
    "mqa": 2 * 6,
    "vha": 2 * 2 * 6,
    "vha_premix": 2 * 2 * 6,
    "mla": 10 + 2,
    "mla_latent_queries": 10 + 2,
    "mfa": 2 * 6,
    "gva": 2 * 6 + 2,
    "dcmha": 2 * 4 * 6 + 2 * 4 * (2 * 1 + 1),
}


@pytest.mark.parametrize(("kind", "values"), VALUES.items())
def test_values_per_token_and_layer(kind: str, values: int) -> None:
    assert counts.kv_cache_values(TINY[kind]) == values
    assert counts.kv_cache_bytes(TINY[kind], "bfloat16") == 2 * values
    assert counts.kv_cache_bytes(TINY[kind], "float32") == 4 * values


@pytest.mark.parametrize("kind", [kind for kind in TINY if kind.startswith("vha")])
def test_the_fold_changes_no_cache(kind: str) -> None:
    assert counts.kv_cache_values(counts.folded_attention(TINY[kind])) == counts.kv_cache_values(TINY[kind])


@pytest.mark.parametrize(("context", "kept"), [(3, 3), (4, 4), (100, 4)])
def test_a_sliding_layer_keeps_its_window(context: int, kept: int) -> None:
    model = tiny(TINY["vha"], sliding_window=HYBRID)  # two layers of 4 KV heads slide, one of 2 does not
    expected = 2 * 2 * (2 * kept * 4 * 6) + 2 * (context * 2 * 2 * 6)
    assert counts.cache_bytes(model, context, "bfloat16") == expected
