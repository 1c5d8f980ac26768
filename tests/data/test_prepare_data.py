"""From text to a data folder, through the package and through the command."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from tests.data.prepared import FILES, as_jsonl, contents, plan_for, run_tool, write_mixed
from vha_paddle import __version__
from vha_paddle.data.estimate import estimate
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import unigram_entropy
from vha_paddle.data.parts import split_of
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.errors import RunError, UserError


@pytest.fixture
def corpus_file(tmp_path: Path, documents: list[str]) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_bytes(as_jsonl(documents))
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
    summary = prepare(plan)
    assert {path.name for path in plan.out.iterdir()} == FILES
    tokenizer = SentencePieceTokenizer.load(plan.out / "tokenizer.model")
    for split in ("train", "validation"):
        indexed = IndexedTokens(plan.out / split, vocab_size=350, tokenizer_sha256=tokenizer.digest)
        texts = [tokenizer.decode(ids) for ids in _documents(indexed, tokenizer)]
        assert texts == [text for text in documents if split_of(text, 0.2) == split]
        counts = summary["splits"][split]
        assert counts["documents"] == len(texts) == indexed.num_documents
        assert counts["bytes"] == sum(len(text.encode()) for text in texts)
        assert counts["tokens"] == indexed.num_tokens
        assert counts["unigram_entropy_nats"] == unigram_entropy(indexed)
    figures = {"vocab_size": 350, "sha256": tokenizer.digest, "eod_token": "</s>"}
    assert figures.items() <= summary["tokenizer"].items()


def _documents(indexed: IndexedTokens, tokenizer: SentencePieceTokenizer) -> list[list[int]]:
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
    prepare(plan)
    prepare(replace(plan, out=tmp_path / "again"))
    assert contents(plan.out) == contents(tmp_path / "again")


def test_given_tokenizer_is_used_and_copied(plan: Plan, tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    given = replace(plan, tokenizer=tmp_path / "given.model", train_vocab_size=None)
    summary = prepare(given)
    assert (plan.out / "tokenizer.model").read_bytes() == tokenizer.model_bytes
    assert summary["splits"]["train"]["vocab_size"] == 400


def test_tokenizer_does_not_see_held_out_text(plan: Plan, documents: list[str], tmp_path: Path) -> None:
    prepare(plan)
    train_only = tmp_path / "train.jsonl"
    kept = [text for text in documents if split_of(text, 0.2) == "train"]
    train_only.write_bytes(as_jsonl(kept))
    alone = replace(plan, inputs=(train_only,), validation_fraction=0.0, out=tmp_path / "alone")
    prepare(alone)
    assert (alone.out / "tokenizer.model").read_bytes() == (plan.out / "tokenizer.model").read_bytes()


def test_fraction_zero_writes_no_validation_files(plan: Plan) -> None:
    summary = prepare(replace(plan, validation_fraction=0.0))
    assert {path.name for path in plan.out.iterdir()} == {name for name in FILES if "validation" not in name}
    assert list(summary["splits"]) == ["train"]


def test_overwrite_replaces_all_earlier_data(plan: Plan) -> None:
    prepare(plan)
    prepare(replace(plan, validation_fraction=0.0, overwrite=True))
    assert {path.name for path in plan.out.iterdir()} == {name for name in FILES if "validation" not in name}


def _state(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("train", [True, False])
def test_command_that_is_done_is_not_repeated(
    plan: Plan, tokenizer: SentencePieceTokenizer, tmp_path: Path, train: bool
) -> None:
    if not train:
        (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
        plan = replace(plan, tokenizer=tmp_path / "given.model", train_vocab_size=None)
    first, before = prepare(plan), _state(plan.out)
    again = prepare(replace(plan, workers=2))
    assert again == first | {"already_complete": True} and not first["already_complete"]
    assert _state(plan.out) == before and not list(tmp_path.glob(".*"))
    anew = prepare(replace(plan, overwrite=True))
    assert anew == first and _state(plan.out) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.3}, "its validation_fraction is 0.2, that of this command 0.3"),
        ({"train_vocab_size": 340}, "its train_tokenizer is 350, that of this command 340"),
        ({"skip_bad": True}, 'its on_error is "fail", that of this command "skip"'),
        ({"text_key": "content"}, 'its text_key is "text", that of this command "content"'),
    ],
)
def test_other_command_for_data_that_are_done_is_told_the_difference(
    plan: Plan, change: dict[str, object], message: str
) -> None:
    prepare(plan)
    before = _state(plan.out)
    with pytest.raises(UserError, match=f"holds the data of another command: {message}; .* --overwrite"):
        prepare(replace(plan, **change))  # type: ignore[arg-type]
    assert _state(plan.out) == before


def test_input_that_changed_since_is_told(plan: Plan, corpus_file: Path) -> None:
    prepare(plan)
    corpus_file.write_bytes(corpus_file.read_bytes().swapcase().replace(b"TEXT", b"text"))
    with pytest.raises(UserError, match=r"its input .*text\.jsonl was changed after they were made"):
        prepare(plan)
    corpus_file.write_bytes(corpus_file.read_bytes() * 2)
    with pytest.raises(UserError, match=r"its input .*text\.jsonl has another name, size"):
        prepare(plan)


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "tokenizer.model", "train.json"])
def test_data_that_are_done_and_damaged_since_are_told(plan: Plan, name: str) -> None:
    prepare(plan)
    content = (plan.out / name).read_bytes()
    (plan.out / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"holds these data, and is damaged \(.*name another folder or replace"):
        prepare(plan)


def test_manifest_that_is_damaged_since_is_told(plan: Plan) -> None:
    prepare(plan)
    path = plan.out / "manifest.json"
    whole = path.read_text()
    for splits in ([], {"train": 1}, {"train": {"documents": 5}, "other": {"documents": 1}}, None):
        path.write_text(json.dumps(json.loads(whole) | {"splits": splits}))
        with pytest.raises(UserError, match=r"holds these data, and is damaged \("):
            prepare(plan)
    for content in (whole[:-10], "[]", "", "[" * 100_000):
        path.write_text(content)
        with pytest.raises(UserError, match="is not empty; name another folder or replace"):
            prepare(plan)


def test_data_that_are_done_but_for_a_tokenizer_of_another_are_told(plan: Plan, tmp_path: Path) -> None:
    prepare(replace(plan, out=tmp_path / "other", train_vocab_size=340))
    prepare(plan)
    (plan.out / "tokenizer.model").write_bytes((tmp_path / "other" / "tokenizer.model").read_bytes())
    with pytest.raises(UserError, match="holds these data, and another tokenizer"):
        prepare(plan)


def test_failure_keeps_earlier_data_and_what_is_done(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(plan)
    before = contents(plan.out)
    again = replace(plan, overwrite=True, validation_fraction=0.3)
    with monkeypatch.context() as context:
        context.setattr("vha_paddle.data.folder._entropy", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(again)
    assert contents(plan.out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.work", "out", "text.jsonl"]
    prepare(again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.jsonl"]
    assert contents(plan.out) != before


def test_folder_that_cannot_be_written_is_a_run_error(plan: Plan, corpus_file: Path) -> None:
    with pytest.raises(RunError, match="cannot write"):
        prepare(replace(plan, out=corpus_file / "below" / "a-file"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_vocab_size": None}, "give either a tokenizer to use or"),
        ({"train_vocab_size": 260}, "vocabulary size 260 must be above 260"),
        ({"train_vocab_size": 100_000}, "no tokenizer of 100000 ids can be trained"),
        ({"train_vocab_size": 261}, r"no tokenizer of 261 ids can be trained .* Increase vocab_size\.$"),
        ({"validation_fraction": 1.0}, r"validation_fraction 1.0 must be in \[0, 1\)"),
        ({"validation_fraction": 1e-9}, "no document falls into the validation split"),
        ({"validation_fraction": 1 - 1e-9}, "no tokenizer can be trained: the documents hold no text"),
        ({"workers": 0}, "workers 0 must be at least 1"),
        ({"shard": 0, "num_shards": 2}, "shard 0/2: K of K/N must be from 1 to N"),
        ({"shard": 3, "num_shards": 2}, "shard 3/2: K of K/N must be from 1 to N"),
        ({"shard": 1, "num_shards": 2}, "shards must share one tokenizer"),
        ({"out": Path(".")}, "out . is no name of a folder to make"),
        ({"out": Path("a/..")}, "out a/.. is no name of a folder to make"),
        ({"out": Path("/")}, "out / is no name of a folder to make"),
        ({"inputs": (Path("gone.txt"),)}, "input gone.txt does not exist"),
        ({"tokenizer": Path("gone.model"), "train_vocab_size": None}, "tokenizer gone.model cannot be read"),
    ],
)
def test_wrong_plan_is_a_user_error_and_leaves_nothing(
    plan: Plan, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(plan, **change))
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_out_that_is_a_file_is_a_user_error(plan: Plan, corpus_file: Path) -> None:
    with pytest.raises(UserError, match="is a file; name a folder"):
        prepare(replace(plan, out=corpus_file, overwrite=True))


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
        prepare(replace(plan, overwrite=overwrite))
    assert contents(plan.out) == {name: b"precious"}
    assert sorted(path.name for path in plan.out.parent.iterdir()) == ["out", "text.jsonl"]


@pytest.fixture
def mixed(tmp_path: Path, tokenizer: SentencePieceTokenizer, documents: list[str]) -> Plan:
    """A plan of files of every kind, in many parts."""
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    return plan_for(tmp_path / "out", write_mixed(tmp_path / "text", documents), tmp_path / "given.model")


def test_every_kind_of_file_gives_its_documents_in_order(
    mixed: Plan, tokenizer: SentencePieceTokenizer, documents: list[str]
) -> None:
    prepare(mixed)
    for split in ("train", "validation"):
        indexed = IndexedTokens(mixed.out / split, vocab_size=400, tokenizer_sha256=tokenizer.digest)
        texts = [tokenizer.decode(ids) for ids in _documents(indexed, tokenizer)]
        assert texts == [text for text in documents if split_of(text, 0.2) == split]


@pytest.mark.parametrize("change", [{"workers": 3}, {"part_bytes": 1 << 30}, {"part_bytes": 700, "workers": 2}])
def test_bytes_depend_neither_on_workers_nor_on_parts(mixed: Plan, tmp_path: Path, change: dict[str, int]) -> None:
    prepare(mixed)
    prepare(replace(mixed, out=tmp_path / "again", **change))
    one, other = contents(mixed.out), contents(tmp_path / "again")
    if "part_bytes" in change:  # which is in the manifest, because shards are made of parts
        one, other = ({name: one[name] for name in one if name != "manifest.json"} for one in (one, other))
    assert one == other


def test_manifest_says_how_the_folder_came(mixed: Plan, tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
    summary = prepare(mixed)
    manifest = json.loads((mixed.out / "manifest.json").read_text())
    assert summary == {"out": str(mixed.out), "dry_run": False, "already_complete": False} | manifest
    assert manifest["version"] == __version__
    assert manifest["source"] == str(tmp_path / "text")
    files = sorted((tmp_path / "text").iterdir())
    assert manifest["inputs"] == [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    assert manifest["options"] == {
        "text_key": "text",
        "validation_fraction": 0.2,
        "train_tokenizer": None,
        "on_error": "fail",
        "part_bytes": mixed.part_bytes,
    }
    assert manifest["shard"] == "1/1"
    assert manifest["tokenizer"]["files"] == {"tokenizer.model": tokenizer.digest}
    assert manifest["tokenizer"]["library"].startswith("sentencepiece ")
    assert sum(split["documents"] for split in manifest["splits"].values()) == 120
    for name, split in manifest["splits"].items():
        found = json.loads((mixed.out / f"{name}.json").read_text())
        assert {key: split[key] for key in found if key != "source"} | {"source": manifest["source"]} == found


def test_blank_documents_are_left_out_and_counted(mixed: Plan, tmp_path: Path) -> None:
    (tmp_path / "text" / "9.jsonl").write_bytes(as_jsonl(["", " \n\t", "\u3000", "x y z"]))
    summary = prepare(mixed)
    assert summary["blank"] == 3
    assert sum(split["documents"] for split in summary["splits"].values()) == 121


def test_input_without_a_document_says_so(mixed: Plan, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["", " \n"]) + b"{\n")
    plan = replace(mixed, inputs=(tmp_path / "a.jsonl",), skip_bad=True)
    with pytest.raises(UserError, match="holds no document but 2 of white space, and 1 lines, rows or files were skip"):
        prepare(plan)
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="the input holds no document; give text"):
        prepare(plan)


def test_documents_without_a_token_are_blank(mixed: Plan, tmp_path: Path) -> None:
    """BERT's normalizer takes control characters away."""
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "fox": 1, "[SEP]": 2}, unk_token="[UNK]"))
    fast.normalizer = tokenizers.normalizers.BertNormalizer()
    fast.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    fast.add_special_tokens(["[SEP]"])
    (tmp_path / "bert").mkdir()
    fast.save(str(tmp_path / "bert" / "tokenizer.json"))
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["a fox", "\x01\x02", "\u200b", "fox"]))
    plan = replace(mixed, inputs=(tmp_path / "a.jsonl",), tokenizer=tmp_path / "bert", validation_fraction=0.0)
    assert estimate(replace(plan, out=tmp_path / "dry"))["blank"] == 2
    summary = prepare(plan)
    assert summary["blank"] == 2
    assert {"documents": 2, "bytes": 8, "tokens": 5}.items() <= summary["splits"]["train"].items()
    assert IndexedTokens(plan.out / "train").tokens.tolist() == [0, 1, 2, 1, 2]


