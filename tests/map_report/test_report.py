"""What tools/analyze_maps.py reads, prints and draws; what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_GROUPED, SMALL_VHA, small_recipe, write_checkpoint
from tests.oracles import maps as oracle
from tests.tolerances import FLOAT64, assert_close
from tests.weights import trained_weights
from vha_paddle.errors import UserError
from vha_paddle.map_report.figures import MOST_HEATMAPS, write_figures
from vha_paddle.map_report.read import read_history, read_report, table
from vha_paddle.maps import layer_figures, record_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = small_recipe(SMALL_VHA, num_hidden_layers=8)
WEIGHTS = {name: array.astype(np.float32) for name, array in trained_weights(RECIPE.model, seed=2).items()}
ALL_FIGURES = ["premix_distance.png", "postmix_matrix.png", "singular_values.png", "history.png"]


def maps_of(layer: int) -> dict[str, np.ndarray]:
    names = ("premix", "postmix_a", "postmix_b")
    return {name: WEIGHTS[f"model.layers.{layer}.self_attn.{name}"].astype(np.float64) for name in names}


def metrics_line(step: int, with_maps: bool) -> str:
    record: dict[str, Any] = {"step": step, "loss": 3.0}
    if with_maps:
        record["maps"] = record_of({layer: layer_figures(maps_of(layer)) for layer in range(8)})
    return json.dumps(record) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one checkpoint, written in two files, and five steps of metrics, two of them with maps."""
    directory = tmp_path_factory.mktemp("run")
    write_checkpoint(directory / "checkpoints" / "step-00000007", RECIPE, WEIGHTS, b"a tokenizer", num_files=2)
    lines = [metrics_line(step, with_maps=step % 2 == 0) for step in range(1, 6)]
    (directory / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo', encoding="utf-8")
    return directory


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_a_run_is_its_newest_checkpoint_and_its_course(run: Path, tmp_path: Path) -> None:
    report = read_report(run)
    assert report.step == 7 and report.source.endswith("step-00000007")
    assert [step for step, _ in report.history] == [2, 4]
    for layer in range(8):
        expected = oracle.layer_figures(*maps_of(layer).values())
        for measure, value in expected.items():
            assert_close(np.array(report.record[measure][layer]), np.array(value), FLOAT64, measure)
    assert [path.name for path in write_figures(report, tmp_path / "out")] == ALL_FIGURES
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(ALL_FIGURES)
    assert all(min(png_size(tmp_path / "out" / name)) > 300 for name in ALL_FIGURES)


def test_a_checkpoint_alone_has_no_course_and_metrics_alone_no_matrices(run: Path, tmp_path: Path) -> None:
    checkpoint = read_report(run / "checkpoints" / "step-00000007")
    assert [path.name for path in write_figures(checkpoint, tmp_path / "a")] == ALL_FIGURES[:3]
    metrics = read_report(run / "metrics.jsonl")
    assert metrics.step == 4 and metrics.record == metrics.history[-1][1]
    assert [path.name for path in write_figures(metrics, tmp_path / "b")] == ["premix_distance.png", "history.png"]


def test_a_run_without_checkpoints_is_its_course(run: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert read_report(tmp_path).step == 4


def test_of_many_layers_the_first_the_last_and_some_between_are_drawn(run: Path) -> None:
    from vha_paddle.map_report import figures

    axes = figures._heatmaps(read_report(run)).axes
    *panels, colorbar = axes
    titles = [ax.get_title() for ax in panels]
    assert len(titles) == MOST_HEATMAPS == 6 and (titles[0], titles[-1]) == ("M - I of layer 0", "M - I of layer 7")
    largest = 0.0
    for ax, layer in zip(panels, (int(title.split()[-1]) for title in titles), strict=True):
        maps = maps_of(layer)
        expected = maps["postmix_b"] @ maps["postmix_a"].T
        assert_close(np.asarray(ax.images[0].get_array()), expected, FLOAT64, "M - I")
        largest = max(largest, float(np.abs(expected).max()))
    assert all(ax.images[0].get_clim() == pytest.approx((-largest, largest)) for ax in panels)
    assert colorbar.get_ylabel() == "M - I = B Aᵀ" and colorbar.get_ylim() == pytest.approx((-largest, largest))


def test_a_postmix_at_its_start_is_drawn_as_nothing(run: Path) -> None:
    from vha_paddle.map_report import figures

    report = read_report(run)
    zero = {layer: maps | {"postmix_b": np.zeros_like(maps["postmix_b"])} for layer, maps in report.maps.items()}
    figure = figures._heatmaps(replace(report, maps=zero))
    figure.draw_without_rendering()
    assert figure.axes[0].images[0].get_clim() == (-1.0, 1.0)


def test_points_stay_clear_of_the_frame_and_of_the_legend(run: Path) -> None:
    from vha_paddle.map_report import figures

    report = read_report(run)
    for draw in (figures._distances, figures._singular_values, figures._history):
        figure = draw(report)
        figure.draw_without_rendering()
        for ax in figure.axes:
            points = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines])
            low, high = ax.get_ylim()
            assert low < points.min() and points.max() < high
        for legend in figure.legends:
            assert legend.get_window_extent().x0 > figure.axes[0].get_window_extent().x1


