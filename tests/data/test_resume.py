"""A run that is killed, at any moment, is continued by the same command to the bytes of an unbroken one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.prepared import contents, plan_for, write_mixed
from vha_paddle.data import engines, workspace
from vha_paddle.data.parts import PART_FILE
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.errors import UserError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def plan(
    tmp_path: Path, tokenizer: SentencePieceTokenizer, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> Plan:
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    # What is killed loses nothing that the system was given; only a machine that dies needs this.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    inputs = write_mixed(tmp_path / "text", documents[:60])
    return plan_for(tmp_path / "out", inputs, tmp_path / "given.model", part_bytes=2500)


@pytest.fixture
def expected(plan: Plan, tmp_path: Path) -> dict[str, bytes]:
    """The folder of an unbroken run."""
    prepare(replace(plan, out=tmp_path / "unbroken"))
    found = contents(tmp_path / "unbroken")
    shutil.rmtree(tmp_path / "unbroken")
    return found


def work(plan: Plan) -> Path:
    return workspace.work_folder(plan.out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_a_process(plan: Plan, before: Callable[[], None] = lambda: None) -> multiprocessing.process.BaseProcess:
    """Start `prepare` in a process of its own, after `before`."""

    def run() -> None:
        before()
        prepare(plan)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    return process


def die_at(number: int, names: Sequence[str] = ("rename", "replace")) -> None:
    """Let this process be killed in place of call `number`, counted from 0, of these functions of `os`."""
    left = [number]
    for name in names:
        real = getattr(os, name)

        def counted(*arguments: object, real: Callable[..., None] = real) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(*arguments)

        setattr(os, name, counted)


def test_killed_at_every_rename_it_continues(plan: Plan, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Between two renames nothing changes that a later run looks at, so these are all the states there are."""
    for number in range(1000):
        process = in_a_process(plan, lambda number=number: die_at(number))
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        prepare(plan)
        assert contents(plan.out) == expected
        assert names(tmp_path) == ["given.model", "out", "text"]
        shutil.rmtree(plan.out)
    assert number > 10  # parts, journal, tokenizer and the last steps
    assert contents(plan.out) == expected


def test_killed_again_and_again_at_random_moments_it_gets_done(
    plan: Plan, expected: dict[str, bytes], tmp_path: Path
) -> None:
    chooser = random.Random(0)
    kills = 0
    while not plan.out.exists():
        process = in_a_process(plan)
        process.join(chooser.uniform(0.0, 0.02 * (1 + kills)))
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
        assert process.exitcode in (0, -signal.SIGKILL)
    assert kills > 0
    assert contents(plan.out) == expected
    prepare(plan)  # which tidies up what the last kill left
    assert names(tmp_path) == ["given.model", "out", "text"]


def test_what_a_kill_left_of_the_working_folder_is_deleted_by_the_next_run(
    plan: Plan, expected: dict[str, bytes], tmp_path: Path
) -> None:
    prepare(plan)
    leftover = workspace._leftover(work(plan))
    (leftover / "parts").mkdir(parents=True)
    assert prepare(plan)["already_complete"]
    assert names(tmp_path) == ["given.model", "out", "text"]
    assert contents(plan.out) == expected


def test_killed_while_data_are_replaced_nothing_is_lost(plan: Plan, expected: dict[str, bytes]) -> None:
    """With --overwrite there is the old folder or the new one, or the next run puts the new one there."""
    again = replace(plan, overwrite=True)
    seen = []
    for number in range(8, 1000):
        prepare(replace(plan, validation_fraction=0.0, overwrite=True))
        old = contents(plan.out)
        process = in_a_process(again, lambda number=number: die_at(number, ("rename", "replace", "unlink", "rmdir")))
        process.join(60)
        seen.append(contents(plan.out) if plan.out.exists() else None)
        assert seen[-1] in (old, None, expected)
        prepare(again)
        assert contents(plan.out) == expected
        if seen[-3:] == [expected] * 3:
            break
    assert old in seen and None in seen


def test_parts_that_are_done_are_not_encoded_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = engines.encode_part, []

    def failing(task: object, advance: Callable[[int], None]) -> object:
        if len(encoded) == 5:
            raise KeyboardInterrupt
        encoded.append(task.number)  # type: ignore[attr-defined]
        return encode(task, advance)  # type: ignore[arg-type]

    monkeypatch.setattr(engines, "encode_part", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(plan)
    assert names(work(plan) / "parts") == [f"{number:08d}" for number in range(5)]
    encoded = []
    monkeypatch.setattr(
        engines, "encode_part", lambda task, advance: encoded.append(task.number) or encode(task, advance)
    )
    prepare(plan)
    assert encoded[0] == 5


def test_killed_tool_with_workers_leaves_no_process_and_continues(
    tmp_path: Path, plan: Plan, expected: dict[str, bytes]
) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import json, sys\nfrom pathlib import Path\nfrom vha_paddle.data.prepare import Plan, prepare\n"
        "if __name__ == '__main__':\n"
        "    values = json.loads(sys.argv[1])\n"
        "    prepare(Plan(out=Path(values.pop('out')), tokenizer=Path(values.pop('tokenizer')), **values))\n"
    )
    values = vars(plan) | {"out": str(plan.out), "tokenizer": str(plan.tokenizer), "workers": 2}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen([sys.executable, str(script), json.dumps(values)], env=environment, cwd=tmp_path)
    try:
        while process.poll() is None and len(list((work(plan) / "parts").glob(f"*/{PART_FILE}"))) < 3:
            time.sleep(0.002)
        children = _children(process.pid)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(children) >= 2 and not any(_alive(child) for child in children)
    prepare(replace(plan, workers=2))
    assert contents(plan.out) == expected


