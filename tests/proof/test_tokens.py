"""What is compared on: how many tokens, of what, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, small_model, small_tokenizer
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.proof.tokens import tokens_to_compare

LONG = small_model(SMALL_VHA, max_position_embeddings=4096)
NONE = -1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(small_tokenizer())
    return path


def test_without_a_tokenizer_all_ids_are_random_and_every_id_may_come() -> None:
    tokens = tokens_to_compare(LONG, None, None, 8192)
    assert tokens.tokens_BS.shape == (16, 512) and tokens.text is None
    assert set(tokens.tokens_BS.ravel()) == set(range(LONG.vocab_size))
    assert (tokens.labels_BS(NONE) == NONE).all()


def test_with_a_tokenizer_half_is_built_in_text(tokenizer: Path) -> None:
    tokens = tokens_to_compare(LONG, tokenizer, None, 256)
    assert tokens.tokens_BS.shape == (2, 128) and (tokens.num_random, tokens.text) == (1, "built in")
    assert load_tokenizer(tokenizer).decode(tokens.tokens_BS[1].tolist()).isprintable() is False  # lines of prose
    labels_BS = tokens.labels_BS(NONE)
    assert (labels_BS[0] == NONE).all() and labels_BS[1, -1] == NONE
    assert np.array_equal(labels_BS[1, :-1], tokens.tokens_BS[1, 1:])


def test_sequences_are_no_longer_than_the_model_serves(tokenizer: Path) -> None:
    short = small_model(SMALL_VHA, max_position_embeddings=32)
    assert tokens_to_compare(short, tokenizer, None, 256).tokens_BS.shape == (8, 32)


def test_a_text_is_taken_from_its_beginning(tokenizer: Path, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n" * 40
    (tmp_path / "text").write_text(text)
    tokens = tokens_to_compare(LONG, tokenizer, tmp_path / "text", 100)
    assert tokens.tokens_BS.shape == (2, 50) and tokens.num_random == 0
    assert tokens.tokens_BS.ravel().tolist() == load_tokenizer(tokenizer).encode(text)[:100]
    assert np.array_equal(tokens.labels_BS(NONE)[:, :-1], tokens.tokens_BS[:, 1:])


def test_a_short_text_is_used_as_far_as_it_goes(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The lazy dog")
    count = len(load_tokenizer(tokenizer).encode("The lazy dog"))
    assert tokens_to_compare(LONG, tokenizer, tmp_path / "text", 100).tokens_BS.shape == (1, count)


def test_what_cannot_be_compared_on_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("T")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for text, number, message in (
        (None, 1, "--verify-tokens 1: must be at least 2"),
        (tmp_path / "short", 64, "holds 1 tokens, two are the least"),
        (tmp_path / "absent", 64, "absent: cannot be read"),
        (tmp_path / "bytes", 64, "bytes: cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            tokens_to_compare(LONG, tokenizer, text, number)
    with pytest.raises(UserError, match="has no tokenizer to read it with"):
        tokens_to_compare(LONG, None, tmp_path / "short", 64)


def test_a_tokenizer_of_another_vocabulary_is_refused(tokenizer: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer belongs to another model"):
        tokens_to_compare(small_model(SMALL_VHA, vocab_size=100), tokenizer, None, 64)
