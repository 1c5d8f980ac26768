"""A small text and what is made from it, shared by the tests of the data package."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vha_paddle.data.indexed import IndexedTokens, write_indexed
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece

WORDS = (
    "the a cache head query key value of and to in is reads writes keeps every token layer model that it "
    "small large once twice fold exact weight rank group width before after with without"
).split()


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of common words in paragraphs, with indented lines, digits and a few other characters."""
    chooser = random.Random(seed)
    documents = []
    for number in range(count):
        lines = []
        for _ in range(chooser.randint(3, 8)):
            sentence = " ".join(chooser.choices(WORDS, k=chooser.randint(4, 12)))
            indent = "    " * chooser.randint(0, 2)
            lines.append(f"{indent}{sentence.capitalize()} {chooser.randint(0, 999)}: é–\t«{number}».")
        documents.append("\n".join(lines) + "\n")
    return documents


@pytest.fixture(scope="session")
def make_documents() -> Callable[..., list[str]]:
    return sentences


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return sentences(120)


@pytest.fixture(scope="session")
def tokenizer(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return train_sentencepiece(documents, 400, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., Path]:
    """Write documents of ids to a fresh prefix and return it."""

    def write(*documents: Sequence[int], vocab_size: int = 1000, eod_id: int | None = None) -> Path:
        prefix = tmp_path / "tokens"
        write_indexed(prefix, documents, vocab_size, eod_id=eod_id, tokenizer_sha256="abc", source="test")
        return prefix

    return write


@pytest.fixture
def opened(write_tokens: Callable[..., Path]) -> Callable[..., IndexedTokens]:
    """Write documents of ids and open them."""
    return lambda *documents, **options: IndexedTokens(write_tokens(*documents, **options))
