"""The reduction as a pure function: what it keeps, what it shrinks, that its recipe keeps every rule."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.recipes.files import ALL, ROOT, path_of
from vha_paddle.config import Recipe, VirtualHeadAttention, load_recipe, recipe_from_dict
from vha_paddle.config.load import with_overrides
from vha_paddle.config.reduced import MOST_RANKS, reduced
from vha_paddle.config.schema import WSDSchedule
from vha_paddle.counts import parameters
from vha_paddle.errors import UserError


def small(name: str, *overrides: str) -> Recipe:
    return reduced(load_recipe(path_of(name), overrides), on_cpu=True).recipe


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; None for a section that is not there."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_becomes_small_and_keeps_its_structure(name: str) -> None:
    before, after = load_recipe(path_of(name)), small(name)
    assert after.num_ranks <= MOST_RANKS and parameters(after.model).total < 1_000_000
    assert after.run.name == f"{before.run.name}_reduced"
    assert after.num_steps == 20 and after.run.output == f"runs/reduced/{name}" and after.run.start_from is None
    assert after.precision == before.precision.model_copy(update={"compute": "float32"})
    intervals = (after.checkpoint.interval, after.logging.maps_interval, after.logging.eval_interval)
    assert all(interval is None or interval <= 10 for interval in intervals)
    assert after.memory == before.memory and after.optim == before.optim
    assert after.model.tie_word_embeddings == before.model.tie_word_embeddings
    share = before.schedule.warmup_tokens / before.schedule.total_tokens
    assert after.schedule.kind == before.schedule.kind and after.schedule.min_lr == before.schedule.min_lr
    assert abs(after.schedule.warmup_tokens / after.schedule.total_tokens - share) < 1e-3
    for axis in ("tensor", "sharding", "expert", "context"):
        assert (getattr(after.parallel, axis) > 1) == (getattr(before.parallel, axis) > 1)
    assert len(after.model.attentions) == len(before.model.attentions)
    for old, new in zip(before.model.attentions, after.model.attentions, strict=True):
        sizes = {"num_attention_heads", "head_dim", "postmix_rank", "q_lora_rank", "kv_lora_rank"}
        sizes |= {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
        assert new.model_dump(exclude=sizes) == old.model_dump(exclude=sizes)
        assert new.num_attention_heads > 1
        if isinstance(new, VirtualHeadAttention):
            assert isinstance(old, VirtualHeadAttention) and new.num_physical_heads >= 2
            assert (new.postmix_rank is None) == (old.postmix_rank is None)
            if new.postmix_rank is not None and old.postmix_rank is not None:
                is_full = old.postmix_rank >= old.num_attention_heads
                assert (new.postmix_rank >= new.num_attention_heads) == is_full
    if before.model.experts is not None:
        old_experts, new_experts = before.model.experts, after.model.experts
        assert new_experts is not None and new_experts.num_experts_per_tok == 2
        shares = [experts.num_experts_per_tok / experts.num_experts for experts in (old_experts, new_experts)]
        assert shares[0] == shares[1]
    if before.model.sliding_window is not None:
        assert after.model.sliding_window is not None
        assert after.model.sliding_window.full_every == before.model.sliding_window.full_every
        windows = {after.model.window_of(layer) for layer in range(after.model.num_hidden_layers)}
        assert None in windows and len(windows) == 2


@pytest.mark.parametrize("name", ["table1_1p7b_mla", "10b_a1b_hybrid_vha_stage3_128k", "ours_1p7b_vha_from_gqa2"])
def test_every_change_is_named_and_nothing_else(name: str) -> None:
    before = load_recipe(path_of(name))
    result = reduced(before, on_cpu=True)
    values, expected = flat(before.model_dump()), flat(result.recipe.model_dump())
    for change in result.changes:
        key, _, ends = change.partition(": ")
        old, _, new = ends.partition(" -> ")
        assert old == ("null" if values[key] is None else str(values[key]))
        assert new == ("null" if expected[key] is None else str(expected[key])) and old != new
        values[key] = expected[key]
    assert values == expected


def test_a_dropped_checkpoint_and_a_dropped_axis_are_named() -> None:
    recipe = load_recipe(path_of("10b_a1b_hybrid_vha_stage3_128k"), ["parallel.tensor=4"])
    changes = reduced(recipe, on_cpu=True).changes
    assert "run.start_from: runs/10b_a1b_hybrid_vha_stage2_32k -> null" in changes
    for change in ("parallel.sharding: 16 -> 2", "parallel.expert: 8 -> 2", "parallel.tensor: 4 -> 2"):
        assert change in changes
    assert "parallel.context: 8 -> 1" in changes
    assert "precision.compute: bfloat16 -> float32" in changes


@pytest.mark.parametrize(
    ("given_axes", "kept"),
    [
        ({"tensor": 8, "sequence": True, "data": 4}, {"tensor": 2, "sequence": True, "data": 2}),
        ({"tensor": 8, "pipeline": 4, "virtual_pipeline": 7, "sharding": 16}, {"tensor": 2, "pipeline": 2}),
        ({"pipeline": 4, "context": 4, "sharding": 2}, {"pipeline": 2, "context": 2}),
        ({"context": 8, "sharding": 16, "sharding_stage": 3}, {"context": 2, "sharding": 2, "sharding_stage": 3}),
        ({"tensor": 4, "context": 8, "sharding": 16, "sharding_stage": 2}, {"tensor": 2, "context": 2}),
        ({}, {}),
    ],
)
def test_axes_that_cut_the_model_are_kept_first(given_axes: dict[str, Any], kept: dict[str, Any]) -> None:
    values = load_recipe(path_of("table1_1p7b_vha")).model_dump()
    values["parallel"] = given_axes
    values["data"]["micro_batch_size"] = 1
    parallel = reduced(recipe_from_dict(values, "test"), on_cpu=True).recipe.parallel
    defaults = {"tensor": 1, "sequence": False, "pipeline": 1, "virtual_pipeline": 1, "data": 1, "sharding": 1}
    defaults |= {"sharding_stage": 1, "context": 1, "expert": 1}
    assert parallel.model_dump() == defaults | kept


def test_an_odd_tensor_degree_goes_and_pipeline_stages_stay_equal() -> None:
    values = load_recipe(path_of("table1_1p7b_vha")).model_dump()
    values["model"] |= {"vocab_size": 600, "num_hidden_layers": 12}
    values["model"]["attention"]["num_attention_heads"] = 6  # 3 physical ones, so 2 ranks could not split them
    values["model"]["sliding_window"] = {"window": 8, "full_every": 3}
    values["parallel"] = {"tensor": 3, "pipeline": 4}
    after = reduced(recipe_from_dict(values, "test"), on_cpu=True).recipe
    assert (after.parallel.tensor, after.parallel.pipeline, after.model.num_hidden_layers) == (1, 2, 4)


def test_narrow_physical_heads_stay_as_narrow_and_a_shared_expert_becomes_small() -> None:
    values = load_recipe(path_of("30b_a3b_vha_fp8")).model_dump()
    values["model"]["attention"] |= {"physical_head_dim": 64, "premix_init": "orthogonal"}
    values["model"]["attention"] |= {"qk_norm": False, "attention_bias": True}
    values["model"]["experts"]["shared_expert_intermediate_size"] = 768
    values["optim"]["decay_target"] = "zero"
    after = reduced(recipe_from_dict(values, "test"), on_cpu=True).recipe.model
    assert isinstance(after.attention, VirtualHeadAttention) and after.experts is not None
    assert (after.attention.physical_head_dim, after.attention.head_dim) == (8, 16)  # half, as 64 of 128
    assert (after.attention.qk_norm, after.attention.attention_bias) == (False, True)
    assert after.experts.shared_expert_intermediate_size == after.experts.moe_intermediate_size == 32


def test_one_rank_may_be_all_there_is() -> None:
    parallel = reduced(load_recipe(path_of("30b_a3b_vha_fp8")), on_cpu=False, most_ranks=1).recipe.parallel
    assert (parallel.sharding, parallel.expert) == (1, 1)


def test_bfloat16_stays_where_there_are_kernels() -> None:
    recipe = load_recipe(path_of("30b_a3b_vha_fp8"))
    assert reduced(recipe, on_cpu=False).recipe.precision == recipe.precision


def test_overrides_apply_after_the_reduction() -> None:
    recipe = with_overrides(small("table1_1p7b_vha"), ["schedule.total_tokens=2560", "model.hidden_size=32"])
    assert (recipe.num_steps, recipe.model.hidden_size) == (10, 32)
    with pytest.raises(UserError, match="optim.lrr: unknown key; did you mean lr"):
        with_overrides(recipe, ["optim.lrr=1"])


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Valid recipes of many shapes and layouts."""
    degree = st.sampled_from([1, 2, 3, 4, 6, 8])
    tensor, pipeline, context, sharding = draw(degree), draw(degree), draw(degree), draw(degree)
    groups = draw(st.sampled_from([1, 2, 3, 8]))
    per_group = tensor * draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["grouped", "vha", "mla", "mfa", "gva", "dcmha"]))
    kv_heads = tensor * groups  # divisible whatever the kind
    attention: dict[str, Any] = {
        "grouped": {"num_key_value_heads": kv_heads, "head_dim": 8},
        "vha": {"num_key_value_heads": groups, "head_dim": 128, "postmix_rank": draw(st.integers(1, 64))},
        "mla": {"q_lora_rank": draw(st.sampled_from([None, 8, 64]))},
        "mfa": {"head_dim": 256, "q_lora_rank": 64},
        "gva": {"num_key_value_heads": kv_heads, "head_dim": 8, "qk_rope_head_dim": 64},
        "dcmha": {"num_groups": kv_heads, "head_dim": 8},
    }[kind]
    heads = (groups if kind == "vha" else kv_heads) * per_group
    expert = draw(st.sampled_from([1, sharding]))
    width = {"intermediate_size": tensor * draw(st.integers(1, 300))}
    if expert > 1 or draw(st.booleans()):
        chosen = draw(st.integers(1, 8))
        number = expert * draw(st.integers(chosen, 16))
        width = {"experts": {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": 6 * tensor}}
    layers = pipeline * draw(st.integers(2, 5))
    model: dict[str, Any] = {
        "vocab_size": 1000 * tensor,
        "hidden_size": draw(st.integers(1, 4096)),
        "num_hidden_layers": layers,
        "tie_word_embeddings": draw(st.booleans()),
        "attention": {"kind": kind, "num_attention_heads": heads} | attention,
    } | width
    length = 2 * context * tensor * draw(st.integers(2, 100))
    if kind in ("grouped", "vha") and draw(st.booleans()):
        model["sliding_window"] = {
            "window": draw(st.integers(1, length - 1)),
            "full_every": draw(st.integers(2, layers)),
        }
    micro, batches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    tokens = length * micro * batches * sharding
    return recipe_from_dict(
        {
            "run": {"name": "drawn", "seed": 0, "output": "unused"},
            "model": model,
            "data": {
                "train": "unused",
                "tokenizer": "unused",
                "sequence_length": length,
                "global_batch_size": micro * batches * sharding,
                "micro_batch_size": micro,
            },
            "optim": {"lr": 1e-3, "decay_target": "zero" if kind == "vha" else None},
            "schedule": {
                "kind": "wsd",
                "total_tokens": 100 * tokens,
                "warmup_tokens": 33 * tokens,
                "decay_tokens": 67 * tokens,
                "min_lr": 0.0,
            },
            "parallel": {
                "tensor": tensor,
                "sequence": tensor > 1 and draw(st.booleans()),
                "pipeline": pipeline,
                "context": context,
                "sharding": sharding,
                "sharding_stage": draw(st.sampled_from([1, 3])) if sharding > 1 and pipeline == 1 else 1,
                "expert": expert,
            },
            "debug": {"check_ranks_interval": 1 if tensor * pipeline * context * sharding > 1 else None},
        },
        source="drawn",
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(recipe=recipes(), most_ranks=st.sampled_from([1, 2, 4]))
def test_a_reduced_recipe_keeps_the_rules(recipe: Recipe, most_ranks: int) -> None:
    after = reduced(recipe, on_cpu=True, most_ranks=most_ranks).recipe  # checked inside
    assert after.num_ranks <= most_ranks and after.num_steps == 20
    assert isinstance(after.schedule, WSDSchedule)
    assert after.schedule.decay_tokens == after.schedule.total_tokens * 67 // 100
    assert after.model.attention.rope_dim <= 16


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/train.py"), str(path_of("30b_a3b_vha_fp8")), "--reduced", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_reduced_recipe_can_be_printed_with_overrides_and_nothing_is_written(tmp_path: Path) -> None:
    overrides = ["optim.lr=1e-3", "schedule.total_tokens=2560"]
    result = train(tmp_path, "--print-config", *overrides)
    values = YAML(typ="safe", pure=True).load(result.stdout)
    expected = with_overrides(small("30b_a3b_vha_fp8"), overrides)
    assert recipe_from_dict(values, "printed") == expected
    assert "precision.compute: bfloat16 -> float32" in result.stderr.splitlines()
    figures = json.loads(train(tmp_path, "--dry-run", "--json").stdout)
    assert (figures["ranks"], figures["schedule"]["steps"]) == (2, 20)
    assert not list(tmp_path.iterdir())


def test_a_mistake_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = train(tmp_path, "optim.lrr=1")
    assert result.returncode == 2 and "optim.lrr: unknown key" in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())