def test_worker_in_the_middle_of_a_part_ends_with_its_parent(plan: Plan, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom vha_paddle.data import engines\n"
        "from vha_paddle.data.parts import Reading, Task\n"
        "def endless(task, advance):\n"
        "    Path(task.folder, str(os.getpid())).touch()\n"
        "    time.sleep(600)\n"
        "engines.encode_part = endless  # in the workers too: they import this file\n"
        "if __name__ == '__main__':\n"
        "    tasks = [Task(sys.argv[1], number, (), '', '', Reading('text', 0.0, False)) for number in range(2)]\n"
        "    list(engines.run_processes(tasks, 2, lambda _: None))\n"
    )
    (tmp_path / "seen").mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "seen")], env=environment)
    try:
        while process.poll() is None and len(names(tmp_path / "seen")) < 2:
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    workers = [int(name) for name in names(tmp_path / "seen")]
    deadline = time.monotonic() + 60
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [worker for worker in workers if _alive(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert len(workers) == 2 and not left


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def unfinished(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of which some parts are done."""
    with monkeypatch.context() as context:
        encode, encoded = engines.encode_part, []

        def failing(task: object, advance: Callable[[int], None]) -> object:
            if len(encoded) == 3:
                raise KeyboardInterrupt
            encoded.append(task)
            return encode(task, advance)  # type: ignore[arg-type]

        context.setattr(engines, "encode_part", failing)
        with pytest.raises(KeyboardInterrupt):
            prepare(plan)
    return plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.3}, "its validation_fraction is 0.2, that of this command 0.3"),
        ({"text_key": "content"}, 'its text_key is "text", that of this command "content"'),
        ({"shard": 1, "num_shards": 2}, r"its shard is \[1, 1\], that of this command \[1, 2\]"),
        ({"part_bytes": 3000}, "its part_bytes is 2500"),
        ({"tokenizer": None, "train_vocab_size": 300}, "its tokenizer is"),
        ({"inputs": ("text/0.jsonl",)}, "its source is"),
    ],
)
def test_another_command_is_refused_naming_the_difference(
    unfinished: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = names(work(unfinished) / "parts")
    with pytest.raises(UserError, match=message):
        prepare(replace(unfinished, **change))
    assert names(work(unfinished) / "parts") == before


def test_another_command_may_follow_one_that_was_killed_before_anything_was_done(
    plan: Plan, expected: dict[str, bytes]
) -> None:
    workspace.Workspace(plan.out, {"another": "command"}).parts.joinpath(".00000000.xyz.tmp").mkdir()
    prepare(plan)
    assert contents(plan.out) == expected


def test_changed_input_is_refused(unfinished: Plan, tmp_path: Path) -> None:
    os.utime(tmp_path / "text" / "0.jsonl", ns=(0, 0))
    with pytest.raises(UserError, match=r"its input .*0\.jsonl has another name, size or time of change"):
        prepare(unfinished)


def test_new_input_is_refused(unfinished: Plan, tmp_path: Path) -> None:
    (tmp_path / "text" / "6.txt").write_text("more")
    with pytest.raises(UserError, match="input files, this command"):
        prepare(unfinished)


def test_a_second_run_at_the_same_time_is_refused(unfinished: Plan) -> None:
    job = json.loads((work(unfinished) / "job.json").read_text())
    first = workspace.Workspace(unfinished.out, job)
    with pytest.raises(UserError, match="is in use by another run"):
        prepare(unfinished)
    first.close()
    prepare(unfinished)


def test_number_of_workers_may_change(unfinished: Plan, expected: dict[str, bytes]) -> None:
    prepare(replace(unfinished, workers=2))
    assert contents(unfinished.out) == expected


def test_file_that_came_into_the_output_folder_meanwhile_is_not_replaced(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes]
) -> None:
    complete = workspace.Workspace.complete

    def slow(self: workspace.Workspace, summary: dict[str, object]) -> None:
        complete(self, summary)
        plan.out.mkdir()
        (plan.out / "thesis.doc").write_text("precious")

    monkeypatch.setattr(workspace.Workspace, "complete", slow)
    for _ in range(2):
        with pytest.raises(UserError, match="is not empty"):
            prepare(plan)
        assert contents(plan.out) == {"thesis.doc": b"precious"}
    with pytest.raises(UserError, match=r"holds thesis\.doc, which is not prepared data"):
        prepare(replace(plan, overwrite=True))
    (plan.out / "thesis.doc").unlink()
    prepare(plan)
    assert contents(plan.out) == expected


def test_damaged_part_fails_the_run(unfinished: Plan) -> None:
    tokens = work(unfinished) / "parts" / "00000000" / "train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(Exception, match="sizes for"):
        prepare(unfinished)
