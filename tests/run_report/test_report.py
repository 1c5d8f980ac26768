"""Runs compared: every figure against one computed by hand or from the definition."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from vha_paddle.config import load_recipe, recipe_to_yaml
from vha_paddle.errors import UserError
from vha_paddle.run_report.compare import comparison, groups_of, smoothed, value_at
from vha_paddle.run_report.figures import figures, style_of
from vha_paddle.run_report.page import page
from vha_paddle.run_report.read import read_run

ROOT = Path(__file__).resolve().parents[2]
STEP = 1000  # tokens
GQA = ("model.attention={kind: grouped, num_attention_heads: 8, num_key_value_heads: 8, head_dim: 32}",)


def a_run(
    directory: Path, name: str, losses: list[float], *overrides: str, seed: int = 1, val: dict[int, float] | None = None
) -> Path:
    """A run directory with a record for each loss, and validation losses by step."""
    path = directory / name
    path.mkdir()
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", [f"run.name={name}", f"run.seed={seed}", *overrides])
    (path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    records: list[dict[str, Any]] = [
        {
            "step": step,
            "tokens": step * STEP,
            "loss": loss,
            "lr": 0.1,
            "grad_norm": 2.0,
            "grad_norms": {"attention": 1.0, "premix": 3**0.5},
            "tokens_per_second": 10.0 * step,
            "mfu": 0.01 * step,
            "seconds": {"forward": 1.0, "backward": 2.0, "start" if step == 1 else "optimizer": 1.0},
        }
        for step, loss in enumerate(losses, 1)
    ]
    for step, loss in (val or {}).items():
        records[step - 1]["val_loss"] = loss
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def grouped(directory: Path, name: str, losses: list[float], seed: int = 1, **more: Any) -> Path:
    overrides = ("optim.decay_target=null", *GQA)
    return a_run(directory, name, losses, *overrides, seed=seed, **more)


def test_smoothing_weighs_by_age_in_tokens() -> None:
    rng = np.random.default_rng(0)
    tokens, values = np.cumsum(rng.integers(1, 50, 40)).astype(float), rng.normal(size=40)
    window = 60.0
    expected = []
    for i in range(40):
        weights = np.exp(-(tokens[i] - tokens[: i + 1]) / window)
        expected.append((weights * values[: i + 1]).sum() / weights.sum())
    np.testing.assert_allclose(smoothed((tokens, values), window)[1], expected, rtol=1e-10)


def test_no_window_is_no_smoothing() -> None:
    curve = (np.array([1.0, 2.0]), np.array([3.0, 5.0]))
    assert smoothed(curve, 0)[1].tolist() == [3.0, 5.0]


def test_a_value_between_records_lies_on_their_line_and_none_is_invented_outside() -> None:
    curve = (np.array([10.0, 20.0]), np.array([4.0, 2.0]))
    assert value_at(curve, 15) == 3.0
    assert value_at(curve, 9.9) is None
    assert value_at(curve, 20.1) is None
    assert value_at((np.array([10.0, 20.0, 100.0]), np.array([4.0, 2.0, 1.0])), 60) == 1.5


def test_losses_at_equal_tokens_and_equal_flops(tmp_path: Path) -> None:
    """Linear losses, so that every interpolated value is known; the two models differ in FLOPs per token."""
    vha = read_run(a_run(tmp_path, "vha", [10 - step for step in range(1, 7)], val={2: 9.0, 6: 5.0}))
    gqa = read_run(grouped(tmp_path, "gqa", [20 - 2 * step for step in range(1, 6)], val={5: 11.0}))
    compared = comparison(groups_of([vha, gqa]), window=0)
    first, second = compared["groups"]
    assert compared["equal_tokens"] == 5 * STEP
    assert first["loss_end"]["mean"] == 4.0 and second["loss_end"]["mean"] == 10.0
    assert first["loss_equal_tokens"]["mean"] == 5.0 and second["loss_equal_tokens"]["mean"] == 10.0
    assert first["val_loss_end"]["mean"] == 5.0
    assert first["val_loss_equal_tokens"]["mean"] == pytest.approx(6.0)  # between 9 at step 2 and 5 at step 6
    budget = min(6 * STEP * vha.flops_per_token, 5 * STEP * gqa.flops_per_token)
    assert compared["equal_flops"] == budget
    assert first["loss_equal_flops"]["mean"] == pytest.approx(10 - budget / vha.flops_per_token / STEP)
    assert second["loss_equal_flops"]["mean"] == pytest.approx(20 - 2 * budget / gqa.flops_per_token / STEP)
    assert vha.flops_per_token != gqa.flops_per_token
    assert comparison(groups_of([gqa, vha]), window=0)["groups"] == [second, first]


def test_seeds_of_one_model_are_a_group_with_mean_and_deviation(tmp_path: Path) -> None:
    runs = [
        read_run(a_run(tmp_path, "vha-s1", [3.0, 2.0], seed=1)),
        read_run(grouped(tmp_path, "gqa", [3.0, 2.5])),
        read_run(a_run(tmp_path, "vha-s2", [3.0, 2.2], seed=2)),
        read_run(a_run(tmp_path, "vha-s12", [3.0, 2.7], seed=12)),
    ]
    vha, gqa = comparison(groups_of(runs), window=0)["groups"]
    assert (vha["name"], vha["seeds"]) == ("vha", [1, 2, 12])
    assert vha["loss_end"]["mean"] == pytest.approx(2.3)
    assert vha["loss_end"]["standard_deviation"] == pytest.approx(math.sqrt((0.3**2 + 0.1**2 + 0.4**2) / 2))
    assert (gqa["name"], gqa["loss_end"]["standard_deviation"]) == ("gqa", None)


def test_another_learning_rate_is_another_model(tmp_path: Path) -> None:
    runs = [read_run(a_run(tmp_path, "a", [1.0])), read_run(a_run(tmp_path, "b", [1.0], "optim.lr=1e-3"))]
    assert [group.name for group in groups_of(runs)] == ["a", "b"]


def test_groups_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "fast").mkdir()
    slow, fast = a_run(tmp_path / "slow", "a", [1.0]), a_run(tmp_path / "fast", "a", [1.0], "optim.lr=1e-3")
    assert [group.name for group in groups_of([read_run(slow), read_run(fast)])] == [f"a ({slow})", f"a ({fast})"]


def test_a_seed_that_is_there_twice_is_warned_of(tmp_path: Path) -> None:
    runs = [read_run(a_run(tmp_path, name, [1.0, 0.9], seed=seed)) for name, seed in (("a", 1), ("b", 2), ("c", 1))]
    pages = []
    for groups in (groups_of(runs[:2]), groups_of(runs)):
        pages.append(page(comparison(groups, 0), groups, []))
    assert ["A seed is there more than once" in html for html in pages] == [False, True]


def test_a_mean_is_not_taken_over_fewer_seeds_than_there_are(tmp_path: Path) -> None:
    with_value = read_run(a_run(tmp_path, "a-1", [2.0, 1.0], val={2: 1.5}))
    without = read_run(a_run(tmp_path, "a-2", [2.0, 1.0], seed=2))
    (group,) = comparison(groups_of([with_value, without]), window=0)["groups"]
    assert group["val_loss_end"] is None


def test_time_is_shared_among_the_phases_and_communication_is_a_part_of_it(tmp_path: Path) -> None:
    path = a_run(tmp_path, "a", [2.0, 1.0])
    run = read_run(path)
    assert run.time_shares() == {"forward": 0.25, "backward": 0.5, "start": 0.125, "optimizer": 0.125}
    assert run.communication_share() is None
    change(path, lambda record: record | {"communication_seconds": 0.5 * record["step"]})
    assert read_run(path).communication_share() == (0.5 + 1.0) / 8


def test_usage_is_compared_over_seeds(tmp_path: Path) -> None:
    paths = [a_run(tmp_path, f"a-{seed}", [2.0, 1.0, 1.0], seed=seed) for seed in (1, 2)]
    for path, most in zip(paths, (300, 500), strict=True):
        change(path, lambda record, most=most: record | {"memory": {"resident": most - 10 * (3 - record["step"])}})
    (group,) = comparison(groups_of([read_run(path) for path in paths]), window=0)["groups"]
    assert group["mfu"]["mean"] == pytest.approx(0.02)
    assert group["peak_memory"]["mean"] == 400.0
    assert group["communication_share"] is None


def test_a_run_that_recorded_no_time_is_compared_all_the_same(tmp_path: Path) -> None:
    old = a_run(tmp_path, "old", [2.0, 1.0])
    change(old, lambda record: {key: record[key] for key in ("step", "tokens", "loss", "lr", "grad_norm")})
    groups = groups_of([read_run(old), read_run(a_run(tmp_path, "new", [2.0, 1.0], "optim.lr=1e-3"))])
    assert "Where the time goes" in page(comparison(groups, 0), groups, figures(groups, 0))
    assert "Where the time goes" not in page(comparison(groups[:1], 0), groups[:1], figures(groups[:1], 0))


def test_a_run_that_was_evaluated_early_alone_is_drawn(tmp_path: Path) -> None:
    groups = groups_of([read_run(a_run(tmp_path, "a", [5.0] * 30, val={1: 5.0}))])
    assert "Validation loss over tokens" in page(comparison(groups, 0), groups, figures(groups, 0))


def test_maps_are_drawn_by_their_means(tmp_path: Path) -> None:
    path = a_run(tmp_path, "a", [2.0, 1.0])
    maps = {"layer": [0, 1], "premix_distance": [[1.0, 2.0], [3.0, 6.0]], "postmix_distance": [None, 0.5]}
    change(path, lambda record: record | {"maps": maps} if record["step"] == 2 else record)
    run = read_run(path)
    tokens, values = run.curves["maps.premix_distance"]
    assert (tokens.tolist(), values.tolist()) == ([2 * STEP], [3.0])
    assert run.curves["maps.postmix_distance"][1].tolist() == [0.5]
    groups = groups_of([run])
    assert "VHA's maps over tokens, means over layers and groups" in {each.title for each in figures(groups, 0)}


def test_every_group_has_a_style_of_its_own_in_the_legend(tmp_path: Path) -> None:
    assert len({style_of(number) for number in range(40)}) == 40
    html = the_page(tmp_path)
    for number in range(2):
        assert f'stroke="{style_of(number)[0]}"' in html[html.index('class="legend"') :]


def change(path: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Every record of a run replaced."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("".join(json.dumps(make(json.loads(line))) + "\n" for line in lines))


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = a_run(tmp_path, "a", [2.0, 1.0])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "tok')
    assert read_run(path).tokens == 2 * STEP


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    """Python's JSON reads them, though no run of ours writes them."""
    path = a_run(tmp_path, "a", [2.0, 1.0])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "tokens": 3000, "loss": 0.5, "lr": NaN, "mfu": 1e999}\n')
        file.write('{"step": 4, "tokens": 4000, "loss": NaN, "skipped": "loss nan", "grad_norm": -Infinity}\n')
    run = read_run(path)
    assert {key: len(run.curves[key][1]) for key in ("loss", "lr", "mfu", "grad_norm")} == {
        "loss": 3,
        "lr": 2,
        "mfu": 2,
        "grad_norm": 2,
    }
    assert run.tokens == 3 * STEP


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"null",
        b"5",
        b"{",
        b'{"step": 1, "tokens": "9", "loss": 1}',
        b'{"step": 2, "tokens": 0, "loss": 1}',
        b'{"step": 2, "tokens": 2000, "loss": NaN}',
        b"\xff\xfe\0",
        b"[" * 100_000,
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = a_run(tmp_path, "a", [2.0])
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2 is no record of a step; remove the line"):
        read_run(path)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run, which has a metrics.jsonl and a recipe.yaml"):
        read_run(tmp_path)


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="records no step yet"):
        read_run(a_run(tmp_path, "a", []))


