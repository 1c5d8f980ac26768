"""Parameters against shapes enumerated here one by one."""

from __future__ import annotations

import math

import pytest

from tests.counts.models import EXPERTS, HYBRID, SHARED, TINY, VHA_48, a3b, tiny
from vha_paddle import counts
from vha_paddle.config import Attention, GroupedAttention, VirtualHeadAttention
from vha_paddle.errors import UserError

Split = tuple[tuple[int, ...], int | None]  # a shape, and the axis that tensor-parallel ranks split

WHOLE = None
# One layer's attention for D = 12, by hand. MLA: N 4, latent 10, widths 6 + 2 and 4. MFA: N 4, C 6, latent 8. GVA: N 4,
# K 2, H 6, rotary 2. DCMHA: N 4 in 2 groups of 2, H 6, R 1; four uses of factors that are 2 * 1 * 2 wide.
OTHER_KINDS: dict[str, dict[str, Split]] = {
    "mla": {
        "q_proj": ((12, 4, 8), 1),
        "kv_a_proj_with_mqa": ((12, 12), WHOLE),
        "kv_a_layernorm": ((10,), WHOLE),
        "kv_b_proj": ((10, 4, 10), 1),
        "o_proj": ((4, 4, 12), 0),
    },
    "mla_latent_queries": {
        "q_a_proj": ((12, 8), WHOLE),
        "q_a_layernorm": ((8,), WHOLE),
        "q_b_proj": ((8, 4, 8), 1),
        "kv_a_proj_with_mqa": ((12, 12), WHOLE),
        "kv_a_layernorm": ((10,), WHOLE),
        "kv_b_proj": ((10, 4, 10), 1),
        "o_proj": ((4, 4, 12), 0),
    },
    "mfa": {
        "q_a_proj": ((12, 8), WHOLE),
        "q_a_layernorm": ((8,), WHOLE),
        "q_b_proj": ((8, 4, 6), 1),
        "k_proj": ((12, 6), WHOLE),
        "v_proj": ((12, 6), WHOLE),
        "o_proj": ((4, 6, 12), 0),
    },
    "gva": {
        "key_map": ((4, 6, 6), 0),
        "q_proj": ((12, 4, 8), 1),
        "v_proj": ((12, 2, 6), 1),
        "k_rope_proj": ((12, 2), WHOLE),
        "o_proj": ((4, 6, 12), 0),
    },
    "dcmha": {
        "pre_compose": ((2, 2, 2), 0),
        "post_compose": ((2, 2, 2), 0),
        "q_proj": ((12, 4, 6), 1),
        "k_proj": ((12, 4, 6), 1),
        "v_proj": ((12, 4, 6), 1),
        "q_norm": ((6,), WHOLE),
        "k_norm": ((6,), WHOLE),
        "compose_factors": ((2, 4, 4, 4), 0),
        "compose_proj": ((12, 2, 4, 4), 1),
        "diagonal_proj": ((12, 2, 4, 2), 1),
        "o_proj": ((4, 6, 12), 0),
    },
}


def attention_shapes(kind: str, degree: int = 1) -> dict[str, Split]:
    """One layer's attention of a `tiny` model; VHA's maps with their heads as [K, P]."""
    if kind in OTHER_KINDS:
        return OTHER_KINDS[kind]
    attention = TINY[kind]
    assert isinstance(attention, GroupedAttention | VirtualHeadAttention)
    whole = attention.kind == "vha" or degree > attention.num_key_value_heads
    kv: Split = ((12, attention.num_key_value_heads, 6), WHOLE if whole else 1)
    shapes: dict[str, Split] = {"k_proj": kv, "v_proj": kv}
    if attention.qk_norm:
        shapes |= {"q_norm": ((6,), WHOLE), "k_norm": ((6,), WHOLE)}
    heads = attention.num_attention_heads
    if kind.endswith("gate"):
        shapes["g_proj"] = ((12, heads, 6), 1)
    shapes["o_proj"] = ((heads, 6, 12), 0)
    if attention.attention_bias:
        projected = heads if kind in ("gqa_bias", "vha_postmix_bias") else 4
        shapes |= {"q_proj.bias": ((projected, 6), 0), "o_proj.bias": ((12,), WHOLE)}
        shapes |= dict.fromkeys(("k_proj.bias", "v_proj.bias"), ((2, 6), WHOLE if whole else 0))
    if isinstance(attention, GroupedAttention):
        return shapes | {"q_proj": ((12, heads, 6), 1)}
    width = 4 if kind == "vha_narrow" else 6
    if kind.startswith("vha_postmix"):
        shapes["q_proj"] = ((12, 8, 6), 1)
    else:
        shapes |= {"q_proj": ((12, 4, width), 1), "premix": ((2, width, 6), WHOLE)}
    if kind != "vha_premix":
        shapes |= {"postmix_a": ((2, 4, 3), 1), "postmix_b": ((2, 4, 3), 1)}
    return shapes


