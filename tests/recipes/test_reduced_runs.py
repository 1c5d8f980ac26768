"""Every recipe trained small, and what becomes of its checkpoint; some of them on the ranks that their axes ask for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests.distributed.launch import run_ranks
from tests.recipes.files import ALL, FOLDS, FOLDS_WITHOUT_STOCK_CLASS, PLAIN, REFUSED, ROOT, path_of
from tests.tolerances import FLOAT32, FLOAT64_FOLD, assert_close
from tests.weights import trained_weights
from vha_paddle.checkpoint.load import device_tensor
from vha_paddle.config import Model, Recipe, load_recipe
from vha_paddle.config.load import with_overrides
from vha_paddle.config.reduced import DATA, VOCAB_SIZE, reduced
from vha_paddle.counts import folded
from vha_paddle.data.builtin import ensure_builtin_data
from vha_paddle.errors import UserError
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.fold import fold_state
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.run import run

TIED = ROOT / "tests/distributed/tied.py"
LAUNCHED = {
    "quickstart": 2,  # tensor 2
    "table1_8b_a1b_vha": 2,  # sharding 2, expert 2
    "10b_a1b_hybrid_vha_stage3_128k": 4,  # context 2, sharding 2, expert 2
}


@pytest.fixture(scope="session")
def folder_with_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, where the data of reduced runs is made."""
    folder = tmp_path_factory.mktemp("reduced")
    ensure_builtin_data(folder / DATA, VOCAB_SIZE)
    return folder


@pytest.fixture
def folder(folder_with_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder_with_data)
    return folder_with_data


def two_steps(name: str, *overrides: str, most_ranks: int = 1) -> Recipe:
    small = reduced(load_recipe(path_of(name)), on_cpu=True, most_ranks=most_ranks).recipe
    steps = [f"schedule.total_tokens={2 * small.tokens_per_step}", "schedule.warmup_tokens=0"]
    return with_overrides(small, [*steps, *overrides])


def losses(output: Path | str) -> np.ndarray:
    lines = (Path(output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([[record["loss"], record["grad_norm"]] for record in map(json.loads, lines)])


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_trains_and_its_checkpoint_is_served_as_the_table_says(
    name: str, folder: Path, tmp_path: Path
) -> None:
    recipe = two_steps(name)
    run(recipe)
    found = losses(recipe.run.output)
    assert found.shape == (2, 2) and np.isfinite(found).all()
    assert abs(found[0, 0] - math.log(VOCAB_SIZE)) < 0.1, "an untrained model knows nothing"
    checkpoint, out = Path(recipe.run.output), tmp_path / "exported"
    reason = {**FOLDS_WITHOUT_STOCK_CLASS, **REFUSED}.get(name)
    if name in FOLDS:
        report = export_checkpoint(checkpoint, out, "float32")
        assert report["folded"]
    else:
        with pytest.raises(UserError) as caught:
            export_checkpoint(checkpoint, out, "float32")
        assert (reason or "is plain already, nothing to fold") in str(caught.value)
    if name in PLAIN:
        assert not export_checkpoint(checkpoint, out, "float32", plain=True)["folded"]


def logits(model: Model, weights: dict[str, np.ndarray], tokens_BS: np.ndarray) -> np.ndarray:
    decoder = build_decoder(model, Mesh(), seed=0, dtype="float64")
    parameters = decoder.named_tensors()
    assert set(weights) == set(parameters)
    for name, parameter in parameters.items():
        parameter.set_value(device_tensor(weights[name], parameter.dtype))
    with paddle.no_grad():
        return decoder(paddle.to_tensor(tokens_BS)).numpy()


@pytest.mark.parametrize("name", sorted(FOLDS | set(FOLDS_WITHOUT_STOCK_CLASS)))
def test_maps_of_trained_size_fold_into_the_same_function(name: str) -> None:
    model = two_steps(name).model
    weights = trained_weights(model, seed=2)
    served = dict(fold_state(weights, model, np.float64, name))
    tokens_BS = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 48))  # longer than the window
    expected = logits(model, weights, tokens_BS)
    assert_close(logits(folded(model), served, tokens_BS), expected, FLOAT64_FOLD, name)


@pytest.mark.parametrize("name", ["table4_1p7b_silu_premix", "table4_1p7b_silu_postmix"])
def test_maps_with_silu_are_refused(name: str) -> None:
    model = two_steps(name).model
    with pytest.raises(UserError, match="does not fold"):
        fold_state(trained_weights(model, seed=2), model, np.float64, name)


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_reduced_axes_train_as_one_process(name: str, folder: Path) -> None:
    launched = two_steps(name, f"run.output=runs/launched/{name}", most_ranks=4)
    assert launched.num_ranks == LAUNCHED[name]
    changes = [f"schedule.total_tokens={launched.schedule.total_tokens}", "schedule.warmup_tokens=0"]
    output = f"run.output={launched.run.output}"
    arguments = [str(path_of(name)), "--reduced", *changes, output]
    run_ranks(ROOT / "tools/train.py", launched.num_ranks, arguments)
    alone = two_steps(
        name,
        f"data.global_batch_size={launched.data.global_batch_size}",
        f"run.output=runs/alone/{name}",
        changes[0],
    )
    run(alone)
    assert_close(losses(launched.run.output), losses(alone.run.output), FLOAT32, "losses and norms")


def command_in(folder: Path, *arguments: str, code: int = 0) -> str:
    """Both outputs of tools/train.py, which may become the launcher; launcher and ranks end with the call."""
    command = [sys.executable, str(TIED), str(ROOT / "tools/train.py"), *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output[-3000:]
    return output


def test_the_command_makes_its_data_starts_its_ranks_and_runs_once(tmp_path: Path) -> None:
    """Nothing but the command, in an empty folder: FP8, experts on two ranks."""
    arguments = [str(path_of("30b_a3b_vha_fp8")), "--reduced", "schedule.total_tokens=512"]
    for expected in ("step 2/2", "complete at step 2"):
        output = command_in(tmp_path, *arguments)
        assert "starting 2 ranks: " in output and expected in output
        assert output.count("model.experts.num_experts: 128 -> 32") == 1
        noise = ("LAUNCH INFO", "No ccache found. ", "    INFO]")
        assert [line for line in output.splitlines() if any(word in line for word in noise)] == []
    refused = command_in(tmp_path, *arguments, "model.hidden_size=96", code=2)
    assert "starting 2 ranks" not in refused and len(refused.splitlines()) == 1
    assert "model.hidden_size=96: step-00000002 was trained with 64" in refused
    path = "runs/reduced/30b_a3b_vha_fp8"
    assert refused.endswith(f": add run.output={path}_2 to the command, or remove {path}\n")
    assert sorted(path.name for path in (tmp_path / "runs/reduced").iterdir()) == [
        ".data.lock",
        "30b_a3b_vha_fp8",
        "data",
    ]


MAKING_DATA = """\
import sys, time
from pathlib import Path
from vha_paddle.data import builtin
def slow(plan):
    time.sleep(1)
    plan.out.mkdir()
    (plan.out / builtin.SENTENCEPIECE_FILE).touch()
    print("made")
builtin.prepare = slow
builtin.ensure_builtin_data(Path(sys.argv[1]), 512)
print(Path(sys.argv[1], builtin.SENTENCEPIECE_FILE).is_file())
"""


def test_of_ranks_that_need_the_data_at_once_one_makes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKING_DATA, str(tmp_path / "runs" / "data")]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        printed = sorted(process.communicate(timeout=300)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert printed == ["True\n", "True\n", "made\nTrue\n"]
