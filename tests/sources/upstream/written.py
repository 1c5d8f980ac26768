"""A model's checkpoint in each of the forms that it comes in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.sources.containers.fixtures import BFLOAT16, cut, flattened, write_flex_folder, write_merged, write_pdparams
from tests.sources.upstream.oracle import Array

Arrays = Mapping[str, Array]


def prefixed(tensors: Arrays) -> dict[str, Array]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def flex(folder: Path, tensors: Arrays) -> Path:
    """A training checkpoint of one rank."""
    write_flex_folder(folder / "checkpoint-30" / "model_state", prefixed(tensors))
    return folder / "checkpoint-30"


def flex_with_masters(folder: Path, tensors: Arrays) -> Path:
    """Rounded weights over two ranks, some of them cut; and float32 masters over three, flat and cut within rows."""
    step = folder / "checkpoint-30"
    rounded = {name: tensor.astype(BFLOAT16) for name, tensor in prefixed(tensors).items()}
    split = {name: cut(t, t.ndim - 1, 2) for name, t in rounded.items() if t.ndim == 2 and t.shape[-1] % 2 == 0}
    write_flex_folder(step / "model_state", rounded, split)
    masters = {
        f"{name}.w_0": tensor.astype(np.float32)
        for name, tensor in prefixed(tensors).items()
        if name != "model.lm_head.weight" or not np.array_equal(tensor, tensors["embedding.embed_tokens.weight"])
    }
    pieces = {name: flattened(t, [t.size // 3, t.size // 2, t.size]) for name, t in masters.items()}
    write_flex_folder(step / "master_weight", masters, pieces)
    return step


def pdparams(folder: Path, tensors: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_pdparams(folder / "model_state.pdparams", prefixed(tensors))
    return folder


def merged(folder: Path, tensors: Arrays) -> Path:
    """Without `model.`, bfloat16 as BF16."""
    write_merged(folder, tensors)
    return folder


def merged_u16(folder: Path, tensors: Arrays) -> Path:
    write_merged(folder, tensors, bfloat16="U16", shards=2)
    return folder


def merged_with_prefix(folder: Path, tensors: Arrays) -> Path:
    write_merged(folder, prefixed(tensors))
    return folder


FORMS: dict[str, Callable[[Path, Arrays], Path]] = {
    form.__name__: form for form in (flex, pdparams, merged, merged_u16, merged_with_prefix)
}


def write_config(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"
