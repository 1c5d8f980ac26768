"""Encoding by words gives the ids of the whole text, or is not done."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_tokenizer import AWKWARD, random_texts
from tests.hf_tokenizers import ODD_TEXTS, SPECIAL_TEXTS, write_qwen_tokenizer
from vha_paddle.data import word_cache
from vha_paddle.data.hf_tokenizer import HFTokenizer
from vha_paddle.data.sentencepiece_tokenizer import SPACE_SYMBOL, SentencePieceTokenizer
from vha_paddle.data.word_cache import (
    HF_WORDS,
    SENTENCEPIECE_WORDS,
    WordCache,
    hf_goes_by_words,
    sentencepiece_goes_by_words,
)


def test_batch_is_the_encoding_of_each(tokenizer: SentencePieceTokenizer, documents: list[str]) -> None:
    assert isinstance(tokenizer._encode_words.__self__, WordCache)  # type: ignore[attr-defined]
    for texts in (documents, AWKWARD, random_texts(300), documents):
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(f" \n\tabethcr.,()é日9{SPACE_SYMBOL}\U0001d11e"), max_size=60))
def test_batch_of_any_text_is_its_encoding(tokenizer: SentencePieceTokenizer, text: str) -> None:
    assert tokenizer.encode_batch([text, text]) == [tokenizer.encode(text)] * 2


def test_full_memory_is_emptied(tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MOST_WORDS", 7)
    cache = WordCache(tokenizer.encode, SENTENCEPIECE_WORDS)
    for number in range(100):
        text = f"words {number} of many " + "x" * 100
        assert cache.encode(text) == tokenizer.encode(text)
        assert len(cache._known) <= 7 and not any("xxx" in word for word in cache._known)


def test_a_word_is_encoded_once() -> None:
    calls: list[str] = []

    def encode(word: str) -> list[int]:
        calls.append(word)
        return [len(word)]

    cache = WordCache(encode, SENTENCEPIECE_WORDS)
    assert cache.encode("a  bc a a  bc ") == [1, 4, 2, 2, 4, 1]
    assert calls == ["a", "  bc", " a", " "]
    assert HF_WORDS.split("  a\n b\tc d \n") == ["  a\n b\tc", " d", " \n"]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [(["▁the", "▁▁", "a", "\n"], True), (["the▁", "a"], False), (["a▁b"], False), (["▁a▁"], False)],
)
def test_vocabulary_that_joins_words_is_seen(pieces: list[str], expected: bool) -> None:
    assert sentencepiece_goes_by_words(pieces, SPACE_SYMBOL) is expected


@pytest.mark.parametrize("options", [{"treat_whitespace_as_suffix": True}, {"model_type": "unigram"}])
def test_other_models_are_not_encoded_by_words(documents: list[str], options: dict[str, object]) -> None:
    model = io.BytesIO()
    common = {"model_type": "bpe", "vocab_size": 450, "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents * 2),
        model_writer=model,
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        pad_id=3,
        **common | options,
    )
    other = SentencePieceTokenizer(model.getvalue())
    assert not isinstance(getattr(other._encode_words, "__self__", None), WordCache)
    assert other.encode_batch(documents) == [other.encode(text) for text in documents]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer.load(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")) / "tokenizer.json")


def test_batch_of_a_hugging_face_tokenizer_is_the_encoding_of_each(hf: HFTokenizer, documents: list[str]) -> None:
    assert hf._words is not None
    for texts in (documents, ODD_TEXTS, SPECIAL_TEXTS, AWKWARD, random_texts(300)):
        assert hf.encode_batch(texts) == [hf.encode(text) for text in texts]


PARTS = [
    "<think>",
    "<|endoftext|>",
    "'s",
    "e\u0301",
    "\u0301",
    "\x1c",
    "\x85",
    "\xa0",
    "\u3000",
    "\r\n",
    "日本",
    "1",
    "fox",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from([*" \n\t abc.,()", *PARTS]), max_size=40).map("".join))
def test_batch_of_any_text_is_its_encoding_with_a_hugging_face_tokenizer(hf: HFTokenizer, text: str) -> None:
    assert hf.encode_batch([text, text]) == [hf.encode(text)] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=".+"),
        lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"),
        lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda c: c.update(pre_tokenizer=None),
        lambda c: c.update(normalizer={"type": "Lowercase"}),
        lambda c: c["added_tokens"][3].update(lstrip=True),
        lambda c: c["added_tokens"][3].update(content="<th ink>"),
        lambda c: c["model"].update(dropout=0.1),
    ],
)
def test_other_hugging_face_tokenizers_are_not_encoded_by_words(
    hf: HFTokenizer, change: Callable[[Any], object]
) -> None:
    content = json.loads(hf.files["tokenizer.json"])
    assert hf_goes_by_words(content)
    change(content)
    assert not hf_goes_by_words(content)


def test_gpt2s_own_split_goes_by_words(hf: HFTokenizer) -> None:
    content = json.loads(hf.files["tokenizer.json"])
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert hf_goes_by_words(content)
    other = HFTokenizer(hf.files | {"tokenizer.json": json.dumps(content).encode()})
    assert other._words is not None
    for texts in (ODD_TEXTS, random_texts(300)):
        assert other.encode_batch(texts) == [other.encode(text) for text in texts]
