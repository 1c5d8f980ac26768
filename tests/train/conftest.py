"""A tiny dataset and a recipe that trains on it in seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vha_paddle.config import Recipe, recipe_from_dict, recipe_to_yaml
from vha_paddle.data.indexed import write_indexed
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece

VOCAB, TOKENS = 320, 290  # of the model, of the tokenizer
NUM_STEPS = 6
MEASURED = ("tokens_per_second", "mfu", "seconds", "memory", "communication_seconds")
"""Keys of a record that differ from one run of a recipe to the next."""

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokenizer.model and random train and validation tokens."""
    return write_dataset(tmp_path_factory.mktemp("dataset"))


def write_dataset(directory: Path) -> Path:
    """Fill a directory with tokenizer.model and random train and validation tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["the head reads every key and value of the group, before and after a fold is made exact"] * 3
    tokenizer = train_sentencepiece(words, TOKENS, directory / "tokenizer.model")
    generator = np.random.default_rng(0)
    for name, count in (("train", 12), ("validation", 4)):
        documents = [generator.integers(4, TOKENS, 50).tolist() for _ in range(count)]
        write_indexed(
            directory / name,
            documents,
            tokenizer.vocab_size,
            eod_id=tokenizer.eos_id,
            tokenizer_sha256=tokenizer.digest,
            source="random tokens",
        )
    return directory


@pytest.fixture
def make_recipe(dataset: Path, tmp_path: Path) -> MakeRecipe:
    """`tiny_recipe` in a directory of the test."""
    return functools.partial(tiny_recipe, dataset, tmp_path / "run")


def tiny_recipe(dataset: Path, output: Path, **changes: Any) -> Recipe:
    """A recipe of `NUM_STEPS` steps; keyword arguments are dotted keys with `__` for the dot."""
    values: dict[str, Any] = {
        "run": {"name": "tiny", "seed": 11, "output": str(output)},
        "model": {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "attention": {
                "kind": "vha",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "postmix_rank": 2,
            },
        },
        "data": {
            "train": str(dataset / "train"),
            "validation": str(dataset / "validation"),
            "tokenizer": str(dataset / "tokenizer.model"),
            "sequence_length": 16,
            "global_batch_size": 4,
            "micro_batch_size": 2,
        },
        "optim": {"lr": 1e-3, "decay_target": "identity"},
        "schedule": {
            "kind": "cosine",
            "total_tokens": NUM_STEPS * 64,
            "warmup_tokens": 64,
            "min_lr": 1e-4,
        },
        "checkpoint": {"interval": 3},
        "logging": {"interval": 2, "eval_interval": 3, "eval_sequences": 4},
    }
    for key, value in changes.items():
        section = values
        *path, last = key.split("__")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return recipe_from_dict(values, source="test recipe")


def write_recipe(recipe: Recipe, path: Path) -> Path:
    path.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    return path