def test_a_run_of_which_no_loss_is_a_number_is_refused(tmp_path: Path) -> None:
    path = a_run(tmp_path, "a", [2.0, 1.0])
    change(path, lambda record: record | {"loss": None, "skipped": "loss nan"})
    with pytest.raises(UserError, match="has no step with a finite loss"):
        read_run(path)


@pytest.mark.parametrize("again", [[3], [1, 2]])  # the last line twice, two runs in one file
def test_records_that_do_not_follow_each_other_are_refused(tmp_path: Path, again: list[int]) -> None:
    path = a_run(tmp_path, "a", [3.0, 2.0, 1.0])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines, *(lines[step - 1] for step in again)]))
    with pytest.raises(UserError, match=f"line 4 has {again[0] * STEP} tokens, and a record before it 3000; each step"):
        read_run(path)


def the_page(directory: Path) -> str:
    runs = [
        read_run(a_run(directory, "vha", [3.0, 2.0, 1.0], val={3: 1.5})),
        read_run(grouped(directory, "gqa", [3.0, 2.0, 1.2], val={3: 1.25})),
    ]
    groups = groups_of(runs)
    return page(comparison(groups, 0), groups, figures(groups, 0))


def test_the_page_is_well_formed_complete_and_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    html = the_page(tmp_path / "1")
    assert html == the_page(tmp_path / "2")
    document = ElementTree.fromstring(
        html.replace("<!doctype html>", "")
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width">', "")
    )
    text = "".join(document.itertext())
    for expected in ("validation loss, last", "1.5000", "1.2500", "model.attention.kind", "grouped"):
        assert expected in text
    captions = [caption.text for caption in document.iter("figcaption")]
    assert captions == [
        "Training loss over tokens",
        "Training loss over FLOPs",
        "Validation loss over tokens",
        "Validation loss over FLOPs",
        "Learning rate",
        "Gradient norm before clipping",
        "Speed",
        "Model FLOPs utilisation, of the measured GEMM",
        "Gradient norms before clipping, over tokens",
        "Where the time goes",
    ]  # no experts, maps or memory
    assert "<script" not in html and "src=" not in html