def local_size(split: Split, degree: int) -> int:
    shape, axis = split
    return math.prod(size // degree if index == axis else size for index, size in enumerate(shape))


DEGREES = [(kind, 1) for kind in TINY]
DEGREES += [
    ("mha", 4),
    ("gqa", 2),
    ("gqa", 4),
    ("mqa", 2),
    ("mla", 2),
    ("mla_latent_queries", 4),
    ("mfa", 4),
    ("gva", 2),
]
DEGREES += [("dcmha", 2), ("gqa_gate", 2), ("gqa_bias", 2), ("gqa_bias", 4)]
DEGREES += [(kind, degree) for kind in TINY if kind.startswith("vha") for degree in (2, 4)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "degree"), DEGREES)
def test_parameters_of_a_rank_are_the_sum_of_its_tensors(kind: str, degree: int, tied: bool) -> None:
    attention = sum(local_size(split, degree) for split in attention_shapes(kind, degree).values())
    layer = attention + 2 * 12 + 3 * 12 * 20 // degree
    ends = (1 if tied else 2) * 40 * 12 // degree
    found = counts.parameters(tiny(TINY[kind], tied), degree)
    assert found.total == 3 * layer + 12 + ends
    assert found.non_embedding == found.total - ends
    assert counts.active_parameters(tiny(TINY[kind], tied)) == counts.parameters(tiny(TINY[kind], tied)).total


@pytest.mark.parametrize(("kind", "degree"), DEGREES)
def test_attention_parameters_of_a_rank_are_those_of_each_tensor(kind: str, degree: int) -> None:
    expected = {name: local_size(split, degree) for name, split in attention_shapes(kind, degree).items()}
    assert counts.attention_parameters(TINY[kind], 12, degree) == expected


@pytest.mark.parametrize(("kind", "degree"), [("vha", 3), ("vha", 8), ("gqa", 3), ("mha", 8), ("mla", 8), ("dcmha", 4)])
def test_a_degree_that_does_not_divide_the_heads_is_refused(kind: str, degree: int) -> None:
    with pytest.raises(UserError, match="must divide"):
        counts.parameters(tiny(TINY[kind]), degree)


def test_layers_of_a_hybrid_have_the_parameters_of_their_own_attention() -> None:
    model = tiny(TINY["vha"], sliding_window=HYBRID)
    found = counts.parameters(model)
    sliding = 12 * (2 * 8 + 2 * 4) * 6 + 12  # 8 query heads on 4, QK-norm
    full = sum(local_size(split, 1) for split in attention_shapes("vha").values())
    assert [layer.attention for layer in found.layers] == [sliding, sliding, full]
    assert found.attention == 2 * sliding + full


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 4), (2, 8)])
def test_experts_are_divided_over_both_degrees_and_the_router_over_none(tensor: int, expert: int) -> None:
    model = tiny(TINY["gqa"], experts=SHARED)
    found = counts.parameters(model, tensor, expert)
    for layer in found.layers:
        assert layer.experts == 8 * 3 * 12 * 10 // tensor // expert
        assert layer.dense_mlp == 12 * 8 + 3 * 12 * 14 // tensor


def test_a_token_uses_its_own_experts_the_router_and_the_shared_expert() -> None:
    model = tiny(TINY["gqa"], experts=SHARED)
    whole = counts.parameters(model)
    assert counts.active_parameters(model) == whole.total - 3 * (8 - 2) * 3 * 12 * 10


@pytest.mark.parametrize(("experts", "degree"), [(EXPERTS, 3), (EXPERTS, 16), (None, 2)])
def test_an_expert_degree_that_divides_no_experts_is_refused(experts: object, degree: int) -> None:
    model = tiny(TINY["gqa"]) if experts is None else tiny(TINY["gqa"], experts=experts)
    with pytest.raises(UserError, match=f"expert-parallel degree {degree}: "):
        counts.parameters(model, 1, degree)


def test_a_rank_of_30b_a3b_holds_an_eighth_of_the_experts() -> None:
    whole, rank = counts.parameters(a3b(VHA_48)), counts.parameters(a3b(VHA_48), expert=8)
    assert rank.experts == 48 * 16 * 3 * 2048 * 768
    assert rank.total == whole.total - 7 * rank.experts == 5_216_931_840


def test_unlike_layers_share_no_attention() -> None:
    attentions: list[Attention] = list(tiny(TINY["vha"], sliding_window=HYBRID).attentions)
    assert len(attentions) == 2
