"""Read an exported (stock Qwen3) model directory back: its shape from config.json, its tensors under our names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.config import GroupedAttention, Model
from vha_paddle.errors import UserError
from vha_paddle.names import from_hf
from vha_paddle.tensor_file import read_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_hf_model(directory: Path) -> Model:
    """The model section that describes a stock Qwen3 directory.

    Raises:
        UserError: there is no readable config.json, or it describes another architecture.
    """
    path = directory / CONFIG_FILE
    values = _read_json(path)
    if values.get("model_type") != "qwen3":
        raise UserError(f"{path}: model_type={values.get('model_type')}: only qwen3 can be read")
    try:
        return Model(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values["rope_theta"],
            initializer_range=values["initializer_range"],
            tie_word_embeddings=values["tie_word_embeddings"],
            attention=GroupedAttention(
                kind="grouped",
                num_attention_heads=values["num_attention_heads"],
                num_key_value_heads=values["num_key_value_heads"],
                head_dim=values["head_dim"],
            ),
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; export the model again") from None
    except ValueError as error:
        raise UserError(f"{path}: not a Qwen3 configuration ({' '.join(str(error).split())})") from None


def read_hf_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor of the directory as (our name, array in our orientation), one at a time.

    Raises:
        UserError: a file is missing or damaged, or holds a tensor that a Qwen3 decoder does not have.
    """
    for file in weight_files(directory):
        tensors = read_tensors(file)
        for name in tensors:
            yield from_hf(name, tensors.array(name))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or the shards its index names."""
    index = directory / INDEX_FILE
    if not index.exists():
        return [directory / WEIGHTS_FILE]
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{index}: weight_map must name files of this directory; export the model again")
    return [directory / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give an exported model directory") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object; export the model again")
    return values
