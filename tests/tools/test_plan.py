"""`tools/plan.py` as a user runs it, from any folder."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vha_paddle.config import load_recipe
from vha_paddle.plan.cost import make_plan
from vha_paddle.plan.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), RECIPE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_own_layout_is_printed_with_its_memory_communication_and_time(tmp_path: Path) -> None:
    result = plan(tmp_path)
    assert result.returncode == 0, result.stderr
    for text in (
        "quickstart: vha, 1,976,384 parameters, on 2 x H800 SXM 80 GB",
        "exact",
        "estimated (flash attention)",
        "fits: ",
        "Postmix sums 64 values per token and layer in forward, as many in backward; Premix none",
        "GPU-hours",
        "tokens/second and GPU",
    ):
        assert text in result.stdout
    assert "other layouts" not in result.stdout
    assert "at that MFU    with all communication" in result.stdout


def test_json_holds_exact_bytes_and_proposals_for_another_number_of_gpus(tmp_path: Path) -> None:
    found = json.loads(plan(tmp_path, "--json", "--gpus", "4", "--gpu", "h200").stdout)
    assert (found["gpus"], found["proposed_for_gpus"], found["fits"]) == (2, 4, True)
    assert found["gpu"]["name"] == "H200 SXM 141 GB"
    rank = found["worst_rank"]
    size = rank["parameters"]
    assert rank["exact_bytes"] == {"weights": 4 * size, "gradients": 4 * size, "optimizer": 8 * size}
    estimated = rank["estimated_bytes"]
    peak = estimated["activations"] + max(estimated["loss"], estimated["block"])
    assert rank["total_bytes"] == 16 * size + peak
    assert found["vha_over_grouped_attention"]["postmix_values_per_token_per_layer_forward"] == 2 * 32
    own, *others = found["proposed"]
    assert own["origin"] == "the recipe's own layout, scaled" and 0 < len(others) <= 6
    least, most = own["at_stated_mfu"], own["with_all_communication"]
    assert least["gpu_hours"] < most["gpu_hours"] and least["days"] < most["days"]
    time = found["time"]
    slower = time["with_all_communication"]["step_seconds"] - time["at_stated_mfu"]["step_seconds"]
    assert slower == pytest.approx(time["communication_seconds_if_none_overlaps"])


def test_a_proposal_can_be_typed_behind_the_recipe(tmp_path: Path) -> None:
    slow = ["--json", "memory.recompute=full", "parallel.sequence=true"]  # every key of a layout must be set anew
    proposal = json.loads(plan(tmp_path, *slow, "--gpus", "4").stdout)["proposed"][0]
    again = json.loads(plan(tmp_path, *slow, *proposal["overrides"]).stdout)
    assert again["gpus"] == 4 and again["proposed"] == []
    assert again["worst_rank"]["total_bytes"] == proposal["worst_rank_bytes"]
    for range_end in ("at_stated_mfu", "with_all_communication"):
        assert again["time"][range_end] == proposal[range_end]


def test_layouts_for_the_gpus_asked_for_come_before_the_recipe_as_it_stands(tmp_path: Path) -> None:
    first, *lines = plan(tmp_path, "--gpus", "4").stdout.splitlines()
    assert first == "quickstart on 4 x H800 SXM 80 GB, estimates at an MFU of 0.4"
    assert "GiB of 67.06, fits; step " in lines[1] and "GPU-hours" in lines[1]
    assert "the recipe's own layout, scaled" in lines[2]
    assert lines.index("the recipe as it stands, on 2 GPUs:") > 10


def test_postmix_in_weight_space_adds_nothing_per_token(tmp_path: Path) -> None:
    text = plan(tmp_path, "model.attention.postmix_space=weight").stdout
    assert f"Postmix sums {2 * 32 * 192:,} values per layer and microbatch in forward" in text


def test_layouts_are_proposed_where_the_own_one_does_not_fit(tmp_path: Path) -> None:
    large = ["model.hidden_size=16384", "model.intermediate_size=65536", "model.num_hidden_layers=8"]
    text = plan(tmp_path, *large).stdout
    assert "DOES NOT FIT" in text and "other layouts, " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "--gpu tpu: no such GPU in the table; use h800, h100, h200, a100"),
        (["--mfu", "0"], "--mfu 0.0: must be above 0 and at most 1"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "7"], "--gpus 7: no tensor degree of 1 or 2 or 4 or 8"),
        (["parallel.tensor=3"], "parallel.tensor=3: must divide"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = plan(tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_documented_example_prints_what_the_document_shows() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    example = page.split("## An example")[1].split("## Memory")[0]
    indented = "\n".join(line[4:] for line in example.splitlines() if not line or line.startswith("    "))
    shown = [f"python tools/plan.py{rest}".strip() for rest in indented.split("python tools/plan.py")[1:]]
    assert len(shown) == 2
    for block in shown:
        command, output = block.split("\n\n", 1)
        result = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(output.removesuffix("  ..."))


def test_the_documented_range_of_30b_a3b_is_the_planned_one() -> None:
    own = make_plan(load_recipe(ROOT / "recipes" / "30b_a3b_vha_fp8.yaml"), GPUS["h800"], 0.4)
    least, most = own.stated.step_seconds, own.with_communication.step_seconds
    assert f"takes {least:.3f} s a step or {most:.3f} s" in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_planning_loads_no_paddle() -> None:
    code = "import sys, vha_paddle.plan.report, vha_paddle.plan.layouts; print('paddle' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr
