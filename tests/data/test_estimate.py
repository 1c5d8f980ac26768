"""The dry run: close for any input, exact for a small one, and nothing is written."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.prepared import as_jsonl, plan_for, run_tool, write_mixed
from vha_paddle.data import estimate as estimate_module
from vha_paddle.data.estimate import estimate
from vha_paddle.data.inputs import Part
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.errors import UserError


@pytest.fixture
def plan(tmp_path: Path, tokenizer: SentencePieceTokenizer, documents: list[str]) -> Plan:
    (tmp_path / "given.model").write_bytes(tokenizer.model_bytes)
    inputs = write_mixed(tmp_path / "text", documents)
    return plan_for(tmp_path / "out", inputs, tmp_path / "given.model", part_bytes=1 << 20)


def test_small_input_is_counted_exactly_and_nothing_is_written(plan: Plan, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = estimate(plan)
    assert sorted(tmp_path.rglob("*")) == before
    made = prepare(plan)
    assert found["estimate"]["exact"] and found["dry_run"]
    for name, split in found["splits"].items():
        assert split == {key: made["splits"][name][key] for key in ("documents", "bytes", "tokens")}
    assert found["tokenizer"] == made["tokenizer"]
    written = sum((plan.out / f"{split}.{kind}").stat().st_size for split in found["splits"] for kind in ("bin", "idx"))
    assert written - found["estimate"]["output_bytes"] == 2 * 42  # two headers


def test_large_input_is_projected_from_a_sample(
    plan: Plan, tmp_path: Path, make_documents: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_BYTES", 20_000)
    texts = make_documents(3000)
    random.Random(0).shuffle(texts)
    (tmp_path / "large.jsonl").write_bytes(as_jsonl(texts))
    large = replace(plan, inputs=(tmp_path / "large.jsonl",), part_bytes=100_000)
    found, made = estimate(large), prepare(large)
    assert not found["estimate"]["exact"]
    assert found["estimate"]["sampled_bytes"] < 0.6 * found["estimate"]["input_bytes"]
    for key in ("documents", "bytes", "tokens"):
        projected, true = (sum(split[key] for split in summary["splits"].values()) for summary in (found, made))
        assert abs(projected - true) < 0.1 * true, key
    assert found["estimate"]["seconds"] > 0


def test_parts_that_hold_much_and_little_text_to_a_byte_are_weighed_by_their_bytes(
    plan: Plan, tmp_path: Path, make_documents: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of Parquet holds one row group or two, and a compressed one more text; of each as much text is read."""
    monkeypatch.setattr(estimate_module, "SAMPLED_BYTES", 10_000)
    texts = make_documents(1600)
    (tmp_path / "mixed").mkdir()
    for number, length in enumerate((0, 0, 500, 1500)):
        lines = [json.dumps({"text": text, "padding": "x" * length}) + "\n" for text in texts]
        part = "".join(lines)[:500_000]
        (tmp_path / "mixed" / f"{number}.jsonl").write_text(part[: part.rindex("\n")])
    mixed = replace(plan, inputs=(tmp_path / "mixed",), part_bytes=500_000)
    found, made = estimate(mixed), prepare(mixed)
    projected, true = (sum(split["tokens"] for split in summary["splits"].values()) for summary in (found, made))
    assert abs(projected - true) < 0.05 * true


@pytest.mark.parametrize("num_parts", [9, 15, 17])
def test_sample_is_spread_over_the_input(
    plan: Plan, tmp_path: Path, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = []

    def sample(part: Part, *_: object) -> tuple[int, bool]:
        sampled.append(part[0].path)
        return 100, True

    monkeypatch.setattr(estimate_module, "_sample", sample)
    (tmp_path / "spread").mkdir()
    for number in range(num_parts):
        (tmp_path / "spread" / f"{number:02}.txt").write_text("x" * 100)
    estimate(replace(plan, inputs=(tmp_path / "spread",), part_bytes=100))
    numbers = [int(Path(path).stem) for path in sampled]
    assert len(numbers) == 8 and numbers[0] == 0 and numbers[-1] >= num_parts * 7 // 8
    assert max(after - before for before, after in itertools.pairwise(numbers)) <= -(-num_parts // 8)


def test_builtin_corpus_is_counted(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "out", None, None, 2048, 0.05, False)
    found = estimate(plan)
    assert found["estimate"]["exact"] and found["splits"]["train"]["bytes"] > 1_000_000


def test_tokenizer_to_be_trained_leaves_tokens_open(plan: Plan) -> None:
    found = estimate(replace(plan, tokenizer=None, train_vocab_size=300))
    assert all("tokens" not in split for split in found["splits"].values())
    assert "output_bytes" not in found["estimate"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 1e-9}, "no document falls into the validation split"),
        ({"text_key": "content"}, 'must be an object with a string under the key "content"'),
        ({"workers": 0}, "workers 0"),
    ],
)
def test_what_prepare_refuses_is_refused(plan: Plan, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        estimate(replace(plan, **change))  # type: ignore[arg-type]


def test_output_folder_in_use_is_refused(plan: Plan) -> None:
    plan.out.mkdir()
    (plan.out / "train.bin").write_text("precious")
    with pytest.raises(UserError, match="is not empty"):
        estimate(plan)


def test_skipped_input_is_projected(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "text" / "9.jsonl").write_text("{\n" * 5)
    assert estimate(replace(plan, skip_bad=True))["skipped"]["line"] == 5


def test_command_writes_nothing(tmp_path: Path) -> None:
    done = run_tool("--builtin", "--train-tokenizer", 4096, "--out", "data", "--dry-run", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "documentation of CPython" in done.stdout and "would write data" in done.stdout
    assert list(tmp_path.iterdir()) == []