@pytest.fixture
def broken(mixed: Plan, tmp_path: Path, documents: list[str]) -> Plan:
    """Beside good files: bad lines, null rows, a cut gzip file and one that is no Parquet."""
    lines = as_jsonl(documents[:20]).splitlines(keepends=True)
    (tmp_path / "text" / "a.jsonl").write_bytes(b"".join([*lines[:7], b"{\n", *lines[7:15], b"[]\n", *lines[15:]]))
    pq.write_table(pa.table({"text": ["a b", None, "c d"]}), tmp_path / "text" / "b.parquet", row_group_size=2)
    (tmp_path / "text" / "c.jsonl.gz").write_bytes(gzip.compress(as_jsonl(documents))[:-100])
    (tmp_path / "text" / "d.parquet").write_bytes(b"PAR1 or so")
    return replace(mixed, inputs=(str(tmp_path / "text"),))


def test_broken_input_fails_with_its_place(broken: Plan, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"text/a\.jsonl:8 is not JSON .*; or leave such input out with --on-error skip"
    ):
        prepare(broken)
    assert not broken.out.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_input_is_skipped_counted_and_listed(broken: Plan, tmp_path: Path, workers: int) -> None:
    summary = prepare(replace(broken, skip_bad=True, workers=workers))
    assert summary["skipped"] == {"line": 2, "row": 1, "row_group": 0, "file": 2}
    assert summary["options"]["on_error"] == "skip"
    listed = [json.loads(line) for line in (broken.out / "skipped.jsonl").read_text().splitlines()]
    places = [{key: value for key, value in line.items() if key not in ("file", "reason")} for line in listed]
    after = places[3].pop("after_line")
    assert 0 < after < 120
    assert [Path(line["file"]).name for line in listed] == [
        "a.jsonl",
        "a.jsonl",
        "b.parquet",
        "c.jsonl.gz",
        "d.parquet",
    ]
    assert places == [
        {"line": 8, "lost": "line"},
        {"line": 17, "lost": "line"},
        {"row_group": 0, "row": 1, "lost": "row"},
        {"lost": "file"},
        {"lost": "file"},
    ]
    assert sum(split["documents"] for split in summary["splits"].values()) == 120 + 20 + 2 + after


