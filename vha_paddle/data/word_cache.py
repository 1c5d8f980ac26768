"""Encoding text word by word, with a memory for words: the same ids in a third of the time.

A few thousand words are most of any text, and BPE need not join the pieces of each more than once, where the ids of a
text are those of its words one after another. A word is here some spaces and what follows up to the next. That is so

* for a SentencePiece BPE if no piece of its vocabulary has a space after another character: nothing is then ever joined
  across such a place. SentencePiece trains such vocabularies unless told otherwise (`split_by_whitespace`);
* for a Hugging Face BPE whose text is first split by one of the patterns below: no match of them goes on from something
  visible to a space. Its words go on over other white space, as the patterns do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

SENTENCEPIECE_WORDS = re.compile("(?<=[^ ])(?= )")
HF_WORDS = re.compile(r"(?<=\S)(?= )")

_LONGEST_WORD = 64  # characters; a longer one is no word, and is not met again
_MOST_WORDS = 1 << 17  # some 40 MB; when there are more, all are forgotten

# Split patterns of Qwen2 to Qwen3 and of Llama 3; they differ in how many digits are one token.
_HF_SPLITS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)


def sentencepiece_goes_by_words(pieces: Iterable[str], space: str) -> bool:
    """Whether no piece has a `space` after another character."""
    return not any(space in piece.lstrip(space) for piece in pieces)


def hf_goes_by_words(content: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` is one of those described above; others may be too, but are not looked into.

    Unicode's NFC keeps words apart: a space joins nothing before it. So do added tokens, unless they have white space
    in them or take some of what is around them.
    """
    steps = content["pre_tokenizer"] or {}
    if steps.get("type") == "Sequence" and len(steps["pretokenizers"]) == 2:
        split, steps = steps["pretokenizers"]
        known = split.get("type") == "Split" and split["pattern"].get("Regex") in _HF_SPLITS
        splits = known and split["behavior"] == "Isolated" and not split["invert"] and not steps.get("use_regex", True)
    else:
        splits = steps.get("use_regex", True)  # the pattern of GPT-2
    return bool(
        splits
        and steps.get("type") == "ByteLevel"
        and not steps["add_prefix_space"]
        and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and content["model"]["type"] == "BPE"
        and not content["model"].get("dropout")
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\s", token["content"])
            for token in content["added_tokens"]
        )
    )


class WordCache:
    """Encodes texts through `encode`, and calls it for a word only once."""

    def __init__(self, encode: Callable[[str], list[int]], words: re.Pattern[str]) -> None:
        """Take a function that goes by words, and the pattern of the places between them."""
        self._encode = encode
        self._words = words
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        known = self._known
        ids: list[int] = []
        for word in self._words.split(text):
            found = known.get(word)
            if found is None:
                found = self._encode(word)
                if len(word) <= _LONGEST_WORD:
                    if len(known) == _MOST_WORDS:
                        known.clear()
                    known[word] = found
            ids += found
        return ids
