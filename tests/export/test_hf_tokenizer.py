"""A Hugging Face tokenizer goes through checkpoint and export as it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, trained_weights, write_checkpoint
from tests.hf_tokenizers import END, ODD_TEXTS, TURN_START, write_qwen_tokenizer
from vha_paddle.checkpoint.fresh import write_fresh_checkpoint
from vha_paddle.checkpoint.inspect import find_faults, reshard
from vha_paddle.checkpoint.layout import MANIFEST_FILE, open_checkpoint
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import tokenizer_digest
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.tokenizer import TokenizerExport


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A VHA checkpoint with the files of `tmp_path / "qwen"`."""
    tokenizer = write_qwen_tokenizer(tmp_path / "qwen")
    recipe = small_recipe(SMALL_VHA)
    weights = trained_weights(recipe)
    specs = {name: (array.dtype, array.shape) for name, array in weights.items()}
    (tmp_path / "checkpoint").mkdir()
    write_fresh_checkpoint(tmp_path / "checkpoint", recipe, tokenizer, specs, weights.values(), {})
    return tmp_path / "checkpoint"


def test_a_checkpoint_keeps_the_files_flat_and_in_its_manifest(checkpoint: Path, tmp_path: Path) -> None:
    given = contents(tmp_path / "qwen")
    opened = open_checkpoint(checkpoint)
    assert contents(checkpoint).items() >= given.items()
    assert opened.files.keys() >= given.keys() and opened.tokenizer_path.name == "tokenizer.json"
    assert load_tokenizer(opened.tokenizer_path).files == given
    assert tokenizer_digest(checkpoint) == load_tokenizer(tmp_path / "qwen").digest
    assert not any(find_faults(checkpoint, lambda count: None).values())


def test_resharding_keeps_them(checkpoint: Path, tmp_path: Path) -> None:
    reshard(checkpoint, tmp_path / "files", 2, lambda count: None)
    assert contents(tmp_path / "files").items() >= contents(tmp_path / "qwen").items()


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA)
    path = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    del manifest["files"]["tokenizer.model"]
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"incomplete, tokenizer.model or tokenizer.json is missing"):
        open_checkpoint(path)


def test_an_export_has_the_files_byte_for_byte(checkpoint: Path, tmp_path: Path) -> None:
    given = contents(tmp_path / "qwen")
    export_checkpoint(checkpoint, tmp_path / "out", "float32")
    assert contents(tmp_path / "out").items() >= given.items()
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    ours, theirs = load_tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ODD_TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == config["pad_token_id"] == theirs.eos_token_id == ours.eos_id
    assert tokenizer_digest(tmp_path / "out") == tokenizer_digest(checkpoint)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "here it is that token" in card and "split_special_tokens" not in card and "add_space_prefix" not in card


def test_the_spellings_of_transformers_5_are_made_readable_for_4(tmp_path: Path) -> None:
    source = write_qwen_tokenizer(
        tmp_path / "v5",
        tokenizer_class="TokenizersBackend",
        additional_special_tokens=None,
        extra_special_tokens=[TURN_START],
    )
    with pytest.raises((ValueError, AttributeError)):
        AutoTokenizer.from_pretrained(source)
    (tmp_path / "out").mkdir()
    TokenizerExport(source).write(tmp_path / "out", 64)
    changed = {name for name, content in contents(tmp_path / "out").items() if content != contents(source)[name]}
    assert changed == {"tokenizer_config.json"}
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == END and theirs.additional_special_tokens == [TURN_START]
    assert theirs(ODD_TEXTS[3])["input_ids"] == load_tokenizer(source).encode(ODD_TEXTS[3])


def test_a_missing_configuration_is_made(tmp_path: Path) -> None:
    source = write_qwen_tokenizer(tmp_path / "qwen")
    (source / "tokenizer_config.json").unlink()
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    (tmp_path / "out").mkdir()
    TokenizerExport(source).write(tmp_path / "out", 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == load_tokenizer(source).eos_id
    assert theirs(ODD_TEXTS[3])["input_ids"] == load_tokenizer(source).encode(ODD_TEXTS[3])
