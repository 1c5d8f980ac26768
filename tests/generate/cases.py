"""Small grouped models, exported, and what the tests of their texts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints import (
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from vha_paddle.config import Recipe
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.generate.batch import Text, generate
from vha_paddle.generate.model import TextModel
from vha_paddle.sampling import Sampling

PROMPT = "The lazy dog"
NUM_NEW = 24
UNTIED = {"tie_word_embeddings": False}

# KV heads and other keys of the model.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "MHA": (6, UNTIED),
    "GQA, tied": (2, {}),
    "MQA": (1, UNTIED),
    "hybrid": (2, UNTIED | SMALL_HYBRID),
    "mixture": (2, UNTIED | SMALL_MIXTURE),
}


@dataclass(frozen=True)
class Case:
    """A grouped model, its checkpoint and its exported directory."""

    recipe: Recipe
    weights: dict[str, np.ndarray]
    checkpoint: Path
    directory: Path


def lively_weights(recipe: Recipe) -> dict[str, np.ndarray]:
    """At full size a tied embedding outweighs the layers, and the likeliest token is the last one again."""
    weights = trained_weights(recipe, seed=1)
    weights["model.embed_tokens.weight"] *= np.float32(0.2)
    return weights


def export_grouped(folder: Path, num_kv_heads: int, **model: Any) -> Case:
    recipe = small_recipe(SMALL_GROUPED | {"num_key_value_heads": num_kv_heads}, **model)
    weights = lively_weights(recipe)
    checkpoint = write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, folder / "out", "float32", plain=True)
    return Case(recipe, weights, checkpoint, folder / "out")


def continued(
    model: TextModel,
    texts: Sequence[Text],
    sampling: Sampling,
    num_new: int = NUM_NEW,
    end_ids: Sequence[int] = (),
) -> list[list[int]]:
    """The new tokens of each text."""
    longest = max(len(text.prompt) for text in texts)
    found: list[list[int]] = [[] for _ in texts]
    for number, token in generate(model.decoder(longest, num_new), texts, num_new, sampling, end_ids):
        found[number].append(token)
    return found


def continued_alone(model: TextModel, sampling: Sampling, num_new: int = NUM_NEW, end_ids: Any = ()) -> list[int]:
    """The new tokens after `PROMPT`."""
    return continued(model, [Text(model.encode(PROMPT))], sampling, num_new, end_ids)[0]


def text_of(model: TextModel, tokens: list[int]) -> str:
    """Ids that the tokenizer does not know have no text."""
    return model.tokenizer.decode([token for token in tokens if token < model.tokenizer.vocab_size])