def test_the_course_says_where_its_records_begin(run: Path) -> None:
    from vha_paddle.map_report import figures

    title = figures._history(read_report(run)).get_suptitle()
    assert title == "from the first record, step 2, to the last, step 4"


def test_a_line_of_the_table_is_a_layer(run: Path) -> None:
    report = read_report(run)
    head, titles, *rows = table(report)
    assert head == f"{report.source}, step 7"
    assert titles.split()[:3] == ["layer", "|W-I|", "|W|"]
    first, second = report.record["premix_distance"][3]
    assert len(rows) == 8 and f"{first:.3f} {second:.3f}" in rows[3]
    assert f"{report.record['postmix_off_diagonal'][3]:.3f}" in rows[3]


def test_a_premix_that_is_not_square_is_listed_by_its_norm(tmp_path: Path) -> None:
    wide = SMALL_VHA | {"physical_head_dim": 4, "premix_init": "orthogonal"}
    recipe = small_recipe(wide)
    weights = {name: array.astype(np.float32) for name, array in trained_weights(recipe.model, seed=2).items()}
    report = read_report(write_checkpoint(tmp_path / "checkpoint", recipe, weights, b"a tokenizer"))
    assert "premix_distance" not in report.record and len(report.record["premix_norm"][0]) == 2
    assert [path.name for path in write_figures(report, tmp_path)] == ["postmix_matrix.png", "singular_values.png"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"loss": 1}',
        '{"step": "1"}',
        '{"step": 1, "maps": []}',
        '{"step": 1, "maps": {"layer": [0], "premix_distance": [[1.0], [2.0]]}}',
        '{"step": 1, "maps": {"layer": [0], "premix_distance": [["1.0"]]}}',
        '{"step": 1, "maps": {"layer": [0], "another": [1.0]}}',
        '{"step": 1, "maps": {"layer": [0], "premix_distance": [1.0]}}',
        '{"step": 1, "maps": {"layer": [0], "premix_distance": [[]]}}',
        '{"step": 1, "maps": {"layer": [0], "premix_distance": [null]}}',
        '{"step": 1, "maps": {"layer": [0], "postmix_distance": [[1.0]]}}',
        '{"step": 1, "maps": {"layer": [], "premix_distance": []}}',
        '{"step": 1, "maps": {"layer": [null], "premix_norm": [[1.0]]}}',
    ],
)
def test_a_line_that_is_no_record_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(1, with_maps=True) + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is no record of a step; remove the line"):
        read_history(path)


def test_what_has_no_maps_is_refused(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    weights = {name: array.astype(np.float32) for name, array in trained_weights(recipe.model, seed=2).items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, b"a tokenizer")
    with pytest.raises(UserError, match="kind=grouped has no Premix and no Postmix; give a VHA model"):
        read_report(checkpoint)
    (tmp_path / "metrics.jsonl").write_text(metrics_line(1, with_maps=False), encoding="utf-8")
    with pytest.raises(UserError, match="no record of maps; train with logging.maps_interval"):
        read_report(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="neither a checkpoint .* nor a run"):
        read_report(tmp_path / "nothing")


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "analyze_maps.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_tool_prints_the_table_or_one_object_and_names_its_figures(run: Path, tmp_path: Path) -> None:
    text = tool(str(run), "--out", str(tmp_path / "out"))
    assert text.returncode == 0, text.stderr
    assert text.stdout.splitlines()[:-1] == list(table(read_report(run)))
    assert text.stdout.splitlines()[-1].startswith(f"wrote {tmp_path / 'out' / 'premix_distance.png'}, ")
    figures = json.loads(tool(str(run / "metrics.jsonl"), "--out", str(tmp_path / "out"), "--json").stdout)
    assert figures["maps"] == read_report(run / "metrics.jsonl").record
    assert [Path(path).name for path in figures["figures"]] == ["premix_distance.png", "history.png"]
    (tmp_path / "file").touch()
    refused = tool(str(run), "--out", str(tmp_path / "file"))
    assert refused.returncode == 2 and "is a file; name a directory" in refused.stderr


def test_reading_needs_no_paddle_and_matplotlib_no_display() -> None:
    code = (
        "import sys, vha_paddle.map_report.read as read; before = 'matplotlib' in sys.modules;"
        "import vha_paddle.map_report.figures as figures;"
        "print('paddle' in sys.modules, before, 'matplotlib.pyplot' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False False False", result.stderr
