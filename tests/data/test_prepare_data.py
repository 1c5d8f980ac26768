"""From text to a data folder, through the package and through the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import unigram_entropy
from vha_paddle.data.prepare import Plan, prepare, split_of
from vha_paddle.data.tokenizer import Tokenizer
from vha_paddle.errors import RunError, UserError

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
FILES = {"tokenizer.model"} | {
    f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "idx", "json")
}


def silent(documents: Iterable[str], activity: str) -> Iterable[str]:
    return documents


def run_tool(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def corpus_file(tmp_path: Path, documents: list[str]) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), "utf-8")
    return path


@pytest.fixture
def plan(tmp_path: Path, corpus_file: Path) -> Plan:
    return Plan(
        out=tmp_path / "out",
        inputs=(corpus_file,),
        tokenizer=None,
        train_vocab_size=350,
        validation_fraction=0.2,
        overwrite=False,
    )


def test_folder_holds_every_document_in_its_split(plan: Plan, documents: list[str]) -> None:
    summary = prepare(plan, dry_run=False, progress=silent)
    assert {path.name for path in plan.out.iterdir()} == FILES
    tokenizer = Tokenizer.load(plan.out / "tokenizer.model")
    for split in ("train", "validation"):
        indexed = IndexedTokens(plan.out / split, vocab_size=350, tokenizer_sha256=tokenizer.digest)
        texts = [tokenizer.decode(ids) for ids in _documents(indexed, tokenizer)]
        assert texts == [text for text in documents if split_of(text, 0.2) == split]
        counts = summary["splits"][split]
        assert counts["documents"] == len(texts) == indexed.num_documents
        assert counts["bytes"] == sum(len(text.encode()) for text in texts)
        assert counts["tokens"] == indexed.num_tokens
        assert counts["unigram_entropy_nats"] == unigram_entropy(indexed)
    assert summary["tokenizer"] == {"vocab_size": 350, "sha256": tokenizer.digest}


def _documents(indexed: IndexedTokens, tokenizer: Tokenizer) -> list[list[int]]:
    """Split the stream at its end tokens, which no text contains."""
    found: list[list[int]] = [[]]
    for token in indexed.tokens.tolist():
        found.append([]) if token == tokenizer.eos_id else found[-1].append(token)
    assert found.pop() == []
    return found


def test_split_takes_about_the_fraction_and_depends_on_the_text_alone(
    make_documents: Callable[..., list[str]],
) -> None:
    texts = make_documents(2000)
    held_out = {text for text in texts if split_of(text, 0.1) == "validation"}
    assert 150 < len(held_out) < 250
    assert held_out < {text for text in texts if split_of(text, 0.2) == "validation"}
    assert {split_of(text, 0.0) for text in texts} == {"train"}


def test_same_input_gives_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    prepare(plan, dry_run=False, progress=silent)
    prepare(replace(plan, out=tmp_path / "again"), dry_run=False, progress=silent)
    assert contents(plan.out) == contents(tmp_path / "again")


def test_given_tokenizer_is_used_and_copied(plan: Plan, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "given.model")
    given = replace(plan, tokenizer=tmp_path / "given.model", train_vocab_size=None)
    summary = prepare(given, dry_run=False, progress=silent)
    assert (plan.out / "tokenizer.model").read_bytes() == tokenizer.model_bytes
    assert summary["splits"]["train"]["vocab_size"] == 400


def test_tokenizer_does_not_see_held_out_text(plan: Plan, documents: list[str], tmp_path: Path) -> None:
    prepare(plan, dry_run=False, progress=silent)
    train_only = tmp_path / "train.jsonl"
    kept = [text for text in documents if split_of(text, 0.2) == "train"]
    train_only.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept), "utf-8")
    alone = replace(plan, inputs=(train_only,), validation_fraction=0.0, out=tmp_path / "alone")
    prepare(alone, dry_run=False, progress=silent)
    assert (alone.out / "tokenizer.model").read_bytes() == (plan.out / "tokenizer.model").read_bytes()


def test_fraction_zero_writes_no_validation_files(plan: Plan) -> None:
    summary = prepare(replace(plan, validation_fraction=0.0), dry_run=False, progress=silent)
    assert {path.name for path in plan.out.iterdir()} == {name for name in FILES if "validation" not in name}
    assert list(summary["splits"]) == ["train"]


def test_dry_run_counts_and_writes_nothing(plan: Plan, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    summary = prepare(plan, dry_run=True, progress=silent)
    assert sorted(tmp_path.rglob("*")) == before
    assert sum(split["documents"] for split in summary["splits"].values()) == 120


def test_overwrite_replaces_all_earlier_data(plan: Plan) -> None:
    prepare(plan, dry_run=False, progress=silent)
    prepare(replace(plan, validation_fraction=0.0, overwrite=True), dry_run=False, progress=silent)
    assert {path.name for path in plan.out.iterdir()} == {name for name in FILES if "validation" not in name}


def test_failure_keeps_earlier_data_and_leaves_nothing_else(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(plan, dry_run=False, progress=silent)
    before = contents(plan.out)
    monkeypatch.setattr("vha_paddle.data.prepare.unigram_entropy", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(replace(plan, overwrite=True, validation_fraction=0.3), dry_run=False, progress=silent)
    assert contents(plan.out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.jsonl"]


def test_folder_that_cannot_be_written_is_a_run_error(plan: Plan, corpus_file: Path) -> None:
    with pytest.raises(RunError, match="cannot write"):
        prepare(replace(plan, out=corpus_file / "below" / "a-file"), dry_run=False, progress=silent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_vocab_size": None}, "give either a tokenizer to use or"),
        ({"train_vocab_size": 260}, "vocabulary size 260 must be above 260"),
        ({"train_vocab_size": 100_000}, "no tokenizer of 100000 ids can be trained"),
        ({"validation_fraction": 1.0}, r"validation_fraction 1.0 must be in \[0, 1\)"),
        ({"validation_fraction": 1e-9}, "no document falls into the validation split"),
        ({"validation_fraction": 1 - 1e-9}, "no document falls into the train split"),
        ({"inputs": (Path("gone.txt"),)}, "input gone.txt does not exist"),
        ({"tokenizer": Path("gone.model"), "train_vocab_size": None}, "tokenizer gone.model cannot be read"),
    ],
)
def test_wrong_plan_is_a_user_error_and_leaves_nothing(
    plan: Plan, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(plan, **change), dry_run=False, progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_out_that_is_a_file_is_a_user_error(plan: Plan, corpus_file: Path) -> None:
    with pytest.raises(UserError, match="is a file; name a folder"):
        prepare(replace(plan, out=corpus_file, overwrite=True), dry_run=True, progress=silent)


@pytest.mark.parametrize(
    ("name", "overwrite", "message"),
    [
        ("train.bin", False, "is not empty; name another folder or replace its data with --overwrite"),
        ("thesis.doc", True, "holds thesis.doc, which is not prepared data"),
    ],
)
def test_folder_in_use_is_a_user_error(plan: Plan, name: str, overwrite: bool, message: str) -> None:
    plan.out.mkdir()
    (plan.out / name).write_text("precious")
    with pytest.raises(UserError, match=message):
        prepare(replace(plan, overwrite=overwrite), dry_run=False, progress=silent)
    assert contents(plan.out) == {name: b"precious"}


def test_command_makes_a_folder_and_prints_json_only(corpus_file: Path, tmp_path: Path) -> None:
    done = run_tool("text.jsonl", "--train-tokenizer", 350, "--out", "data", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert {path.name for path in (tmp_path / "data").iterdir()} == FILES
    assert summary["splits"]["train"]["tokens"] == IndexedTokens(tmp_path / "data" / "train").num_tokens
    assert summary["source"] == "text.jsonl"
    assert sum(split["documents"] for split in summary["splits"].values()) == 120


def test_command_dry_run_of_the_builtin_corpus_writes_nothing(tmp_path: Path) -> None:
    done = run_tool("--builtin", "--train-tokenizer", 4096, "--out", "data", "--dry-run", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "documentation of CPython" in done.stdout and "would write data" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt", "--train-tokenizer", "350"], "error: input gone.txt does not exist"),
        (["--train-tokenizer", "350"], "give either PATHs or --builtin"),
        (["--builtin", "text.jsonl", "--train-tokenizer", "350"], "give either PATHs or --builtin"),
        (["text.jsonl"], "one of the arguments --tokenizer --train-tokenizer is required"),
    ],
)
def test_command_exits_2_for_wrong_input(corpus_file: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run_tool(*arguments, "--out", "data", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_command_exits_1_when_it_cannot_write(corpus_file: Path, tmp_path: Path) -> None:
    done = run_tool("text.jsonl", "--train-tokenizer", 350, "--out", "text.jsonl/x", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: cannot write text.jsonl/x")


def test_command_help_teaches_with_examples(tmp_path: Path) -> None:
    done = run_tool("--help", folder=tmp_path)
    assert done.returncode == 0
    assert "python tools/prepare_data.py --builtin --train-tokenizer 4096 --out" in done.stdout
    assert "exit status:" in done.stdout
