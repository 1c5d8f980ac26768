"""Token ids on disk: Megatron's indexed dataset, `<prefix>.bin` and `<prefix>.idx`, with a manifest beside.

PaddleNLP, Megatron-LM and this project read and write the two files alike, byte for byte. The layout of .idx,
little-endian: 9 bytes of magic, u64 version 1, u8 code of the token type, u64 number of sequences n, u64 length of the
document index d, then i32 sizes[n] in tokens, i64 pointers[n] in bytes of .bin, i64 documents[d] (the first sequence of
each document, and n). The .bin is the tokens of all sequences, one after another. Here a document is one sequence.

`<prefix>.json` says what the two cannot: the vocabulary, the tokenizer and where the text came from. Data that was made
elsewhere may lack it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, length of the document index
# The two token types that hold a vocabulary and that Megatron-LM reads.
TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
UINT16_VOCABULARY = 65_536  # vocabularies below this are stored in 2 bytes a token


@dataclass(frozen=True)
class Manifest:
    """The content of `<prefix>.json`.

    Attributes:
        tokens: tokens in the .bin, end-of-document tokens included.
        documents: documents in the .idx.
        vocab_size: every token id is below it.
        eod_id: id that ends each document, or None.
        tokenizer_sha256: digest of the `tokenizer.model`, or None if it is unknown.
        bin_sha256: digest of the .bin, hexadecimal.
        source: where the text came from, for a reader.
    """

    tokens: int
    documents: int
    vocab_size: int
    eod_id: int | None
    tokenizer_sha256: str | None
    bin_sha256: str
    source: str

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest.

        Raises:
            UserError: it is no JSON object with exactly these keys and kinds of value.
        """
        kinds = {field.name: str(field.type) for field in fields(cls)}
        remedy = "prepare the data again"
        try:
            content: Any = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"manifest {path} cannot be read ({error}); {remedy}") from None
        if not isinstance(content, dict) or set(content) != set(kinds):
            raise UserError(f"manifest {path} must be an object with the keys {', '.join(kinds)}; {remedy}")
        for key, kind in kinds.items():
            if {int: "int", str: "str", type(None): "None"}.get(type(content[key])) not in kind.split(" | "):
                raise UserError(f"manifest {path}: {key} is {content[key]!r} and must be {kind}; {remedy}")
        return cls(**content)


def token_type(vocab_size: int) -> np.dtype[Any]:
    """How the ids of a vocabulary are stored: uint16 below 65,536, else int32."""
    return TOKEN_TYPES[8 if vocab_size < UINT16_VOCABULARY else 4]


def suffixed(prefix: Path, suffix: str) -> Path:
    """`prefix` plus `suffix`; a dot inside the prefix is part of the name."""
    return prefix.with_name(prefix.name + suffix)


def file_sha256(path: Path) -> str:
    """Digest of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
