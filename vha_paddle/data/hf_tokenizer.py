"""A Hugging Face tokenizer, such as Qwen3's, read by the `tokenizers` library from its `tokenizer.json`.

The file is data: a vocabulary, merges, and which of the library's own normalizers, splits and decoders to use. Nothing
of it is executed, and one that names code of its own (`auto_map`) is refused. The ids are those that transformers'
AutoTokenizer gives for plain text, with three rules for training data:

* TEXT THAT SPELLS A SPECIAL TOKEN IS TEXT. Qwen3's `<|endoftext|>` in a web page becomes seven ordinary ids, where a
  chat client would make one of it. Added tokens that are not special (`<think>`) are single ids on both sides.
* No begin token, no template, no truncation and no padding, whatever the file says.
* The end token of a document is `eos_token` of `tokenizer_config.json` (`<|endoftext|>` in Qwen3's base models,
  `<|im_end|>` in its chat models), or another that is asked for.

Decoding gives the text back as far as the tokenizer keeps it: Qwen's, for one, first brings it into Unicode's NFC.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from vha_paddle.data.tokenizer_files import HF_CONFIG_FILE, HF_FILE, HF_SPECIAL_FILE, tokenizer_files
from vha_paddle.data.word_cache import HF_WORDS, WordCache, hf_goes_by_words
from vha_paddle.errors import UserError

_MOST_IDS = 1 << 22  # several times the largest vocabulary in use
_MOST_GROWTH = 64  # of a text in the steps before or after the model; real tokenizers have one that lengthens
_LENGTHENING = {"ByteLevel": 2, "Precompiled": 18}  # a byte beyond ASCII as a character; U+FDFA in NFKC

GENERAL_CLASS = "PreTrainedTokenizerFast"
"""The class that reads any tokenizer.json, by the one name that transformers 4 and 5 both know."""


class HFTokenizer:
    """One `tokenizer.json` and what lies beside it.

    Attributes:
        vocab_size: one more than the largest id, added tokens included.
        bos_id: id of the begin token, or None.
        eos_id, eos_token: the end token, as id and as text.
        pad_id: id of the padding token; of the end token where there is none.
        digest: sha256 of tokenizer.json, hexadecimal; the other files do not change which text an id means.
        files: name to content of every file.
    """

    def __init__(self, files: Mapping[str, bytes], name: str = "tokenizer", eos_token: str | None = None) -> None:
        """Take the files of `tokenizer_files`; `name` is for error messages.

        With `eos_token` that is the end token; `files` then say so too, so that clients read the same.

        Raises:
            UserError: tokenizer.json is damaged or newer than the library, the files contradict each other or name
            code, or there is no end token that text cannot spell.
        """
        self.files, self._name = dict(files), name
        self.digest = hashlib.sha256(self.files[HF_FILE]).hexdigest()
        self._config = self._read_json(HF_CONFIG_FILE)
        self._special = self._read_json(HF_SPECIAL_FILE)
        self._check_ids()
        self._check_growth()
        if eos_token is not None:
            self._set_eos(eos_token)
        try:
            self._fast = tokenizers.Tokenizer.from_str(self.files[HF_FILE].decode())
        except BaseException as error:  # the library raises nothing more specific; its panics are no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())
            raise UserError(
                f"{name}: {HF_FILE} cannot be read by tokenizers {tokenizers.__version__} ({reason}); "
                "save it again with a release near that one"
            ) from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        self.vocab_size = 1 + max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1)
        self._refuse_code()
        self._check_added_tokens()
        self.eos_token, self.eos_id = self._end_token()
        self.bos_id = self._special_id("bos_token")
        pad_id = self._special_id("pad_token")
        self.pad_id = self.eos_id if pad_id is None else pad_id

    @classmethod
    def load(cls, path: Path, eos_token: str | None = None) -> HFTokenizer:
        """Read a `tokenizer.json` and the files beside it that belong to it; `eos_token` as in the constructor.

        Raises:
            UserError: a file cannot be read, or they are no tokenizer that this class accepts.
        """
        files = {}
        for file in tokenizer_files(path):
            try:
                files[file.name] = file.read_bytes()
            except OSError as error:
                raise UserError(f"tokenizer {file} cannot be read: {error.strerror}") from None
        return cls(files, f"tokenizer {path}", eos_token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin or end token.

        Raises:
            UserError: a pattern of tokenizer.json takes too long.
        """
        with self._patterns():
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them; faster, by words where that makes no difference."""
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        with self._patterns():
            return [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    @contextlib.contextmanager
    def _patterns(self) -> Iterator[None]:
        """The library gives up a regular expression that tries too many ways, by a panic, which is no Exception."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{self._name}: {HF_FILE} cannot be applied to a text ({reason}); use another") from None

    @cached_property
    def _words(self) -> WordCache | None:
        goes_by_words = hf_goes_by_words(json.loads(self._fast.to_str()))
        return WordCache(self.encode, HF_WORDS) if goes_by_words else None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens give nothing; bytes that form no UTF-8 character give U+FFFD."""
        text: str = self._fast.decode([int(token_id) for token_id in ids], skip_special_tokens=True)
        return text

    def _read_json(self, file: str) -> dict[str, Any]:
        """The object in a file; an empty one where the file is absent."""
        try:
            values = json.loads(self.files.get(file, b"{}"))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f"{self._name}: {file} does not hold a JSON object; it is damaged")
        return values

    def _set_eos(self, token: str) -> None:
        self._config = {"tokenizer_class": GENERAL_CLASS} | self._config | {"eos_token": token}
        self.files[HF_CONFIG_FILE] = as_json(self._config)
        if HF_SPECIAL_FILE in self.files:
            self._special |= {"eos_token": token}
            self.files[HF_SPECIAL_FILE] = as_json(self._special)

    def _check_ids(self) -> None:
        """The library allocates by the largest id of the file, and ends the process where that fails."""
        values = self._read_json(HF_FILE)
        model, added = values.get("model"), values.get("added_tokens")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
        ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        if not isinstance(added, list) or any(type(each) is not int or not 0 <= each < _MOST_IDS for each in ids):
            raise UserError(
                f"{self._name}: {HF_FILE} must give every token, and every one of its added_tokens, an id below "
                f"{_MOST_IDS}; it is damaged"
            )

    def _check_growth(self) -> None:
        """Steps that follow one another and each double a text are an attack: 40 of them are a terabyte."""
        values = self._read_json(HF_FILE)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (growth := _growth(values.get(part))) > _MOST_GROWTH:
                raise UserError(
                    f"{self._name}: {HF_FILE}: {part} can make a text {growth} times as long, and {_MOST_GROWTH} is "
                    "the most allowed; it is damaged"
                )

    def _refuse_code(self) -> None:
        if self._config.get("auto_map"):
            raise UserError(
                f"{self._name}: {HF_CONFIG_FILE}: auto_map={json.dumps(self._config['auto_map'])} names code, and none "
                f"is executed; where {HF_FILE} says all, remove the key"
            )

    def _check_added_tokens(self) -> None:
        """Added tokens must have the ids that the files state.

        The library numbers them anew where a file leaves a gap, and transformers adds those that only its own
        configuration names; either way the ids would not be the model's.
        """
        stated = {HF_FILE: {token["id"]: token for token in json.loads(self.files[HF_FILE])["added_tokens"]}}
        stated[HF_CONFIG_FILE] = self._config.get("added_tokens_decoder") or {}
        for file, tokens in stated.items():
            if not isinstance(tokens, dict):
                raise UserError(f"{self._name}: {file}: added_tokens_decoder must be an object; it is damaged")
            for token_id, token in tokens.items():
                text = _text(token)
                loaded = self._fast.token_to_id(text or "")
                if str(loaded) != str(token_id):
                    raise UserError(
                        f"{self._name}: {file} has added token {text!r} as {token_id}, tokenizers "
                        f"{tokenizers.__version__} makes it {loaded}; save the tokenizer again with transformers"
                    )

    def _special_id(self, key: str) -> int | None:
        """Id of a special token that the configuration names; None where it names none."""
        token = _text(self._config.get(key)) or _text(self._special.get(key))
        if token is None:
            return None
        token_id: int | None = self._fast.token_to_id(token)
        if token_id is None:
            raise UserError(f"{self._name}: {key}={token!r} is no token of {HF_FILE}; correct it")
        return token_id

    def _end_token(self) -> tuple[str, int]:
        eos_id = self._special_id("eos_token")
        if eos_id is None:
            raise UserError(
                f"{self._name}: neither {HF_CONFIG_FILE} nor {HF_SPECIAL_FILE} names an eos_token, which ends a "
                'document; add one, such as "eos_token": "<|endoftext|>", or prepare the data with --eod-token'
            )
        eos_token: str = self._fast.id_to_token(eos_id)
        if eos_id in self.encode(eos_token):
            raise UserError(
                f"{self._name}: eos_token={eos_token!r} is not a special token: text that spells it would end a "
                'document; give it "special": true in tokenizer.json, or use another'
            )
        return eos_token, eos_id


def as_json(values: Mapping[str, Any]) -> bytes:
    """JSON as the files of a tokenizer have it."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _growth(step: Any) -> int:
    """At most so many times as long is a text after a step, or a sequence of them."""
    if not isinstance(step, dict):
        return 1
    kind, content = step.get("type"), step.get("content")
    growth = _LENGTHENING.get(kind, 1) if isinstance(kind, str) else 1
    if kind == "Replace" and isinstance(content, str):
        growth = max(1, len(content))
    for inner in ("normalizers", "pretokenizers", "decoders"):
        for each in step[inner] if isinstance(step.get(inner), list) else []:
            growth *= _growth(each)
    return growth


def _text(token: Any) -> str | None:
    """A token's text: transformers writes the text alone, or an object that has it as its content."""
    content = token.get("content") if isinstance(token, dict) else token
    # half a surrogate pair, which JSON can spell, is in no vocabulary, and the library cannot be asked for it
    return content.encode(errors="backslashreplace").decode() if isinstance(content, str) else None
