"""A decoder step: what it reads and what bounds it, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.counts.models import EXPERTS, GQA_8, HYBRID, TINY, VHA_16, published, tiny
from vha_paddle import counts
from vha_paddle.errors import UserError
from vha_paddle.plan.decode import decode, values
from vha_paddle.plan.gpus import GPUS

H200 = GPUS["h200"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["mha", "gqa", "vha", "mla", "mfa", "gva", "dcmha"])
def test_a_step_reads_layers_head_rows_and_caches(kind: str, tied: bool) -> None:
    model, batch, context = tiny(TINY[kind], tied), 3, 7
    found = decode(model, batch, context, H200)
    served = counts.folded(model)
    whole = counts.parameters(served)
    head = 40 * 12
    assert found.weights_read == 2 * (whole.non_embedding + head + batch * 12)
    assert found.cache_read == batch * context * 3 * 2 * counts.kv_cache_values(TINY[kind])
    assert found.resident == 2 * whole.total + found.cache_read
    rule = counts.FlopRule(sequence_length=context, absorbed=True)
    assert found.flops == batch * counts.forward_flops(served, rule)
    assert found.bytes_per_token == (found.weights_read + found.cache_read) / 3


def test_the_folded_model_is_decoded() -> None:
    assert decode(tiny(TINY["vha"]), 2, 5, H200) == decode(tiny(TINY["gqa"]), 2, 5, H200)


def test_a_sliding_layer_reads_its_window() -> None:
    found = decode(tiny(TINY["vha"], sliding_window=HYBRID), 1, 100, H200)
    assert found.cache_read == 2 * 2 * (2 * 4 * 4 * 6) + 2 * 100 * 2 * 2 * 6


@pytest.mark.parametrize(("batch", "share"), [(1, 1 / 4), (2, 7 / 16)])
def test_a_batch_reads_the_experts_that_it_reaches(batch: int, share: float) -> None:
    """Of 8 experts 2 each: one token reaches a quarter, two tokens 1 - (3/4)^2."""
    model = tiny(TINY["gqa"], experts=EXPERTS)
    whole = counts.parameters(model)
    dense = whole.non_embedding - whole.experts + 40 * 12 + batch * 12
    assert decode(model, batch, 5, H200).weights_read == pytest.approx(2 * (dense + share * whole.experts))


def test_one_sequence_is_bound_by_memory_and_a_thousand_short_ones_by_products() -> None:
    model = published("1.7B", VHA_16)
    one, many = decode(model, 1, 4096, H200), decode(model, 1000, 16, H200)
    assert (one.limit, many.limit) == ("memory", "compute")
    assert one.ridge == many.ridge == 989e12 / 4800e9
    assert one.tokens_per_second == pytest.approx(4800e9 / (one.weights_read + one.cache_read))
    assert many.tokens_per_second == pytest.approx(989e12 * 1000 / many.flops)
    assert one.intensity < one.ridge < many.intensity


def test_the_cache_is_a_quarter_and_the_step_is_not() -> None:
    """VHA's step reads 4 times fewer cache bytes than GQA-8's, and the same weights but for K and V."""
    own, other = (decode(published("1.7B", attention), 8, 8192, H200) for attention in (VHA_16, GQA_8))
    assert other.cache_read == 4 * own.cache_read
    assert 1 < own.tokens_per_second / other.tokens_per_second < 4


def test_what_is_too_large_for_the_gpu_is_said() -> None:
    small = replace(H200, memory=10**9)
    assert values(decode(published("1.7B", VHA_16), 1, 16, small))["fits_one_gpu"] is False
    assert values(decode(published("1.7B", VHA_16), 1, 16, H200))["fits_one_gpu"] is True


@pytest.mark.parametrize(("batch", "context", "flag"), [(0, 5, "--batch 0"), (5, 0, "--context 0")])
def test_an_empty_step_is_refused(batch: int, context: int, flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag}: must be at least 1"):
        decode(tiny(TINY["gqa"]), batch, context, H200)
