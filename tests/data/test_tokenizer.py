"""The tokenizer loses nothing, is reproducible, and converts."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

from vha_paddle.data.sentencepiece_tokenizer import (
    BOS_ID,
    EOS_ID,
    NUM_RESERVED,
    PAD_ID,
    SPACE_SYMBOL,
    SentencePieceTokenizer,
    _sample,
    train_sentencepiece,
)
from vha_paddle.data.tokenizer import save_tokenizer
from vha_paddle.errors import UserError

AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\tindented\r\n    more\n",
    "\0 null",
    SPACE_SYMBOL,
    f" {SPACE_SYMBOL}{SPACE_SYMBOL} x",
    "</s><s><pad><unk> <0x41>",
    "é – “quoted” 日本語 𝄞 \ufeff \u2028 \u3000 \xa0 ﬁ ⁇ ▅",
]


def random_texts(count: int) -> list[str]:
    chooser = random.Random(1)
    fragments = ["  ", "\n", " ", "the", " the", "aa", "a", "1", "---", "\t", "é", "𝄞", "Query", ".", ":\n"]
    texts = ["".join(chooser.choices(fragments, k=chooser.randint(0, 50))) for _ in range(count)]
    letters = [*range(0x20, 0x7F), *range(0xA0, 0x3000), 0x1F600]
    return texts + ["".join(map(chr, chooser.choices(letters, k=30))) for _ in range(count)]


def test_decode_of_encode_is_the_text(tokenizer: SentencePieceTokenizer, documents: list[str]) -> None:
    for text in AWKWARD + documents + random_texts(300):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_never_encodes_to_a_special_token(tokenizer: SentencePieceTokenizer, documents: list[str]) -> None:
    ids = {token_id for text in AWKWARD + documents for token_id in tokenizer.encode(text)}
    assert min(ids) > PAD_ID
    assert max(ids) < tokenizer.vocab_size


def test_special_tokens_have_their_ids_and_no_text(tokenizer: SentencePieceTokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (BOS_ID, EOS_ID, PAD_ID) == (1, 2, 3)
    assert tokenizer.decode([BOS_ID, *tokenizer.encode("a b"), EOS_ID, PAD_ID]) == "a b"


def test_frequent_words_and_indentation_are_single_ids(tokenizer: SentencePieceTokenizer) -> None:
    assert len(tokenizer.encode(" the")) == 1
    assert len(tokenizer.encode("    ")) == 1


def test_digit_is_always_one_id(tmp_path: Path) -> None:
    years = train_sentencepiece(["in 1999 and 1999 on and on "] * 50, 276, tmp_path / "tokenizer.model")
    assert len(years.encode("1999")) == 4


def test_training_twice_gives_the_same_bytes(documents: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_sentencepiece(documents, 350, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_load_gives_what_was_saved_and_its_digest(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    again = SentencePieceTokenizer.load(tmp_path / "tokenizer.model")
    assert again.digest == hashlib.sha256((tmp_path / "tokenizer.model").read_bytes()).hexdigest()
    assert again.digest == tokenizer.digest
    assert again.vocab_size == tokenizer.vocab_size == 400
    assert again.encode("the head\n") == tokenizer.encode("the head\n")


def test_fast_tokenizer_made_from_the_pieces_gives_the_same_ids(
    tokenizer: SentencePieceTokenizer, documents: list[str]
) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer.model_bytes)
    ids = {piece.piece.replace(SPACE_SYMBOL, " "): index for index, piece in enumerate(model.pieces)}
    merges = [
        (text[:cut], text[cut:])
        for text in list(ids)[NUM_RESERVED:]  # pieces lie in order of score
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    fast.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    for text in AWKWARD + documents + random_texts(300):
        assert fast.encode(text).ids == tokenizer.encode(text)
        assert fast.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_sample_of_a_large_corpus_fits_and_depends_on_the_seed(
    make_documents: Callable[..., list[str]],
) -> None:
    texts = make_documents(50)
    budget = sum(map(len, texts)) // 3
    first, again, other = (_sample(iter(texts), budget, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert 0 < sum(map(len, first)) <= budget
    assert first == [text for text in texts if text in set(first)]  # in their order
    assert set(_sample(reversed(texts), budget, 0)) == set(first)
    assert _sample(iter(texts), 10**9, 0) == texts


@pytest.mark.parametrize("limit", [1000, 1 << 20])
def test_long_document_is_trained_on(
    documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The trainer skips long sentences silently, so the limit must be ours."""
    monkeypatch.setattr("vha_paddle.data.sentencepiece_tokenizer._LONGEST_DOCUMENT", limit)
    joined = train_sentencepiece(["".join(documents)], 400, tmp_path / "tokenizer.model")
    assert len(joined.encode(" the")) == 1


def test_file_that_is_no_model_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"bad\.model is no SentencePiece model"):
        SentencePieceTokenizer.load(tmp_path / "bad.model")


def test_missing_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.model cannot be read: No such file"):
        SentencePieceTokenizer.load(tmp_path / "gone.model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_id": -1}, "has no pad token"),
        ({"pad_id": 3}, "changes text"),
        ({"pad_id": 3, "byte_fallback": True}, "changes text"),
        ({"pad_id": 3, "byte_fallback": True, "normalization_rule_name": "identity"}, "changes text"),
    ],
    ids=["no-pad", "no-bytes", "normalised", "dummy-prefix"],
)
def test_lossy_model_is_a_user_error(documents: list[str], options: dict[str, object], message: str) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents), model_writer=model, vocab_size=340, minloglevel=2, **options
    )
    with pytest.raises(UserError, match=message):
        SentencePieceTokenizer(model.getvalue())


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["a b c"], NUM_RESERVED, "must be above 260"),
        (["a b c"], 5000, "no tokenizer of 5000 ids can be trained on this text: Vocabulary size too high"),
        ([], 400, "hold no text"),
        (["  \n", "\0"], 400, "hold no text"),
    ],
)
def test_impossible_training_is_a_user_error(tmp_path: Path, texts: list[str], vocab_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_sentencepiece(texts, vocab_size, tmp_path / "tokenizer.model")
    assert list(tmp_path.iterdir()) == []
