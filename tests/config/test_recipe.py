"""Recipes: what is accepted, and the one line that says what is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from vha_paddle.config import load_recipe, recipe_to_yaml
from vha_paddle.config.schema import Recipe
from vha_paddle.errors import UserError
from vha_paddle.plan.memory import all_ranks, worst
from vha_paddle.plan.report import memory_table, rank_values

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes/quickstart.yaml"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SCHEMA = ROOT / "recipes/recipe.schema.json"


def error_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(QUICKSTART, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return re.sub(r"^(override ('[^']*'|\"[^\"]*\") ?)+: ", "", text)  # the file is right, so an override is named


def error_of_text(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe(copy) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_fits_the_editors_schema(path: Path) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validate(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")), schema)


def test_the_editors_schema_is_the_one_the_code_makes() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == Recipe.model_json_schema(), (
        "run `python -m vha_paddle.config > recipes/recipe.schema.json`"
    )


def test_derived_numbers() -> None:
    recipe = load_recipe(QUICKSTART, ["schedule.total_tokens=50e9", "data.micro_batch_size=2"])
    assert recipe.tokens_per_step == 4 * 256
    assert recipe.num_steps == 50_000_000_000 // 1024
    assert recipe.num_microbatches == 2
    assert recipe.num_ranks == 2


def test_numbers_are_read_as_yaml_1_2_does() -> None:
    recipe = load_recipe(QUICKSTART, ["optim.lr=3e-4", "schedule.min_lr=0", "schedule.total_tokens=1_000_000"])
    assert recipe.optim.lr == 3e-4
    assert recipe.schedule.min_lr == 0.0
    assert recipe.schedule.total_tokens == 1_000_000


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=3", "optim.lrr: unknown key; did you mean lr?"),
        ("optimm.lr=3", "optimm: unknown key; did you mean optim?"),
        ("optim.lr=abc", "optim.lr='abc': must be a valid number; correct the value"),
        ("optim.lr=.nan", "optim.lr=nan: must be a finite number; correct the value"),
        ("model.vocab_size=4.5", "model.vocab_size=4.5: must be a valid integer; correct the value"),
        ("model.vocab_size=true", "model.vocab_size=True: must be a valid integer; correct the value"),
        ("model.tie_word_embeddings=1", "model.tie_word_embeddings=1: must be a valid boolean; correct the value"),
        (
            "model.attention.kind=vhaa",
            "model.attention.kind=vhaa: must be one of grouped, vha, mla, mfa, gva, dcmha; did you mean vha?",
        ),
        (
            "model.attention.kind=grouped",
            "model.attention.postmix_rank: unknown key; it belongs to kind vha; remove it, or change "
            "model.attention.kind",
        ),
        (
            "model.attention.kind=GQA",
            "model.attention.kind=GQA: must be one of grouped, vha, mla, mfa, gva, dcmha; use grouped, whose head "
            "counts tell MHA, MQA and GQA apart",
        ),
        (
            "model.attention.q_lora_rank=3",
            "model.attention.q_lora_rank: unknown key; it belongs to kind mla and mfa; remove it, or change "
            "model.attention.kind",
        ),
        (
            "schedule.decay_tokens=5",
            "schedule.decay_tokens: unknown key; it belongs to kind wsd; remove it, or change schedule.kind",
        ),
        (
            "model.attention.postmix=SiLU",
            "model.attention.postmix='SiLU': must be 'linear', 'silu' or 'none'; did you mean silu?",
        ),
        ("OPTIM.lr=3", "OPTIM: unknown key; did you mean optim?"),
        ("postmix_rank=8", "postmix_rank: unknown key; did you mean model.attention.postmix_rank?"),
        ("lr=1", "lr: unknown key; did you mean optim.lr?"),
        ("model.postmix_rank=8", "model.postmix_rank: unknown key; did you mean model.attention.postmix_rank?"),
        ("num_experts=4", "num_experts: unknown key; did you mean model.experts.num_experts?"),
        ("schedule.total_tokens=50B", "schedule.total_tokens='50B': must be a valid integer; write 50e9"),
        ("schedule.warmup_tokens=1.5m", "schedule.warmup_tokens='1.5m': must be a valid integer; write 1.5e6"),
        ("model.vocab_size=32K", "model.vocab_size='32K': must be a valid integer; correct the value"),
        (
            "model.attention.num_attention_heads=9",
            "model.attention.num_attention_heads=9: must be a multiple of model.attention.num_key_value_heads=2; "
            "use 8 or 10",
        ),
        (
            "parallel.tensor=3",
            "parallel.tensor=3: must divide model.vocab_size=2048; use 2 or 4",
        ),
        (
            "parallel.tensor=8",
            "parallel.tensor=8: must divide model.attention's physical heads (num_attention_heads / "
            "num_key_value_heads)=4; use 2 or 4",
        ),
        (
            "parallel.sharding_stage=2",
            "parallel.sharding_stage=2: has no effect with parallel.sharding=1; raise that or remove the key",
        ),
        (
            "parallel.pipeline=3",
            "parallel.pipeline=3: must divide model.num_hidden_layers=4, so that stages are equal; use 2 or 4",
        ),
        (
            "parallel.virtual_pipeline=2",
            "parallel.virtual_pipeline=2: Paddle interleaves chunks on 3 pipeline ranks and more, and "
            "parallel.pipeline=1; use virtual_pipeline=1, or a pipeline of 3 or more",
        ),
        (
            "parallel.expert=2",
            "parallel.expert=2: splits the experts of a mixture-of-experts model, and there is no model.experts; use 1",
        ),
        (
            "data.global_batch_size=10",
            "data.global_batch_size=10: must be a multiple of data.micro_batch_size=4 times 1 data ranks; use 8 or 12",
        ),
        (
            "schedule.total_tokens=100",
            "schedule.total_tokens=100: one optimizer step takes 1024 tokens (global_batch_size * sequence_length); "
            "use at least that",
        ),
        ("schedule.min_lr=1.0", "schedule.min_lr=1.0: must not exceed optim.lr=0.004; lower it"),
        (
            "logging.wandb=online",
            "logging.wandb_project=null: a project is required with logging.wandb=online; name one",
        ),
        (
            "logging.wandb_project=x",
            "logging.wandb_project=x: has no effect with logging.wandb=off; use offline or online, or remove the key; "
            "as an override, logging.wandb_project=null",
        ),
        (
            "optim.decay_target=",
            "optim.decay_target=null: model.attention.kind=vha needs to know where decay pulls Premix and Postmix; "
            "use identity, zero (as upstream) or none",
        ),
    ],
    ids=lambda value: value.split(":")[0] if ":" not in value else "",
)
def test_a_mistake_gives_one_line_with_key_value_rule_and_remedy(override: str, expected: str) -> None:
    assert error_of(override) == expected


def test_a_key_foreign_to_the_attention_kind_is_unknown() -> None:
    overrides = ["model.attention={kind: grouped, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 32}"]
    assert error_of(*overrides) == (
        "optim.decay_target=identity: has no effect with model.attention.kind=grouped; remove the key"
    )


def test_fewer_kv_heads_than_ranks_are_accepted_and_odd_ones_refused() -> None:
    grouped = (
        "model.attention={{kind: grouped, num_attention_heads: 12, num_key_value_heads: {}, head_dim: 32}}",
        "optim.decay_target=",
    )
    assert load_recipe(QUICKSTART, [grouped[0].format(2), grouped[1], "parallel.tensor=4"]).parallel.tensor == 4
    assert error_of(grouped[0].format(6), grouped[1], "parallel.tensor=4") == (
        "parallel.tensor=4: must divide model.attention.num_key_value_heads=6 or be a multiple of it; use 1 or 2"
    )


def test_sequence_parallel_needs_tensor_ranks_and_a_sequence_that_divides() -> None:
    assert "has no effect with parallel.tensor=1" in error_of("parallel.sequence=true", "parallel.tensor=1")
    assert error_of("parallel.sequence=true", "data.sequence_length=255") == (
        "data.sequence_length=255: must be a multiple of parallel.tensor=2 with parallel.sequence; use 254 or 256"
    )


def test_gradients_and_weights_are_not_sharded_over_a_pipeline() -> None:
    sharded = ("parallel.sharding=2", "parallel.sharding_stage=3", "data.micro_batch_size=1")
    assert load_recipe(QUICKSTART, list(sharded)).parallel.sharding_stage == 3
    assert error_of(*sharded, "parallel.pipeline=2") == (
        "parallel.sharding_stage=3: must be 1 with parallel.pipeline=2, which has many microbatches under way at once; "
        "use 1"
    )


def test_context_ranks_cut_the_sequence_into_two_pieces_each() -> None:
    assert load_recipe(QUICKSTART, ["parallel.context=2"]).num_ranks == 4
    assert error_of("parallel.context=2", "data.sequence_length=250") == (
        "data.sequence_length=250: must be a multiple of twice parallel.context=2; use 248 or 252, or "
        "parallel.context=1"
    )
    assert error_of("parallel.context=2", "parallel.sequence=true", "data.sequence_length=252") == (
        "data.sequence_length=252: must be a multiple of twice parallel.context=2 times parallel.tensor=2 with "
        "parallel.sequence; use 248 or 256, or parallel.context=1 or 3"
    )


def test_interleaving_takes_as_many_microbatches_as_stages_or_twice_as_many() -> None:
    stages = ["model.num_hidden_layers=8", "parallel.pipeline=4", "parallel.virtual_pipeline=2"]
    for microbatches, works in ((4, True), (6, False), (8, True), (12, True), (2, False)):
        batch = [f"data.global_batch_size={microbatches}", "data.micro_batch_size=1"]
        if works:
            assert load_recipe(QUICKSTART, [*stages, *batch]).num_microbatches == microbatches
        else:
            assert f"there are {microbatches};" in error_of(*stages, *batch)


def test_layers_divide_among_chunks() -> None:
    assert error_of("model.num_hidden_layers=12", "parallel.pipeline=4", "parallel.virtual_pipeline=2") == (
        "parallel.pipeline=4: multiplied by parallel.virtual_pipeline=2 it must divide model.num_hidden_layers=12, so "
        "that stages are equal; use 3 or 6"
    )


def test_comparing_ranks_needs_more_than_one() -> None:
    assert "has no effect with one" in error_of("parallel.tensor=1", "debug.check_ranks_interval=5")


def test_keeping_some_checkpoints_for_ever_needs_an_interval() -> None:
    assert load_recipe(QUICKSTART, ["checkpoint.keep_every_tokens=1e6"]).checkpoint.keep_every_tokens == 10**6
    error = error_of("checkpoint.keep_every_tokens=1000", "checkpoint.interval=null")
    assert error.startswith("checkpoint.keep_every_tokens=1000: has no effect without checkpoint.interval")


def test_data_ranks_divide_the_global_batch() -> None:
    recipe = load_recipe(QUICKSTART, ["parallel.data=2", "parallel.sharding=2", "data.micro_batch_size=1"])
    assert (recipe.num_ranks, recipe.num_data_ranks, recipe.num_microbatches) == (8, 4, 1)
    assert "times 2 data ranks; use 8" in error_of("parallel.data=2")


def test_a_repeated_key_is_an_error_that_names_its_line(tmp_path: Path) -> None:
    text = error_of_text(tmp_path, "run:\n  name: a\n  name: b\n")
    assert 'found duplicate key "name"' in text and "line 3" in text


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    text = QUICKSTART.read_text(encoding="utf-8").replace("  seed: 1\n", "")
    assert error_of_text(tmp_path, text).endswith("run.seed: required key is missing; add it")


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", "\x00", "run: 3"])
def test_text_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    assert "\n" not in error_of_text(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("optim.lr", "must be section.key=value, for example optim.lr=3e-4"),
        ("=3", "must be section.key=value, for example optim.lr=3e-4"),
        (".lr=3", "must be section.key=value, for example optim.lr=3e-4"),
        ("run.name.x=3", "name is a value, not a section"),
    ],
)
def test_an_override_must_be_a_dotted_key_and_a_value(override: str, rule: str) -> None:
    assert error_of(override) == rule


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optim.lr=1e-3", "parallel.tensor=3"], "override 'parallel.tensor=3': parallel.tensor=3: must"),
        (["optimm.lr=3", "run.seed=2"], "override 'optimm.lr=3': optimm: unknown key"),
        (["optim.lr=0", "optim.lr=-1"], "override 'optim.lr=-1': optim.lr=-1: must be"),
        # the key that is named is the file's, which fitted before
        (["model.vocab_size=2050", "parallel.sharding=2"], "override 'model.vocab_size=2050' override "),
    ],
)
def test_a_mistake_in_an_override_names_the_override(overrides: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert str(caught.value).startswith(named)


def test_a_mistake_in_the_file_names_the_file_whatever_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART.read_text(encoding="utf-8").replace("lr: ", "lrr: "), encoding="utf-8")
    with pytest.raises(UserError, match=rf"^{path}: "):
        load_recipe(path, ["run.seed=2"])
    incomplete = QUICKSTART.read_text(encoding="utf-8").replace("  seed: 1\n", "")
    path.write_text(incomplete, encoding="utf-8")
    assert load_recipe(path, ["run.seed=2"]).run.seed == 2
    with pytest.raises(UserError, match=r"^override 'parallel.tensor=3': "):
        load_recipe(path, ["run.seed=2", "parallel.tensor=3"])


class TestTrainCommand:
    def run(self, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "tools/train.py"), str(QUICKSTART), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def test_a_mistake_exits_2_with_one_line_and_writes_nothing(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "optim.lrr=3")
        assert result.returncode == 2
        assert result.stderr == "error: override 'optim.lrr=3': optim.lrr: unknown key; did you mean lr?\n"
        assert list(tmp_path.iterdir()) == []

    def test_overrides_are_optional_and_shown_so(self, tmp_path: Path) -> None:
        command = [sys.executable, str(ROOT / "tools/train.py")]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 2 and "recipe [section.key=value ...]\n" in result.stderr
        assert result.stderr.endswith("the following arguments are required: recipe\n")

    def test_a_missing_dataset_exits_2_before_anything_is_written(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "parallel.tensor=1")
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_print_config_is_a_recipe_again(self, tmp_path: Path) -> None:
        copy = tmp_path / "printed.yaml"
        copy.write_text(self.run(tmp_path, "--print-config", "optim.lr=1e-3").stdout, encoding="utf-8")
        assert load_recipe(copy) == load_recipe(QUICKSTART, ["optim.lr=1e-3"])

    def test_dry_run_says_what_would_run(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, "--dry-run", "--json")
        figures = json.loads(result.stdout)
        assert result.returncode == 0 and list(tmp_path.iterdir()) == []
        assert figures["schedule"]["steps"] == load_recipe(QUICKSTART).num_steps

    def test_dry_run_shows_the_fullest_rank_as_the_plan_does(self, tmp_path: Path) -> None:
        layout = ["parallel.tensor=1", "parallel.pipeline=2", "parallel.sharding=4", "data.micro_batch_size=1"]
        layout.append("memory.recompute=full")
        shown = json.loads(self.run(tmp_path, "--dry-run", "--json", *layout).stdout)["worst_rank"]
        fullest = worst(all_ranks(load_recipe(QUICKSTART, layout)))
        assert shown == rank_values(fullest)
        size, owned = fullest.parameters, fullest.owned
        assert owned < size < 1_976_384  # of the whole model
        assert shown["exact_bytes"] == {"weights": 4 * size, "gradients": 4 * size, "optimizer": 8 * owned}
        estimated = shown["estimated_bytes"]
        peak = estimated["activations"] + max(estimated["loss"], estimated["block"])
        assert shown["total_bytes"] == 8 * (size + owned) + peak

    def test_dry_run_as_text_has_the_memory_and_ends_with_where_the_rest_is(self, tmp_path: Path) -> None:
        lines = self.run(tmp_path, "--dry-run").stdout.splitlines()
        table = list(memory_table({"worst": worst(all_ranks(load_recipe(QUICKSTART)))}))
        assert lines[0] == "quickstart: vha attention on 2 ranks"
        assert lines[-2 - len(table) : -2] == table
        assert lines[-2] == "data were not looked at: whether they are there, and fit, shows when the run starts"
        assert lines[-1] == "communication, time and other layouts: python tools/plan.py"
