"""Who encodes: workers that are killed, and Ray."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.prepared import contents, plan_for, write_mixed
from vha_paddle.data import engines
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.errors import RunError, UserError


@pytest.fixture
def plan(tmp_path: Path, tokenizer: SentencePieceTokenizer, documents: list[str]) -> Plan:
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    inputs = write_mixed(tmp_path / "text", documents[:60])
    return plan_for(tmp_path / "out", inputs, tmp_path / "given.model", part_bytes=2500)


def test_worker_that_is_killed_ends_the_run_and_the_next_continues(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(replace(plan, out=tmp_path / "expected"))
    received = engines._received

    def killing(connection: Any, process: Any) -> tuple[str, Any]:
        message = received(connection, process)
        if message[0] == "done":
            process.kill()
            process.join()
            connection.close()
            raise engines._lost(process)
        return message

    with monkeypatch.context() as context:
        context.setattr(engines, "_received", killing)
        with pytest.raises(RunError, match=r"a worker ended with code -9 .* run the same command again"):
            prepare(replace(plan, workers=2))
    assert not plan.out.exists()
    prepare(replace(plan, workers=2))
    assert contents(plan.out) == contents(tmp_path / "expected")


def test_mistake_in_the_input_found_by_a_worker_is_a_user_error(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "text" / "9.jsonl").write_text('{"text": "a"}\n{')
    with pytest.raises(UserError, match=r"9\.jsonl:2 is not JSON"):
        prepare(replace(plan, workers=2))


class FakeRay(types.ModuleType):
    """The calls of Ray that are used, run at once in this process; the last task is done first."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=type("RayError", (Exception,), {}))
        self.started: list[Any] = []
        self.cancelled: list[Any] = []
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **_: object) -> None:
        self.initialized = True

    def remote(self, function: Callable[..., Any]) -> Any:
        def start(*arguments: Any) -> Callable[[], Any]:
            self.started.append(arguments)
            return lambda: function(*arguments)

        return types.SimpleNamespace(remote=start)

    def wait(self, references: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        return list(references[-1:]), list(references[:-1])

    def get(self, reference: Callable[[], Any]) -> Any:
        return reference()

    def cancel(self, reference: Any) -> None:
        self.cancelled.append(reference)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_ray_gives_the_bytes_of_this_machine(plan: Plan, ray: FakeRay, tmp_path: Path) -> None:
    prepare(replace(plan, out=tmp_path / "expected"))
    prepare(replace(plan, ray=True))
    assert ray.initialized and len(ray.started) > 5 and not ray.cancelled
    assert contents(plan.out) == contents(tmp_path / "expected")


def test_mistake_in_the_input_found_by_ray_ends_the_other_tasks(plan: Plan, ray: FakeRay, tmp_path: Path) -> None:
    (tmp_path / "text" / "9.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"9\.jsonl:1 is not JSON"):
        prepare(replace(plan, ray=True))
    assert len(ray.cancelled) == len(ray.started) - 1


def test_task_that_ray_gives_up_is_a_run_error(plan: Plan, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: Any) -> None:
        raise ray.exceptions.RayError("ray::_ray_task()\nthe node is gone\n")

    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(RunError, match="a Ray task failed: the node is gone; run the same command again"):
        prepare(replace(plan, ray=True))


def test_without_ray_it_is_said(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--ray needs the package ray \(pip install ray\)"):
        prepare(replace(plan, ray=True))
