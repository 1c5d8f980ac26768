"""`tools/fold_export.py` as a user runs it: exit codes, one-line errors, dry run, JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.checkpoints import SMALL_GROUPED, SMALL_HYBRID, Exported, small_recipe, small_tokenizer, trained_weights
from tests.checkpoints import write_checkpoint as write
from vha_paddle.checkpoint.layout import step_directory

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "fold_export.py"

# The tool with a verification that needs no Paddle and finds `fault`.
VERIFIED = """
import runpy, sys, types
from tests.export.verified import Verified

prove = types.ModuleType("vha_paddle.proof.prove")
def prove_export(source, exported, *, text, num_tokens, progress):
    print("compared on", text, num_tokens, source.tokenizer.name)
    progress(1, 2)
    return Verified({fault!r})
prove.prove_export = prove_export
sys.modules["vha_paddle.proof.prove"] = prove
sys.argv = ["fold_export.py", *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""

# The tool, which waits after the first tensor.
WAITING = """
import runpy, sys, time
from vha_paddle import tensor_file

put, count = tensor_file._Sink.put, 0
def waiting(*arguments):
    global count
    put(*arguments)
    count += 1
    if count == 2:
        print("ready", flush=True)
        for _ in range(600):  # a signal that comes just before a sleep is heard after it
            time.sleep(0.1)
tensor_file._Sink.put = waiting
sys.argv = ["fold_export.py", *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


# The tool with a verification that imports Paddle, as the real one does, and then waits.
VERIFYING = """
import runpy, sys, time, types

class Prove(types.ModuleType):
    def __getattr__(self, name):
        if name != "prove_export":
            raise AttributeError(name)
        import paddle
        return wait

def wait(*arguments, **options):
    print("ready", flush=True)
    for _ in range(600):
        time.sleep(0.1)

sys.modules["vha_paddle.proof.prove"] = Prove("vha_paddle.proof.prove")
sys.argv = ["fold_export.py", *sys.argv[1:], "--verify"]
runpy.run_path({tool!r}, run_name="__main__")
"""


def run(*arguments: object, fault: str | None | Literal[False] = False) -> subprocess.CompletedProcess[str]:
    """Run the tool from a directory that is not the checkout."""
    program = [str(TOOL)]
    if fault is not False:
        program = ["-c", VERIFIED.format(fault=fault, tool=str(TOOL))]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT) if fault is not False else ""}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def test_an_export_succeeds_and_says_what_it_wrote(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--dtype", "bfloat16")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"wrote {tmp_path / 'out'}: 24 tensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_runs_directory_may_hold_the_export_beside_its_checkpoints(tmp_path: Path) -> None:
    """As the quickstart makes it; within the checkpoint or around it there is no place."""
    recipe = small_recipe(SMALL_GROUPED)
    step = write(step_directory(tmp_path, 7), recipe, trained_weights(recipe), small_tokenizer())
    for out in (step / "out", step.parent, tmp_path):
        assert run(tmp_path, out, "--plain", "--overwrite").returncode == 2
    result = run(tmp_path, tmp_path / "out", "--plain")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_json_prints_the_report(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "fold_report.json").read_text())


def test_a_dry_run_lists_the_fate_of_every_tensor_and_writes_nothing(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--dry-run", "--dtype", "float16")
    lines = result.stdout.splitlines()
    query = "model.layers.0.self_attn.q_proj.weight"
    assert f"{query} [20, 24] float32 -> {query} [48, 20] float16, 1,920 bytes" in lines
    assert f"model.layers.0.self_attn.premix [2, 8, 8] float32 -> folded into {query}" in lines
    assert lines[-1].startswith("30 tensors read, 0 left out; 24 tensors to write, each once, ")
    assert (result.returncode, result.stderr, list(tmp_path.iterdir()), len(lines)) == (0, "", [], 31)


def test_a_dry_run_in_json_adds_up_to_the_export(exported: Exported, tmp_path: Path) -> None:
    plan = json.loads(run(exported.checkpoint, tmp_path / "out", "--dry-run", "--json").stdout)
    assert plan["bytes"] == sum(row["bytes"] for row in plan["targets"]) == exported.report["bytes"]
    targets = {row["name"]: row["sources"] for row in plan["targets"]}
    assert {name: sources for name, sources in targets.items() if len(sources) > 1} == exported.report["folded"]
    assert {row["name"] for row in plan["sources"]} == set(exported.weights)
    assert {name for row in plan["sources"] for name in row["becomes"]} == set(targets)


def test_a_verified_export_succeeds_and_prints_the_figures(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--verify", fault=None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "compared on None 256 tokenizer.model"
    assert result.stdout.splitlines()[-1] == "verified"


def test_what_is_compared_on_can_be_said(exported: Exported, tmp_path: Path) -> None:
    flags = ["--verify", "--text", "text.txt", "--verify-tokens", "12", "--tokenizer", tmp_path / "other.model"]
    (tmp_path / "other.model").write_bytes((exported.checkpoint / "tokenizer.model").read_bytes())
    result = run(exported.checkpoint, tmp_path / "out", *flags, fault=None)
    assert result.stdout.splitlines()[0] == "compared on text.txt 12 other.model"


def test_a_failed_verification_exits_1_and_leaves_nothing(exported: Exported, tmp_path: Path) -> None:
    result = run(exported.checkpoint, tmp_path / "out", "--verify", fault="logits differ")
    assert result.returncode == 1
    assert result.stderr.splitlines() == ["error: verification failed in float32: logits differ; nothing was kept"]
    assert list(tmp_path.iterdir()) == []


def test_quiet_says_nothing(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / ".out.abcdefgh.tmp").mkdir()
    result = run(exported.checkpoint, tmp_path / "out", "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_notes_say_what_was_left_and_who_reads_the_export_otherwise(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED, **SMALL_HYBRID)
    checkpoint = write(tmp_path / "hybrid", recipe, trained_weights(recipe), small_tokenizer())
    (tmp_path / ".out.abcdefgh.tmp").mkdir()
    result = run(checkpoint, tmp_path / "out", "--plain")
    left, windows = result.stderr.splitlines()
    assert left.startswith("note: ") and left.endswith("removed; a killed run had left it")
    assert windows.startswith("note: ") and "layer_types" in windows


@pytest.mark.parametrize(
    ("flags", "files"),
    [([], 1), (["--max-shard-size", "20KB"], 3), (["--no-fold"], 1), (["--dtype", "float16"], 1)],
    ids=["", "shards", "unfolded", "float16"],
)
def test_flags_reach_the_export(exported: Exported, tmp_path: Path, flags: list[str], files: int) -> None:
    result = run(exported.checkpoint, tmp_path / "out", *flags)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out" / "fold_report.json").read_text())
    assert len([name for name in report["files"] if name.endswith(".safetensors")]) == files
    assert report["fold"] == ("none" if "--no-fold" in flags else "all")
    assert report["dtype"] == ("float16" if "float16" in flags else "float32")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--text", "x"], "--text x: has no effect without --verify"),
        (["--verify-tokens", "9"], "--verify-tokens 9: has no effect without --verify"),
        (["--verify", "--dry-run"], "there is nothing to run with --dry-run"),
        (["--quiet", "--dry-run"], "--quiet: a --dry-run is there to be read"),
        (["--verify-only", "--dtype", "float32"], "--dtype: has no effect with --verify-only"),
        (["--verify-only", "--max-shard-size", "1GB"], "--max-shard-size: has no effect with --verify-only"),
        (["--verify-only"], "holds no fold_report.json, so there is no export to verify"),
        (["--max-shard-size", "many"], "--max-shard-size many: must be a size such as 5GB"),
        (["--norm-order", "premix-norm"], "--norm-order=premix-norm: has no effect on a checkpoint of this package"),
        (["--allow-partial"], "all of this model folds"),
        (["--tokenizer", "/absent"], "/absent"),
    ],
)
def test_a_flag_without_effect_is_refused(exported: Exported, tmp_path: Path, flags: list[str], words: str) -> None:
    result = run(exported.checkpoint, tmp_path / "out", *flags)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("error: ") and words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", [WAITING, VERIFYING], ids=["writing", "verifying"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_end_leaves_nothing(
    exported: Exported, tmp_path: Path, sent: signal.Signals, code: int, program: str
) -> None:
    command = [sys.executable, "-c", program.format(tool=str(TOOL)), str(exported.checkpoint), str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert [path.name.startswith(".out.") for path in tmp_path.iterdir()] == [True]
        process.send_signal(sent)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("case", ["no checkpoint", "output exists", "folded already", "nothing to fold"])
def test_wrong_input_exits_2_with_one_line(exported: Exported, tmp_path: Path, case: str, flags: list[str]) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    paths = {
        "no checkpoint": (tmp_path / "absent", tmp_path / "out"),
        "output exists": (exported.checkpoint, exported.directory),
        "folded already": (exported.directory, tmp_path / "out"),
        "nothing to fold": (tmp_path / "grouped", tmp_path / "out"),
    }
    if case == "nothing to fold":
        write(tmp_path / "grouped", recipe, trained_weights(recipe), small_tokenizer())
    result = run(*paths[case], *flags)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith("error: ")
    assert result.stdout == "" and not (tmp_path / "out").exists()


def test_a_grouped_baseline_is_exported_with_plain(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    checkpoint = write(tmp_path / "grouped", recipe, trained_weights(recipe), small_tokenizer())
    result = run(checkpoint, tmp_path / "out", "--plain")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "fold_report.json").read_text())["folded"] == {}


def test_folding_needs_neither_paddle_nor_torch() -> None:
    heavy = "{'paddle', 'torch', 'transformers'}"
    program = f"import sys, vha_paddle.export.fold_export; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
