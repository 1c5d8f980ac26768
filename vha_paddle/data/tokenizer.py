"""What a tokenizer is to training, evaluation and generation, and how one is loaded, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from vha_paddle.data.hf_tokenizer import HFTokenizer
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.data.tokenizer_files import HF_FILE, tokenizer_files
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write


class Tokenizer(Protocol):
    """Text to ids and back. No text encodes to the end token, not even one that spells it."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it. A model may have more rows."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where there is one. The training data have none."""

    @property
    def eos_id(self) -> int:
        """The end token: it ends each document of the training data, and generation."""

    @property
    def eos_token(self) -> str:
        """How the tokenizer's files spell the end token."""

    @property
    def pad_id(self) -> int:
        """What clients fill a batch with; the end token where the tokenizer has no other."""

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the file that says which text an id means: `tokenizer.model` or `tokenizer.json`."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """All of its files, by the names that they are stored under."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin or end token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them, in one call."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens give nothing; bytes that form no UTF-8 character give U+FFFD."""


def load_tokenizer(path: Path, eos_token: str | None = None) -> Tokenizer:
    """Load a SentencePiece `tokenizer.model`, a Hugging Face `tokenizer.json`, or a directory that holds one.

    Args:
        eos_token: text of the end token, where a Hugging Face tokenizer is to have another than its files say.

    Raises:
        UserError: there is none, it cannot be read, or it is not of a form that can be used.
    """
    first = tokenizer_files(path)[0]
    if first.name == HF_FILE:
        return HFTokenizer.load(first, eos_token)
    tokenizer = SentencePieceTokenizer.load(first)
    if eos_token not in (None, tokenizer.eos_token):
        raise UserError(
            f"tokenizer {path}: its end token is {tokenizer.eos_token}, fixed when it was trained; drop {eos_token!r}"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of a tokenizer into a folder."""
    for name, content in tokenizer.files.items():
        with atomic_write(folder / name) as file:
            file.write(content)
