"""Every form of directory that is exported, loaded by transformers: one file or shards, float32 or bfloat16.

vLLM, llama.cpp and transformers 5 are asked by `make serve-check` (docs/serving.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import (
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    forward_spec,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.oracles import forward
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.evaluate import model_logits
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.export.writer import MAX_SHARD_BYTES

UNTIED = {"tie_word_embeddings": False}
# 6 heads of 8 on a hidden size of 20 but for the last, 5 heads of 4: head_dim = hidden_size / heads.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": (SMALL_VHA, {}),
    "untied": (SMALL_VHA, UNTIED),
    "experts, tied": (SMALL_VHA, SMALL_MIXTURE),
    "experts, untied": (SMALL_VHA, SMALL_MIXTURE | UNTIED),
    "windows": (SMALL_VHA, SMALL_HYBRID),
    "heads as wide as their share": (
        SMALL_VHA | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 4},
        UNTIED,
    ),
}
TOKENS_BS = np.random.default_rng(1).integers(0, 330, (2, 11))


def their_model(directory: Path) -> Any:
    """As transformers loads it for float32 arithmetic; nothing may be missing, left over or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, torch_dtype=torch.float32, attn_implementation="eager"
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model


def dtypes_on_disk(directory: Path) -> set[str]:
    dtypes = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return dtypes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [MAX_SHARD_BYTES, 8_000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_was_trained(
    name: str, max_shard_bytes: int, dtype: ExportDtype, tmp_path: Path
) -> None:
    """In float32 what the unfolded checkpoint computes. In bfloat16 what the rounded weights of the files do, read by
    our own decoder: rounding is no fault of the client."""
    attention, keys = MODELS[name]
    recipe, directory = small_recipe(attention, **keys), tmp_path / "out"
    weights = trained_weights(recipe)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, directory, dtype, max_shard_bytes=max_shard_bytes)
    assert (len(list(directory.glob("*.safetensors"))) > 2) == (max_shard_bytes == 8_000)
    assert dtypes_on_disk(directory) == {{"float32": "F32", "bfloat16": "BF16"}[dtype]}
    with torch.no_grad():
        theirs = their_model(directory)(torch.tensor(TOKENS_BS)).logits.double().numpy()
    if dtype == "float32":
        in_float64 = {name: array.astype(np.float64) for name, array in weights.items()}
        expected = forward.logits(in_float64, TOKENS_BS, forward_spec(recipe.model))
    else:
        expected = model_logits(directory)(TOKENS_BS)
    assert_close(theirs, expected, FLOAT32, "logits")


def test_texts_of_several_lengths_go_through_transformers_own_generation(tmp_path: Path) -> None:
    """Padded on the left with the pad token that the directory names, each continues as it does alone."""
    recipe = small_recipe(SMALL_VHA, **UNTIED)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, trained_weights(recipe), small_tokenizer())
    export_checkpoint(checkpoint, tmp_path / "out", "float32")
    model = their_model(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", padding_side="left")
    texts = ["The quick brown fox", "dog", "def fox(dog):\n    return 1"]
    options = {"max_new_tokens": 6, "do_sample": False}
    together = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), **options)[:, -6:].tolist()
    for text, tokens in zip(texts, together, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **options)[0, -6:].tolist()
        assert tokens == alone
