"""`tools/calculate.py` as a user runs it, from any folder."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vha_paddle.config import GroupedAttention, load_recipe
from vha_paddle.counts.shapes import named
from vha_paddle.plan.decode import decode
from vha_paddle.plan.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "calculate.py"
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")


def calculate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_cache_is_printed_as_json(tmp_path: Path) -> None:
    result = calculate(tmp_path, "cache", RECIPE, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["bfloat16_bytes_per_token_per_layer"] == 2 * 2 * 32 * 2


def test_an_override_changes_the_parameters_of_a_rank(tmp_path: Path) -> None:
    result = calculate(tmp_path, "params", RECIPE, "--json", "parallel.tensor=1")
    found = json.loads(result.stdout)
    assert found["total_on_one_rank"] == found["total"]
    assert found["total_served_folded"] == found["total"] + 4 * (192 * 4 * 32 - 2 * 32 * 32 - 2 * 8 * 2)


def test_flops_are_printed_as_a_table_with_every_convention(tmp_path: Path) -> None:
    title, *rows = calculate(tmp_path, "flops", RECIPE).stdout.splitlines()
    assert title.split() == ["quickstart"]
    lines = dict(line.split() for line in rows)
    forward = sum(int(value.replace(",", "")) for name, value in lines.items() if name.startswith("forward."))
    assert lines["training.with_lm_head_full_scores"] == f"{3 * forward:,}"


def test_several_attentions_of_a_shape_are_printed_beside_each_other(tmp_path: Path) -> None:
    command = ["cache", "--shape", "1.7B", "--attention", "gqa", "mla", "vha", "--sequence-length", "32768"]
    found = json.loads(calculate(tmp_path, *command, "--json").stdout)
    per_layer = {name: values["bfloat16_bytes_per_token_per_layer"] for name, values in found.items()}
    assert per_layer == {"1.7B gqa 16-8": 4096, "1.7B mla": 1152, "1.7B vha 16-2": 1024}
    titles, *rows = (line.split() for line in calculate(tmp_path, *command).stdout.splitlines())
    assert titles == "1.7B gqa 16-8 1.7B mla 1.7B vha 16-2".split()
    assert ["bfloat16_bytes_per_token_per_layer", "4,096", "1,152", "1,024"] in rows
    assert rows[-1] == "bfloat16_bytes_per_token over 1.7B gqa 16-8 1.000 x 0.281 x 0.250 x".split()


def test_a_figure_that_does_not_fit_one_gpu_is_marked(tmp_path: Path) -> None:
    command = ["decode", "--shape", "1.7B", "--attention", "gqa-8", "vha", "--batch", "64", "--context", "32K"]
    command += ["--gpu", "h200"]
    lines = calculate(tmp_path, *command).stdout.splitlines()
    rates = next(line for line in lines if line.startswith("tokens_per_second_at_most "))
    assert rates.split() == ["tokens_per_second_at_most", "1,259", "*", "4,846"]
    assert "tokens_per_second_at_most over 1.7B gqa 16-8 1.000 x 3.848 x".split() in [line.split() for line in lines]
    assert lines[-1].startswith("* weights and caches do not fit one such GPU")
    found = json.loads(calculate(tmp_path, *command, "--json").stdout)
    assert [values["fits_one_gpu"] for values in found.values()] == [False, True]
    small = calculate(tmp_path, "decode", "--shape", "1.7B", "--gpu", "h200").stdout
    assert "fits_one_gpu" in small and "*" not in small


def test_the_30b_baseline_is_printed_with_its_heads_and_those_of_the_recipes(tmp_path: Path) -> None:
    text = calculate(tmp_path, "cache", "--shape", "30B-A3B", "--attention", "gqa").stdout
    assert text.split()[:3] == ["30B-A3B", "gqa", "32-4"]
    assert "the recipes' baseline (30b_a3b_gqa4_fp8) is assumed to have 48-4" in text
    recipe = load_recipe(ROOT / "recipes" / "30b_a3b_gqa4_fp8.yaml")
    attention = recipe.model.attention
    assert isinstance(attention, GroupedAttention)
    assert (attention.num_attention_heads, attention.num_key_value_heads) == (48, 4)
    others = calculate(tmp_path, "cache", "--shape", "30B-A3B", "--attention", "48-4", "vha").stdout
    assert "30B-A3B gqa 48-4" in others and "assumed to have" not in others
    for page in ("docs/calculators.md", "recipes/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "32-4" in text and "48-4" in text, page


def test_switches_choose_the_rule_and_the_width(tmp_path: Path) -> None:
    paper = ["--shape", "1.7B", "--attention", "gqa", "--no-lm-head", "--intermediate-size", "5504", "--json"]
    assert round(json.loads(calculate(tmp_path, "flops", *paper).stdout)["training"] / 1e9, 4) == 10.6137
    vha = ["flops", "--shape", "1.7B", "--no-lm-head", "--intermediate-size", "5504", "--json"]
    folded, unfolded = (
        json.loads(calculate(tmp_path, *vha, switch).stdout)["forward"] for switch in ("--folded", "--unfolded")
    )
    assert (round(folded / 1e9, 4), round(unfolded / 1e9, 4)) == (round(3.5379 - 0.1762, 4), round(9.7797 / 3, 4))


def test_a_decoder_step_is_bounded_by_a_gpu(tmp_path: Path) -> None:
    command = ["decode", "--shape", "1.7B", "--batch", "64", "--context", "32768", "--gpu", "h200", "--json"]
    found = json.loads(calculate(tmp_path, *command).stdout)
    assert found["cache_bytes_per_step"] == 64 * 32768 * 28 * 1024
    assert (found["gpu"], found["limited_by"], found["fits_one_gpu"]) == ("H200 SXM 141 GB", "memory", True)
    read = found["weight_bytes_per_step"] + found["cache_bytes_per_step"]
    assert found["tokens_per_second_at_most"] == pytest.approx(64 * 4800e9 / read)


def test_table_5_and_the_claims_need_no_model(tmp_path: Path) -> None:
    rows = json.loads(calculate(tmp_path, "table5", "--json").stdout)
    assert [round(row["table_width"], 4) for row in rows[:3]] == [10.6137, 9.9090, 9.7797]
    assert "10.6137" in calculate(tmp_path, "table5").stdout
    claims = json.loads(calculate(tmp_path, "claims", "--json").stdout)
    verdicts = [claim["verdict"] for claim in claims]
    assert verdicts.count("agrees") >= 20 and any(verdict.startswith("differs by") for verdict in verdicts)
    assert "cannot be computed: quality" in calculate(tmp_path, "claims").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["params", RECIPE, "parallel.tensor=3"], "parallel.tensor=3: must divide"),
        (["cache"], "the model: give one of a recipe, --shape (with --attention), and --kind with its sizes"),
        (["cache", RECIPE, "--shape", "1.7B"], "the model: give one of a recipe"),
        (["cache", RECIPE, "--heads", "4"], "--heads: describes a model of its own; override the recipe's key instead"),
        (["cache", "--kind", "vha"], "vha: model.hidden_size: required key is missing; add it"),
        (
            ["cache", "--shape", "1.7B", "--heads", "many"],
            "model.attention.num_attention_heads='many': must be a valid",
        ),
        (
            ["cache", "--shape", "1.7B", "--attention", "17-2"],
            "must be a multiple of model.attention.num_key_value_heads",
        ),
        (["params", "--shape", "30B-A3B", "--expert", "7"], "parallel.expert=7: must divide"),
        (["decode", "--shape", "1.7B", "--gpu", "tpu"], "--gpu tpu: no such GPU in the table"),
        (["decode", "--shape", "1.7B", "--context", "many"], "--context many: must be a number of tokens"),
        (["cache", "--shape", "1.7B", "--sequence-length", "4M"], "--sequence-length 4M: must be a number of tokens"),
        (["decode", "--shape", "1.7B", "--batch", "0"], "--batch 0: must be at least 1"),
        (["table5", "--intermediate-size", "wide"], "model.intermediate_size='wide': must be a valid integer"),
        (["cache", RECIPE, "--sequence-length", "64"], "--sequence-length: describes a model of its own"),
        (["cache", RECIPE, "--attention", "gqa"], "--attention: describes a model of its own"),
        (["params", RECIPE, "--tensor", "2"], "--tensor: describes a model of its own"),
        (["cache", "--kind", "mla", "--attention", "gqa"], "--attention: goes with --shape, and --kind names the"),
        (["cache", "--shape", "1.7B", "--tensor", "2"], "--tensor: is for params; drop it"),
        (["params", "--shape", "1.7B", "--batch", "8"], "--batch: is for decode; drop it"),
        (["decode", "--shape", "1.7B", "--no-causal"], "--causal: is for flops, fold, table5; drop it"),
        (["claims", "--shape", "4B"], "--shape: claims is about the paper's own models; drop it"),
        (["cache", "--shape", "1.7B", "--only", "differs"], "--only: is for claims; drop it"),
        (["claims", "nothing.yaml"], "nothing.yaml: claims is about the paper's own models; drop it"),
        (["table5", "--heads", "8"], "--heads: table5 is about the paper's own models; drop it"),
        (["flops", "--shape", "1.7B", "--compose-rank", "2"], "model.attention.compose_rank: unknown key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = calculate(tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def examples() -> list[str]:
    """The commands that --help shows."""
    text = subprocess.run([sys.executable, str(TOOL), "--help"], capture_output=True, text=True, check=True).stdout
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("python tools/calculate.py")]


def test_every_example_of_the_help_runs() -> None:
    commands = examples()
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(command)
        result = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{command}: {result.stderr}"


def test_calculating_loads_no_paddle() -> None:
    code = "import sys, vha_paddle.counts.claims, vha_paddle.counts.topics, vha_paddle.plan.decode; "
    code += "print('paddle' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr


def test_the_documented_steps_are_the_computed_ones() -> None:
    text = (ROOT / "docs" / "calculators.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:5] for line in text.splitlines() if line.startswith("| batch ")]
    for row, (batch, context) in zip(rows, ((1, 4096), (64, 4096), (64, 32768)), strict=True):
        for shown, name in zip(row, ("gqa", "vha", "mla"), strict=True):
            found = decode(named("1.7B", name).model, batch, context, GPUS["h200"])
            mark = "" if found.fits else " *"
            assert f"{found.tokens_per_second:,.0f}{mark}" == shown.strip(), (name, batch, context)