def test_what_is_not_ours_in_a_recipe_is_text_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "<i>").mkdir()
    evil = "<script>alert(1)</script>"
    runs = [
        read_run(a_run(tmp_path, "a", [2.0])),
        read_run(a_run(tmp_path / "<i>", "a", [2.0], f"data.tokenizer={evil}.model")),
    ]
    html = page(comparison(groups_of(runs), 0), groups_of(runs), figures(groups_of(runs), 0))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;.model" in html
    assert "<script" not in html and "<i>" not in html


def test_the_least_loss_is_marked(tmp_path: Path) -> None:
    html = the_page(tmp_path)
    assert '<td class="best">1.2500</td>' in html
    assert '<td class="best">1.5000</td>' not in html


def test_schedules_of_different_lengths_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "alike").mkdir()
    assert "schedules differ" not in the_page(tmp_path / "alike")
    longer = a_run(tmp_path, "long", [3.0, 2.0], "schedule.total_tokens=20000", "schedule.warmup_tokens=1000")
    runs = [
        read_run(longer),
        read_run(a_run(tmp_path, "short", [3.0, 2.0], "schedule.total_tokens=4000", "schedule.warmup_tokens=1000")),
    ]
    groups = groups_of(runs)
    html = page(comparison(groups, 0), groups, figures(groups, 0))
    assert "at equal tokens, long at 10%, short at 50% of its schedule" in html


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_tool_writes_the_page_and_prints_the_table(tmp_path: Path) -> None:
    run = a_run(tmp_path, "vha", [3.0, 2.0], val={2: 2.5})
    result = run_tool(str(run), "--out", str(tmp_path / "page.html"), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["groups"][0]["val_loss_end"]["mean"] == 2.5
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    run = str(a_run(tmp_path, "vha", [3.0, 2.0]))
    for arguments, said in (
        ([str(tmp_path), "--json"], "no run, which has"),
        ([run, f"{run}/../vha", "--json"], "was given twice"),
        ([run, "--out", "/dev/stdout"], "is there and is no file"),  # a page would take its place
    ):
        result = run_tool(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert said in result.stderr and result.stderr.count("\n") == 1
