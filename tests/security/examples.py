"""One valid example of everything that a user may be handed, and how this package reads it to the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from tests.checkpoints import SMALL_MODEL, SMALL_VHA, small_recipe, trained_weights, write_checkpoint
from tests.hf_tokenizers import write_qwen_tokenizer
from tests.sources.containers.fixtures import sample, write_merged
from vha_paddle.checkpoint.layout import MANIFEST_FILE, open_checkpoint, record_of, write_manifest
from vha_paddle.config import load_recipe, recipe_to_yaml
from vha_paddle.data.indexed import IndexedTokens, write_indexed
from vha_paddle.data.inputs import find_inputs, make_parts
from vha_paddle.data.parts import Counts, Reading, labelled_documents
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.map_report.read import read_report, table
from vha_paddle.sources.containers import open_safetensors
from vha_paddle.sources.hf_config import read_hf_model
from vha_paddle.tensor_file import read_tensors, write_tensors

RECIPE = small_recipe(SMALL_VHA)
TOKENS = ([5, 6, 7, 0], [8, 0], [9, 10, 0])
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **{key: value for key, value in SMALL_MODEL.items()},
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"},
}
METRICS = {"step": 1, "tokens": 10, "loss": 2.0, "maps": {"layer": [0, 1], "premix_distance": [[0.1, 0.2], None]}}


@dataclass(frozen=True)
class Example:
    """A folder with a file that is going to be damaged."""

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    """Reads the folder to the end; what it returns is of no interest."""
    repair: Callable[[Path], object] = lambda folder: None
    """What someone who forges the file would do to the others: new digests."""


def _write_data(folder: Path) -> None:
    write_indexed(folder / "train", TOKENS, 11, eod_id=0, tokenizer_sha256=None, source="a test")


def _read_data(folder: Path) -> None:
    dataset = IndexedTokens(folder / "train", vocab_size=11)
    for chunk in dataset.chunks():
        chunk.sum()
    assert dataset.sizes.sum() == dataset.num_tokens


def _write_tensors(folder: Path) -> None:
    arrays = {"a": sample(6, 8), "b": sample(3, dtype=np.int64), "c": sample(2, 0, 4)}
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(folder / "x.safetensors", specs, arrays.values(), {"format": "pt"})


def _read_tensors(folder: Path) -> None:
    file = read_tensors(folder / "x.safetensors")
    for name in file:
        assert file.read(name).tobytes() == file.array(name).tobytes()


def _write_checkpoint(folder: Path) -> None:
    folder.rmdir()
    write_checkpoint(folder, RECIPE, trained_weights(RECIPE), b"a tokenizer", num_files=2)


def _read_checkpoint(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for tensors in (checkpoint.model_tensors(), checkpoint.optimizer_tensors(), checkpoint.router_tensors()):
        for name in tensors:
            assert tensors.read(name).shape == tensors.array(name).shape


def _new_digests(folder: Path) -> None:
    files = (file for file in folder.iterdir() if file.name != MANIFEST_FILE)
    write_manifest(folder, {file.name: record_of(file) for file in files})


def _read_weights(folder: Path) -> None:
    stored = open_safetensors(folder)
    for name in stored.entries:
        stored.read(name)


def _write_parquet(folder: Path) -> None:
    table = pyarrow.table({"id": range(40), "text": [f"{row} text " * (row % 5) for row in range(40)]})
    pyarrow.parquet.write_table(table, folder / "web.parquet", row_group_size=15, data_page_size=50)


def _read_documents(folder: Path) -> None:
    reading = Reading("text", 0.5, skip_bad=False)
    for part in make_parts(find_inputs([str(folder)]), 1 << 20):
        for _ in labelled_documents(part, reading, Counts.none(reading.splits)):
            pass


def _use_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.encode("The fox <|endoftext|>")
    tokenizer.encode_batch(["naïve", "1999"])
    tokenizer.decode(range(min(tokenizer.vocab_size, 500)))


def _write_sentencepiece(folder: Path) -> None:
    train_sentencepiece(["The quick brown fox jumps over the dog.\n" * 3], 300, folder / "tokenizer.model")


def _read_metrics(folder: Path) -> None:
    list(table(read_report(folder / "metrics.jsonl")))


EXAMPLES: dict[str, Example] = {
    "recipe": Example(
        "recipe.yaml",
        lambda folder: (folder / "recipe.yaml").write_text(recipe_to_yaml(RECIPE)),
        lambda folder: load_recipe(folder / "recipe.yaml"),
    ),
    "idx": Example("train.idx", _write_data, _read_data),
    "bin": Example("train.bin", _write_data, _read_data),
    "data manifest": Example("train.json", _write_data, _read_data),
    "parquet": Example("web.parquet", _write_parquet, _read_documents),
    "safetensors": Example("x.safetensors", _write_tensors, _read_tensors),
    "checkpoint: manifest": Example("manifest.json", _write_checkpoint, _read_checkpoint),
    "checkpoint: state": Example("state.json", _write_checkpoint, _read_checkpoint, _new_digests),
    "checkpoint: recipe": Example("recipe.yaml", _write_checkpoint, _read_checkpoint, _new_digests),
    "checkpoint: parts": Example("model-00000-of-00002.safetensors", _write_checkpoint, _read_checkpoint, _new_digests),
    "safetensors index": Example(
        "model.safetensors.index.json", lambda folder: write_merged(folder, {"w": sample(6, 8)}), _read_weights
    ),
    "config.json": Example(
        "config.json", lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG)), read_hf_model
    ),
    "tokenizer.json": Example("tokenizer.json", write_qwen_tokenizer, _use_tokenizer),
    "tokenizer_config.json": Example("tokenizer_config.json", write_qwen_tokenizer, _use_tokenizer),
    "tokenizer.model": Example("tokenizer.model", _write_sentencepiece, _use_tokenizer),
    "metrics": Example(
        "metrics.jsonl",
        lambda folder: (folder / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n"),
        _read_metrics,
    ),
}