def test_failed_run_may_be_continued_with_skip_but_not_the_other_way(
    broken: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipping = replace(broken, skip_bad=True)
    prepare(replace(skipping, out=tmp_path / "at-once"))
    with pytest.raises(UserError, match="a.jsonl:8"):
        prepare(broken)
    with monkeypatch.context() as context:
        context.setattr("vha_paddle.data.prepare.write_folder", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(skipping)
    with pytest.raises(UserError, match="input was skipped before this run was continued with --on-error fail"):
        prepare(broken)
    prepare(skipping)
    assert contents(broken.out) == contents(tmp_path / "at-once")


def test_paddlenlp_reads_what_was_prepared(
    mixed: Plan, tokenizer: SentencePieceTokenizer, documents: list[str]
) -> None:
    import contextlib
    import io

    from paddlenlp.data.indexed_dataset import make_dataset

    prepare(mixed)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = make_dataset(str(mixed.out / "train"), "mmap", skip_warmup=True)
    expected = [tokenizer.encode(text) + [tokenizer.eos_id] for text in documents if split_of(text, 0.2) == "train"]
    assert len(theirs) == len(expected)
    assert all(np.array_equal(theirs.get(index)[0], ids) for index, ids in enumerate(expected))


def test_command_makes_a_folder_and_prints_json_only(corpus_file: Path, tmp_path: Path) -> None:
    done = run_tool("text.jsonl", "--train-tokenizer", 350, "--out", "data", "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert {path.name for path in (tmp_path / "data").iterdir()} == FILES
    assert summary["splits"]["train"]["tokens"] == IndexedTokens(tmp_path / "data" / "train").num_tokens
    assert summary["source"] == "text.jsonl"
    assert sum(split["documents"] for split in summary["splits"].values()) == 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt", "--train-tokenizer", "350"], "error: input gone.txt does not exist"),
        (["--train-tokenizer", "350"], "give either PATHs or --builtin"),
        (["--builtin", "text.jsonl", "--train-tokenizer", "350"], "give either PATHs or --builtin"),
        (["text.jsonl"], "one of the arguments --tokenizer --train-tokenizer --merge is required"),
        (["text.jsonl", "--tokenizer", "t", "--shard", "3"], "--shard 3 must be K/N"),
        (["--merge", "a", "b", "--dry-run"], "dry-run has no effect there"),
        (["text.jsonl", "--merge", "a", "b"], "inputs has no effect there"),
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


def test_command_that_is_done_succeeds_again_and_says_so(corpus_file: Path, tmp_path: Path) -> None:
    command = ("text.jsonl", "--train-tokenizer", 350, "--out", "data")
    first, again = (run_tool(*command, folder=tmp_path) for _ in range(2))
    assert (again.returncode, again.stderr) == (first.returncode, first.stderr) == (0, "")
    assert first.stdout.endswith("wrote data\n")
    assert again.stdout.endswith("data was complete before, and is left as it is; --overwrite would make it anew\n")
    assert json.loads(run_tool(*command, "--json", folder=tmp_path).stdout)["already_complete"]


def test_file_whose_name_is_not_utf8_is_read_and_listed(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    name = os.fsdecode(b"\xff\xe9t\xc3\xa9.jsonl")
    (tmp_path / name).write_bytes(as_jsonl(documents) + b"{\n")
    done = run_tool(name, "--train-tokenizer", 350, "--out", "data", folder=tmp_path)
    assert done.returncode == 2 and "\\udcff\\udce9t\u00e9.jsonl:121 is not JSON" in done.stderr
    command = (name, "--train-tokenizer", 350, "--out", "data", "--on-error", "skip")
    done = run_tool(*command, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "\\udcff\\udce9t\u00e9.jsonl" in done.stdout
    (listed,) = (tmp_path / "data" / "skipped.jsonl").read_text("utf-8").splitlines()
    assert json.loads(listed)["file"] == name


def test_command_help_teaches_with_examples(tmp_path: Path) -> None:
    done = run_tool("--help", folder=tmp_path)
    assert done.returncode == 0
    assert "python tools/prepare_data.py --builtin --train-tokenizer 2048 --out data/quickstart" in done.stdout
    assert "exit status:" in done.stdout
