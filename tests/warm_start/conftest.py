"""A small grouped model that has learned something, and the dataset that it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import small_tokenizer
from vha_paddle.config import Recipe, recipe_from_dict
from vha_paddle.data.indexed import write_indexed
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer

SYMBOLS, NUM_STEPS = 24, 120
GROUPED = {"kind": "grouped", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
VHA = {"kind": "vha", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "postmix_rank": 2}

MakeRecipe = Callable[..., Recipe]


def text(generator: np.random.Generator, length: int) -> list[int]:
    """Tokens that follow from the ones two and three before: attention has to find them."""
    second, third = generator.permutation(SYMBOLS), generator.permutation(SYMBOLS)
    draws, noise = generator.random(length), generator.integers(0, SYMBOLS, length)
    tokens = [0, 1, 2]
    for draw, random in zip(draws, noise, strict=True):
        rules = int(second[tokens[-2]]) if draw < 0.45 else int(third[tokens[-3]])
        tokens.append(rules if draw < 0.9 else int(random))
    return [token + 4 for token in tokens]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model and the dataset `text`."""
    directory = tmp_path_factory.mktemp("warm")
    (directory / "tokenizer.model").write_bytes(small_tokenizer())
    tokenizer = SentencePieceTokenizer.load(directory / "tokenizer.model")
    tokens = text(np.random.default_rng(3), 60_000)
    write_indexed(
        directory / "text",
        [tokens],
        tokenizer.vocab_size,
        eod_id=None,
        tokenizer_sha256=tokenizer.digest,
        source="rules",
    )
    return directory


@pytest.fixture(scope="session")
def make(folder: Path) -> MakeRecipe:
    """A recipe of an attention kind; keyword arguments are dotted keys with `__` for the dot."""

    def recipe(attention: dict[str, Any], **changes: Any) -> Recipe:
        has_maps = attention["kind"] == "vha"
        values: dict[str, Any] = {
            "run": {"name": "warm", "seed": 5, "output": str(folder / attention["kind"])},
            "model": {
                "vocab_size": 330,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "max_position_embeddings": 64,
                "rope_theta": 1000.0,
                "tie_word_embeddings": True,
                "attention": dict(attention),
            },
            "data": {
                "train": str(folder / "text"),
                "tokenizer": str(folder / "tokenizer.model"),
                "sequence_length": 32,
                "global_batch_size": 16,
                "micro_batch_size": 16,
            },
            "optim": {"lr": 1e-2} | ({"decay_target": "identity"} if has_maps else {}),
            "schedule": {
                "kind": "cosine",
                "total_tokens": NUM_STEPS * 512,
                "warmup_tokens": 10 * 512,
                "min_lr": 1e-3,
            },
            "logging": {"eval_sequences": 64},
        }
        for key, value in changes.items():
            section = values
            *path, last = key.split("__")
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
        return recipe_from_dict(values, source="test recipe")

    return recipe


@pytest.fixture(scope="session")
def trained(make: MakeRecipe) -> Path:
    """A run of a grouped model with 8 query heads on 4 key/value heads, after `NUM_STEPS` steps."""
    recipe = make(GROUPED)
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    return Path(recipe.run.output)
