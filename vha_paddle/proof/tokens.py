"""What models are compared on: random ids, which reach the whole vocabulary, and text, on which they have a loss."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.config import Model
from vha_paddle.data.corpus import builtin_documents
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.export.verify import BUILT_IN

Array = np.ndarray[Any, Any]

NUM_TOKENS = 256
"""Unless it is said how many."""
_LONGEST = 512  # tokens of a sequence
_CHARACTERS_PER_TOKEN = 64  # no more are read of a text: few tokens are longer
_BUILTIN_DOCUMENTS = 64


@dataclass(frozen=True)
class Tokens:
    """Sequences, and where there is text in them."""

    tokens_BS: Array
    num_random: int
    """Sequences, the first ones, of random ids; the others are text."""
    text: str | None
    """Where the text is from: a file, or `built in`; None where there is none."""

    def labels_BS(self, no_label: int) -> Array:
        """The next token of text; random ids have none, nor has the end of a sequence."""
        labels_BS = np.full(self.tokens_BS.shape, no_label)
        labels_BS[self.num_random :, :-1] = self.tokens_BS[self.num_random :, 1:]
        return labels_BS


def tokens_to_compare(model: Model, tokenizer: Path | None, text: Path | None, num_tokens: int) -> Tokens:
    """Sequences of together about `num_tokens` tokens: of `text` where it is given; otherwise of random ids, and the
    half of them of the built-in text where there is a tokenizer.

    Raises:
        UserError: a text without a tokenizer, that cannot be read or has less than two tokens; fewer than two tokens
            asked for; a tokenizer of another vocabulary.
    """
    if num_tokens < 2:
        raise UserError(f"--verify-tokens {num_tokens}: must be at least 2; leave it out for {NUM_TOKENS}")
    if text is not None and tokenizer is None:
        raise UserError(f"--text {text}: the checkpoint has no tokenizer to read it with; leave it out")
    length = min(_LONGEST, model.max_position_embeddings, max(2, num_tokens // 2))
    rows = max(1, num_tokens // length)
    if tokenizer is None:
        return Tokens(_random(model.vocab_size, rows, length), rows, None)
    encoder = load_tokenizer(tokenizer)
    if text is not None:
        ids = _ids(encoder, _read(text, rows * length), rows * length, model, tokenizer)
        if len(ids) < 2:
            raise UserError(f"--text {text}: holds {len(ids)} tokens, two are the least; give a longer text")
        length = min(length, len(ids))
        rows = len(ids) // length
        return Tokens(ids[: rows * length].reshape(rows, length), 0, str(text))
    num_random = max(1, rows // 2)
    num_text = max(1, rows - num_random)
    documents = "\n\n".join(itertools.islice(builtin_documents(), _BUILTIN_DOCUMENTS))
    ids = _ids(encoder, documents, num_text * length, model, tokenizer)
    num_text = len(ids) // length
    together = [_random(model.vocab_size, num_random, length), ids[: num_text * length].reshape(-1, length)]
    return Tokens(np.concatenate(together), num_random, BUILT_IN)


def _random(vocab_size: int, rows: int, length: int) -> Array:
    return np.random.default_rng(0).integers(0, vocab_size, (rows, length))


def _read(text: Path, num_tokens: int) -> str:
    try:
        with open(text, encoding="utf-8") as file:
            return file.read(num_tokens * _CHARACTERS_PER_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: cannot be read ({error}); give a UTF-8 text file") from None


def _ids(encoder: Tokenizer, text: str, num_tokens: int, model: Model, tokenizer: Path) -> Array:
    ids = np.array(encoder.encode(text[: num_tokens * _CHARACTERS_PER_TOKEN])[:num_tokens], np.int64)
    if ids.max(initial=0) >= model.vocab_size:
        raise UserError(
            f"{tokenizer}: gives id {ids.max()}, the model has {model.vocab_size}; the tokenizer belongs to another "
            "model"
        )
    return ids
