"""Shards of several machines become the folder of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.prepared import as_jsonl, contents, plan_for, run_tool, write_mixed
from vha_paddle.data.merge import merge
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from vha_paddle.errors import RunError, UserError


@pytest.fixture
def plan(tmp_path: Path, tokenizer: SentencePieceTokenizer, documents: list[str]) -> Plan:
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    return plan_for(tmp_path / "whole", write_mixed(tmp_path / "text", documents), tmp_path / "given.model")


def shards_of(plan: Plan, count: int) -> list[Path]:
    folders = [plan.out.with_name(f"shard-{number}") for number in range(1, count + 1)]
    for number, folder in enumerate(folders, start=1):
        prepare(replace(plan, out=folder, shard=number, num_shards=count))
    return folders


@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_merged_shards_have_the_bytes_of_one_run(plan: Plan, tmp_path: Path, count: int) -> None:
    """Of 60 shards some are empty: there are fewer parts."""
    prepare(plan)
    folders = shards_of(plan, count)
    summary = merge(tmp_path / "merged", folders[::-1], overwrite=False)
    assert contents(tmp_path / "merged") == contents(plan.out)
    assert summary["splits"]["train"]["tokens"] == (plan.out / "train.bin").stat().st_size // 2
    assert not list(tmp_path.glob(".*"))


def test_what_was_skipped_is_merged_with_its_places(plan: Plan, tmp_path: Path, documents: list[str]) -> None:
    lines = as_jsonl(documents).splitlines(keepends=True)
    (tmp_path / "text" / "a.jsonl").write_bytes(b"{\n".join(lines))
    skipping = replace(plan, skip_bad=True)
    prepare(skipping)
    summary = merge(tmp_path / "merged", shards_of(skipping, 3), overwrite=False)
    assert summary["skipped"]["line"] == 119
    assert contents(tmp_path / "merged") == contents(plan.out)
    listed = [json.loads(line)["line"] for line in (plan.out / "skipped.jsonl").read_text().splitlines()]
    assert listed == list(range(2, 239, 2))


@pytest.fixture
def shards(plan: Plan) -> list[Path]:
    return shards_of(plan, 3)


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_merge_that_is_done_is_not_repeated(shards: list[Path], tmp_path: Path) -> None:
    first = merge(tmp_path / "merged", shards, overwrite=False)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "merged").iterdir()}
    again = merge(tmp_path / "merged", shards[::-1], overwrite=False)
    assert again == first | {"already_complete": True} and not first["already_complete"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "merged").iterdir()} == before
    (shards[1] / "manifest.json").touch()
    with pytest.raises(UserError, match=r"shard .*shard-2 was changed after they were made; name another folder"):
        merge(tmp_path / "merged", shards, overwrite=False)


def test_shard_is_not_replaced_by_the_whole(shards: list[Path], tmp_path: Path) -> None:
    before = contents(shards[1])
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"out .*shard-1/\.\./shard-2 is one of the shards that are merged"):
            merge(shards[0] / ".." / "shard-2", shards, overwrite=overwrite)
    assert contents(shards[1]) == before


def test_missing_shard_is_a_user_error(shards: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shard 2/3 is missing; give every shard once"):
        merge(tmp_path / "merged", [shards[0], shards[2]], overwrite=False)


def test_shard_that_is_there_twice_is_a_user_error(shards: list[Path], tmp_path: Path) -> None:
    shutil.copytree(shards[1], tmp_path / "copy")
    with pytest.raises(UserError, match="shard 2/3 is there more than once"):
        merge(tmp_path / "merged", [*shards, tmp_path / "copy"], overwrite=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["options"].update(text_key="content"), "differ in options"),
        (lambda m: m["options"].update(validation_fraction=0.1), "differ in options"),
        (lambda m: m["tokenizer"].update(sha256="0"), "differ in tokenizer"),
        (lambda m: m["tokenizer"].update(library="sentencepiece 0.1"), "differ in tokenizer"),
        (lambda m: m["inputs"][0].update(bytes=1), "differ in inputs; merge"),
        (lambda m: m.update(version="0"), "differ in version"),
        (lambda m: m.update(shard="2/4"), r"differ in number of shards \(3 and 4\)"),
    ],
)
def test_shards_that_were_made_otherwise_are_a_user_error(
    shards: list[Path], tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    edit(shards[1], change)
    with pytest.raises(UserError, match=message):
        merge(tmp_path / "merged", shards, overwrite=False)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("shard"),
        lambda m: m.update(shard=3),
        lambda m: m.update(shard="1/2/3"),
        lambda m: m["splits"]["train"].pop("tokens"),
        lambda m: m["splits"]["train"].update(documents="9"),
        lambda m: m["splits"].update({"../../elsewhere": m["splits"]["train"]}),
        lambda m: m.pop("options"),
        lambda m: m["options"].update(validation_fraction=None),
        lambda m: m.update(inputs=["a"]),
        lambda m: m["skipped"].update(line=[]),
    ],
)
def test_folder_without_proper_manifest_is_a_user_error(
    shards: list[Path], tmp_path: Path, change: Callable[[Any], object]
) -> None:
    edit(shards[0], change)
    with pytest.raises(UserError, match="is not the manifest of a prepared folder"):
        merge(tmp_path / "merged", shards, overwrite=False)


@pytest.mark.parametrize(("name", "kind"), [("train.bin", RunError), ("train.idx", UserError)])
def test_damaged_shard_is_refused(shards: list[Path], tmp_path: Path, name: str, kind: type[Exception]) -> None:
    path = shards[1] / name
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(kind, match="digest of its manifest|prepare the data again"):
        merge(tmp_path / "merged", shards, overwrite=False)
    assert not (tmp_path / "merged").exists()


def test_other_tokenizer_beside_the_data_is_refused(shards: list[Path], tmp_path: Path, documents: list[str]) -> None:
    train_sentencepiece(documents, 350, shards[0] / "tokenizer.model")
    with pytest.raises(RunError, match=r"the tokenizer is not the one of manifest\.json"):
        merge(tmp_path / "merged", shards, overwrite=False)


def test_command_makes_and_merges_shards(plan: Plan, tmp_path: Path) -> None:
    prepare(replace(plan, part_bytes=None))
    common = ["text", "--tokenizer", "given.model", "--validation-fraction", 0.2, "--workers", 1]
    for shard in ("1/2", "2/2"):
        done = run_tool(*common, "--shard", shard, "--out", shard.replace("/", "of"), folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    done = run_tool("--merge", "1of2", "2of2", "--out", "merged", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["shard"] == "1/1"
    assert (tmp_path / "merged" / "train.bin").read_bytes() == (plan.out / "train.bin").read_bytes()
