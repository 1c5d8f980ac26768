"""The recipes of the paper's cells: every value has its origin, the numbers are the published ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.files import ALL, RECIPES, ROOT, SCALES, STAGES, path_of
from tools.make_recipes import stale
from tools.recipe_book.pages import files
from tools.recipe_book.values import LINE
from vha_paddle.config import load_recipe
from vha_paddle.config.differences import differences
from vha_paddle.counts import active_parameters, kv_cache_bytes, parameters

PAPER = [name for name in ALL if name != "quickstart"]
VALUE = re.compile(r" +[a-z_0-9]+: \S+ +# (?:paper|upstream|derived: \S.*|assumed: \S.*|paper: \S.*|upstream: \S.*)")
MILLIONS = {  # published parameters
    "table1_0p6b_gqa8": 596.050,
    "table1_1p7b_gqa8": 1720.575,
    "table1_4b_gqa8": 4022.468,
    "table1_0p6b_vha": 523.571,
    "table1_1p7b_vha": 1574.695,
    "table1_4b_vha": 3693.365,
}
CACHE = {  # bytes per token and layer that the paper prints as KB
    "table1_1p7b_gqa8": 4096,
    "table1_1p7b_mla": 1152,
    "table1_1p7b_mfa": 1024,
    "table1_1p7b_vha": 1024,
    "table2_1p7b_mha12": 6144,
    "30b_a3b_gqa4_fp8": 2048,
}


def changed(before: str, after: str) -> dict[str, Any]:
    """Keys in which two recipes differ, the run's name and output apart, with the second's values."""
    found = differences(load_recipe(path_of(before)), load_recipe(path_of(after)))
    return {key: new for key, _, new in found if key not in ("run.name", "run.output")}


def test_every_file_is_in_the_table_of_what_becomes_of_it() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == ALL


def test_the_files_are_what_the_generator_writes() -> None:
    assert stale(ROOT) == [], "run `python tools/make_recipes.py`"


def test_the_check_sees_a_changed_file_a_missing_one_and_one_too_many(tmp_path: Path) -> None:
    for name, text in files(ROOT).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert stale(tmp_path) == []
    changed_file, missing = tmp_path / "recipes/table1_4b_vha.yaml", tmp_path / "recipes/table1_4b_mla.yaml"
    changed_file.write_text(changed_file.read_text("utf-8").replace("2e-4", "3e-4"), encoding="utf-8")
    missing.unlink()
    (tmp_path / "recipes/other.yaml").touch()
    page = tmp_path / "docs/recipes.md"
    page.write_text(page.read_text("utf-8").replace("| `lr` |", "| `rate` |"), encoding="utf-8")
    names = ("other", "table1_4b_mla", "table1_4b_vha")
    assert sorted(stale(tmp_path)) == ["docs/recipes.md", *(f"recipes/{name}.yaml" for name in names)]


@pytest.mark.parametrize("name", PAPER)
def test_every_value_is_followed_by_its_origin(name: str) -> None:
    for number, line in enumerate(path_of(name).read_text("utf-8").splitlines(), 1):
        is_value = not line.lstrip().startswith("#") and re.match(r" *[a-z_0-9]+: *[^ #]", line)
        assert not is_value or VALUE.fullmatch(line), f"{name}.yaml line {number}: {line}"


@pytest.mark.parametrize("name", PAPER)
def test_the_header_launches_as_many_ranks_as_the_recipe_needs(name: str) -> None:
    recipe, text = load_recipe(path_of(name)), path_of(name).read_text("utf-8")
    nodes, ranks = (int(re.search(rf"--{option} (\d+)", text)[1]) for option in ("nnodes", "nproc_per_node"))
    assert nodes * ranks == recipe.num_ranks
    assert f"tools/train.py recipes/{name}.yaml" in text
    assert recipe.run.name == name and recipe.run.output == f"runs/{name}"


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items(), ids=MILLIONS.keys())
def test_parameters_are_the_published_ones(name: str, millions: float) -> None:
    assert round(parameters(load_recipe(path_of(name)).model).total / 1e6, 3) == millions


@pytest.mark.parametrize(("name", "size"), CACHE.items(), ids=CACHE.keys())
def test_cache_is_the_published_one(name: str, size: int) -> None:
    assert kv_cache_bytes(load_recipe(path_of(name)).model.attention, "bfloat16") == size


@pytest.mark.parametrize(
    ("name", "total", "active"), [("table1_8b_a1b_gqa8", 8, 1), ("10b_a1b_hybrid_gqa_stage1_8k", 10, 1)]
)
def test_an_assumed_shape_has_about_the_size_of_its_name(name: str, total: int, active: int) -> None:
    model = load_recipe(path_of(name)).model
    assert abs(parameters(model).total / 1e9 / total - 1) < 0.1
    assert abs(active_parameters(model) / 1e9 / active - 1) < 0.1


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("variant", ["mla", "mfa"])
def test_rivals_of_vha_have_about_the_baselines_attention(scale: str, variant: str) -> None:
    baseline, rival = (parameters(load_recipe(path_of(f"table1_{scale}_{v}")).model) for v in ("gqa8", variant))
    assert abs(rival.attention / baseline.attention - 1) < 0.05


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("variant", ["mla", "mfa", "vha"])
def test_variants_of_a_scale_differ_in_attention_only(scale: str, variant: str) -> None:
    keys = changed(f"table1_{scale}_gqa8", f"table1_{scale}_{variant}")
    maps = {"optim.decay_target", "logging.maps_interval"} if variant == "vha" else set()
    assert {key for key in keys if not key.startswith("model.attention.")} == maps


def test_dense_runs_are_the_research_configs() -> None:
    for scale, lr in {"0p6b": 2.5e-4, "1p7b": 2e-4, "4b": 2e-4}.items():
        recipe = load_recipe(path_of(f"table1_{scale}_vha"))
        assert (recipe.tokens_per_step, recipe.num_steps) == (2_097_152, 24_000)
        assert recipe.schedule.warmup_tokens == 2_000 * recipe.tokens_per_step
        assert (recipe.optim.lr, recipe.schedule.min_lr, recipe.schedule.kind) == (lr, 1e-5, "cosine")
        assert (recipe.optim.beta1, recipe.optim.beta2, recipe.optim.weight_decay) == (0.9, 0.95, 0.1)
        assert (recipe.parallel.sharding, recipe.num_ranks, recipe.num_microbatches) == (128, 128, 1)
        assert (recipe.precision.compute, recipe.memory.recompute) == ("bfloat16", "full")
        assert recipe.checkpoint.interval == 3000 and recipe.optim.decay_target == "zero"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table4_1p7b_premix_only", {"postmix": "none", "postmix_rank": None}),
        ("table4_1p7b_postmix_only", {"premix": "none"}),
        ("table4_1p7b_silu_premix", {"premix": "silu"}),
        ("table4_1p7b_silu_postmix", {"postmix": "silu"}),
        *((f"table4_1p7b_rank{rank}", {"postmix_rank": rank}) for rank in (1, 2, 8, 32, 128)),
        ("ours_1p7b_vha_gate_before_postmix", {"output_gate": "before_postmix"}),
        ("ours_1p7b_vha_weight_space", {"postmix_space": "weight"}),
    ],
)
def test_an_ablation_is_one_change_of_the_attention(name: str, change: dict[str, Any]) -> None:
    assert changed("table1_1p7b_vha", name) == {f"model.attention.{key}": value for key, value in change.items()}


def test_decay_targets_differ_in_nothing_else() -> None:
    for target in ("identity", "none"):
        assert changed("table1_1p7b_vha", f"ours_1p7b_vha_decay_{target}") == {"optim.decay_target": target}


def test_the_warm_start_has_the_shape_that_its_source_is_converted_to() -> None:
    keys = changed("table1_1p7b_vha", "ours_1p7b_vha_from_gqa2")
    assert set(keys) == {"run.start_from", "schedule.total_tokens", "schedule.warmup_tokens"}


@pytest.mark.parametrize(("variant", "repeats"), [("gqa", 3), ("vha", 4)])
def test_repeated_runs_differ_in_their_seed(variant: str, repeats: int) -> None:
    first = f"appendix_b_0p6b_{variant}_seed1"
    assert load_recipe(path_of(first)).run.seed == 1
    for seed in range(2, repeats + 1):
        assert changed(first, f"appendix_b_0p6b_{variant}_seed{seed}") == {"run.seed": seed}


@pytest.mark.parametrize("arm", ["gqa", "vha"])
def test_stages_of_a_hybrid_continue_one_model_at_as_many_tokens_a_step(arm: str) -> None:
    recipes = [load_recipe(path_of(f"10b_a1b_hybrid_{arm}_{stage}")) for stage in STAGES]
    assert [recipe.data.sequence_length for recipe in recipes] == [8192, 32768, 131072]
    for before, after in zip(recipes, recipes[1:], strict=False):
        assert after.run.start_from == before.run.output
        assert after.model == before.model
        assert (after.tokens_per_step, after.num_ranks) == (before.tokens_per_step, before.num_ranks)


def test_arms_of_the_hybrid_differ_in_their_full_layers_only() -> None:
    for stage in STAGES:
        keys = changed(f"10b_a1b_hybrid_gqa_{stage}", f"10b_a1b_hybrid_vha_{stage}")
        keys.pop("run.start_from", None)
        rest = {key for key in keys if not key.startswith("model.attention.")}
        assert rest == {"optim.decay_target", "logging.maps_interval"}
        assert keys["model.attention.num_key_value_heads"] == 2


def test_30b_is_trained_in_fp8_on_500b_tokens() -> None:
    for variant in ("gqa4", "mla", "vha"):
        recipe = load_recipe(path_of(f"30b_a3b_{variant}_fp8"))
        assert recipe.precision.fp8 == "all" and recipe.schedule.total_tokens == 500_000_000_000
        assert recipe.data.sequence_length == 8192
    assert (recipe.model.attention.num_attention_heads, recipe.model.attention.postmix_rank) == (48, 12)


def test_the_generator_checks_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/make_recipes.py"), "--check"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def origin(name: str, key: str) -> str:
    """The first word of the comment behind the first `key` of a file."""
    return re.search(rf"^ +{key}: \S+ +# (\w+)", path_of(name).read_text("utf-8"), re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("table1_1p7b_vha", "postmix_rank", "paper"),
        ("table1_0p6b_vha", "postmix_rank", "upstream"),  # the paper states ranks at 1.7B, 4B and 30B-A3B
        ("appendix_b_0p6b_vha_seed1", "postmix_rank", "upstream"),
        ("table1_4b_vha", "postmix_rank", "paper"),
        ("table1_1p7b_gqa8", "head_dim", "paper"),
        ("table1_4b_gqa8", "head_dim", "upstream"),
        ("30b_a3b_vha_fp8", "head_dim", "assumed"),
        ("30b_a3b_vha_fp8", "architecture", "assumed"),  # stated of the runs on 50B tokens
        ("table1_8b_a1b_vha", "architecture", "paper"),
        ("10b_a1b_hybrid_vha_stage3_128k", "sequence_length", "derived"),
        ("table1_1p7b_mla", "kind", "assumed"),
        ("table1_1p7b_mfa", "kind", "assumed"),
        ("table1_1p7b_vha", "premix", "paper"),
        ("table4_1p7b_premix_only", "postmix", "assumed"),
        ("table4_1p7b_postmix_only", "premix", "assumed"),
        ("table4_1p7b_silu_premix", "premix", "assumed"),
        ("table4_1p7b_silu_postmix", "postmix", "assumed"),
    ],
)
def test_nothing_is_the_papers_that_it_does_not_state(name: str, key: str, expected: str) -> None:
    assert origin(name, key) == expected


@pytest.mark.parametrize("name", PAPER)
def test_no_line_is_longer_than_the_projects_limit(name: str) -> None:
    assert max(map(len, path_of(name).read_text("utf-8").splitlines())) <= LINE
