"""The dry run: close for any input, exact for a small one, and nothing is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.prepared import as_jsonl, plan_for, run_tool, write_mixed
from vha_paddle.data import estimate as estimate_module
from vha_paddle.data.estimate import estimate
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
