"""Named shapes, and models described by flags."""

from __future__ import annotations

import pytest

from tests.counts.models import MILLIONS, VHA_48, a3b, grouped, published
from vha_paddle import counts
from vha_paddle.config import (
    Attention,
    ComposedAttention,
    GroupedValueAttention,
    LatentAttention,
    MixtureOfExperts,
    Model,
    SlidingWindow,
    VirtualHeadAttention,
)
from vha_paddle.counts.flags import FLAGS, described, tokens_of, value_of
from vha_paddle.counts.shapes import SHAPES, named, title, vha
from vha_paddle.errors import UserError


@pytest.mark.parametrize(("size", "attention", "millions"), MILLIONS)
def test_a_named_shape_is_the_published_one(size: str, attention: Attention, millions: float) -> None:
    name = "vha" if attention.kind == "vha" else "gqa"
    recipe = named(size, name)
    assert recipe.model == published(size, attention).model_copy(update={"max_position_embeddings": 40960})
    assert round(counts.parameters(recipe.model).total / 1e6, 3) == millions


@pytest.mark.parametrize(("name", "attention"), [("gqa", grouped(32, 4)), ("vha", VHA_48)])
def test_30b_a3b_is_named(name: str, attention: Attention) -> None:
    assert named("30B-A3B", name).model == a3b(attention)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_every_attention(shape: str) -> None:
    for name in ("gqa", "vha", "mla", "16-2", "12-12", "16-1"):
        counts.parameters(named(shape, name).model)
    mla = named(shape, "mla").model.attention
    assert isinstance(mla, LatentAttention) and counts.kv_cache_values(mla) == 576


@pytest.mark.parametrize(
    ("shape", "name", "shown"),
    [
        ("1.7B", "gqa", "1.7B gqa 16-8"),
        ("1.7B", "gqa-8", "1.7B gqa 16-8"),
        ("1.7B", "12-12", "1.7B gqa 12-12"),
        ("30B-A3B", "gqa", "30B-A3B gqa 32-4"),
        ("30B-A3B", "vha", "30B-A3B vha 48-2"),
        ("4B", "mla", "4B mla"),
    ],
)
def test_a_title_has_the_heads(shape: str, name: str, shown: str) -> None:
    assert title(shape, name) == shown


def test_gqa_with_a_number_has_the_query_heads_of_the_shape() -> None:
    assert named("4B", "gqa-2").model.attention == grouped(32, 2)
    assert named("4B", "gqa-8").model == named("4B", "gqa").model


@pytest.mark.parametrize(("text", "tokens"), [("32768", 32768), ("32K", 32768), ("128k", 131072), ("0", 0)])
def test_tokens_are_written_out_or_in_k(text: str, tokens: int) -> None:
    assert tokens_of("context", text) == tokens


@pytest.mark.parametrize("text", ["K", "32M", "-1", "1.5K", ""])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--context {text}: must be a number of tokens such as 32768 or 32K"):
        tokens_of("context", text)


def test_changes_replace_keys_of_the_model() -> None:
    model = named("4B", vha(32, 2, 4), intermediate_size=5504).model
    assert (model.intermediate_size, model.attention.kind) == (5504, "vha")


@pytest.mark.parametrize(
    ("shape", "attention", "message"),
    [
        ("2B", "gqa", "--shape 2B: must be one of 0.6B, 1.7B, 4B, 30B-A3B"),
        (
            "4B",
            "tiny",
            "--attention tiny: must be gqa, vha, mla, mfa, gva, dcmha, or for grouped attention KV heads as in gqa-2",
        ),
        ("4B", "16-0", "--attention 16-0: must be"),
        ("4B", "16-3", "num_attention_heads=16: must be a multiple of model.attention.num_key_value_heads=3"),
    ],
)
def test_what_has_no_name_is_refused(shape: str, attention: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named(shape, attention)


def test_flags_set_the_keys_they_are_listed_with() -> None:
    typed = {"hidden": 64, "layers": 2, "heads": 8, "experts": 4, "experts-per-token": 2, "expert-size": 16}
    model = described(typed | {"window": 8, "full-every": 2, "tied": False}, kind="grouped")
    assert model == {
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "attention": {"kind": "grouped", "num_attention_heads": 8},
        "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "sliding_window": {"window": 8, "full_every": 2},
    }


def test_flags_change_a_named_shape_and_leave_the_table_as_it_is() -> None:
    changed = described({"kv-heads": 4, "expert-size": 700}, shape="30B-A3B", attention="gqa")
    assert changed["attention"]["num_key_value_heads"] == 4
    assert changed["experts"] == {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 700}
    assert named("30B-A3B", "gqa").model == a3b(grouped(32, 4))


def test_every_flag_sets_a_key_of_the_schema() -> None:
    attentions = (LatentAttention, ComposedAttention, GroupedValueAttention, VirtualHeadAttention)
    known = set(Model.model_fields) | {f"attention.{key}" for kind in attentions for key in kind.model_fields}
    known |= {f"experts.{key}" for key in MixtureOfExperts.model_fields}
    known |= {f"sliding_window.{key}" for key in SlidingWindow.model_fields}
    assert set(FLAGS.values()) <= known


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("-3", -3), ("true", True), ("false", False), ("silu", "silu")]
)
def test_what_is_typed_is_a_number_a_switch_or_a_word(text: str, value: object) -> None:
    assert value_of(text) == value and type(value_of(text)) is type(value)
