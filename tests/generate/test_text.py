"""Text comes out of tokens in whole characters, whatever the tokenizer does at their ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.checkpoints import small_tokenizer
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.generate.text import TextStream

TEXT = "dog ▁ é 漢字 😀😀 fox\n\ufffd!"


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(small_tokenizer())


class SpaceBeforeWords:
    """Llama's way: a word's piece has its space in front, and the first space of a text is dropped; byte fallback."""

    def __init__(self) -> None:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁dog", "s", "▁sleeps", "."]
        self._fast = tokenizers.Tokenizer(
            models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
        )
        self._fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.vocab_size, self.words = len(pieces), list(range(257, len(pieces)))

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids))


class Bytes:
    """Qwen's way: every token is bytes."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._fast = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
        self._fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._fast.decoder = decoders.ByteLevel()
        self.vocab_size = len(alphabet)

    def encode(self, text: str) -> list[int]:
        return self._fast.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids))


def pieces_of(tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:  # noqa: ANN001
    stream = TextStream(tokenizer, prompt)
    return [stream.push(int(token)) for token in tokens] + [stream.finish()]


@pytest.mark.parametrize("prompt", ["", "The 漢", "\ufffd"])
@pytest.mark.parametrize("make", [lambda: SentencePieceTokenizer(small_tokenizer()), Bytes], ids=["pieces", "bytes"])
def test_text_comes_in_whole_characters(make, prompt: str) -> None:  # noqa: ANN001
    tokenizer = make()
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT), "no character is spelled in bytes"
    pieces = pieces_of(tokenizer, tokenizer.encode(prompt), ids)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if "\ufffd" in piece] == ["\ufffd!"]


def test_streamed_text_of_any_tokens_is_their_decoded_text(tokenizer: SentencePieceTokenizer) -> None:
    generator = np.random.default_rng(0)
    bytes_only = [tokenizer.encode(chr(0x1F600 + i))[j] for i in range(40) for j in range(4)]
    for _ in range(300):
        ids = np.where(generator.random(12) < 0.8, generator.choice(bytes_only, 12), generator.integers(1, 320, 12))
        assert "".join(pieces_of(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_words_keep_their_spaces_after_the_prompt_and_after_each_other() -> None:
    tokenizer = SpaceBeforeWords()
    _, the, dog, plural, sleeps, stop = tokenizer.words
    assert pieces_of(tokenizer, [the], [dog, plural, sleeps, stop]) == [" dog", "s", " sleeps", ".", ""]
    generator = np.random.default_rng(0)
    for _ in range(300):
        ids = generator.choice(tokenizer.words, 9).tolist()
        whole = tokenizer.decode([the, *ids])
        assert "the" + "".join(pieces_of(tokenizer, [the], ids)) == whole


def test_a_character_of_several_bytes_among_words_comes_whole() -> None:
    tokenizer = SpaceBeforeWords()
    spelled = [1 + byte for byte in "漢字".encode()]
    _, the, dog, *_ = tokenizer.words
    pieces = pieces_of(tokenizer, [the], [*spelled, dog])
    assert [piece for piece in pieces if piece] == ["漢", "字", " dog"]


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: SentencePieceTokenizer) -> None:
    first, *rest = tokenizer.encode("é")
    beyond = tokenizer.vocab_size
    assert "".join(pieces_of(tokenizer, [beyond], [first, beyond, *rest])) == "é"


def test_the_same_text_is_never_decoded_again(
    tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 400 tokens takes 400 short decodings, not 400 of everything."""
    decode, longest = tokenizer.decode, []
    stream = TextStream(tokenizer)

    def measured(ids: Sequence[int]) -> str:
        longest.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", measured)
    for token in tokenizer.encode("the lazy dog sleeps 漢 " * 20):
        stream.push(token)
    assert max(longest) <= 10
