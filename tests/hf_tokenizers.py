"""A small tokenizer in the form of Qwen3's, trained here: byte-level BPE, Qwen's split, special tokens beside it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

END, TURN_END, TURN_START, THINK = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>"
ADDED = {END: True, TURN_START: True, TURN_END: True, THINK: False}
"""Added tokens, in the order of their ids, and whether they are special."""

# Source: tokenizer.json of Qwen/Qwen3-0.6B-Base.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on; it's 1999 (or 2024).\n",
    "def fox(dog):\n    if dog is None:\n        return 1\n\n\n",
    "Füchse <|endoftext|> <think> naïve — “so” 日本語 日本語\r\n",
)
ODD_TEXTS = (
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\tdef f(x):\r\n        return  x\n",
    "1234567890 3.14 x1y2",
    "IT'S they'Re don't 'll",
    "naïve ﬁ e\u0301 A\u030a 日本語 \U0001d11e 👩‍💻",  # not in NFC
    "\0\x7f\u00a0\u2028\ufeff\uffff",
    "a" * 300 + " " * 37 + "x",
    "<|endoftext <|im_end|",
)
SPECIAL_TEXTS = ("a<|endoftext|>b", "<|im_start|>user\n<|im_end|>", "<|endoftext|>")


@functools.cache
def _trained(num_pieces: int) -> str:
    """tokenizer.json."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated", invert=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator([text * 5 for text in TEXT], trainer)
    for text, special in ADDED.items():
        token = AddedToken(text, normalized=False, special=special)
        fast.add_special_tokens([token]) if special else fast.add_tokens([token])
    return fast.to_str()


def write_qwen_tokenizer(directory: Path, num_pieces: int = 310, **config: Any) -> Path:
    """The files that Qwen3's base models have. Keys of tokenizer_config.json can be changed; None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    text = _trained(num_pieces)
    model, added = json.loads(text)["model"], json.loads(text)["added_tokens"]
    values: dict[str, Any] = {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added
        },
        "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": END,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    values = {
        key: value for key, value in (values | config).items() if key in ("bos_token", "unk_token") or value is not None
    }
    contents = {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(values, indent=2),
        "vocab.json": json.dumps(model["vocab"], ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in model["merges"]),
        "chat_template.jinja": "{{ messages }}",
    }
    for name, content in contents.items():
        (directory / name).write_text(content, encoding="utf-8")
    return directory
