"""The files of a tokenizer: a SentencePiece `tokenizer.model`, or a Hugging Face `tokenizer.json` and its companions.

Nothing is loaded here, so that what copies a tokenizer, or asks whether two are the same, needs no tokenizer library.
"""

from __future__ import annotations

from pathlib import Path

from vha_paddle.errors import UserError

SENTENCEPIECE_FILE = "tokenizer.model"
HF_FILE = "tokenizer.json"
HF_CONFIG_FILE, HF_SPECIAL_FILE = "tokenizer_config.json", "special_tokens_map.json"
# What clients read beside tokenizer.json. Of these only the first two say anything that is used here.
HF_COMPANIONS = (
    HF_CONFIG_FILE,
    HF_SPECIAL_FILE,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
IDENTIFYING_FILES = (SENTENCEPIECE_FILE, HF_FILE)
"""The file whose SHA-256 is a tokenizer's digest: it alone says which text an id means."""
TOKENIZER_FILES = (SENTENCEPIECE_FILE, HF_FILE, *HF_COMPANIONS)
"""Every name that a tokenizer's file can have in a data folder or checkpoint."""


def tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer, the identifying one first.

    Args:
        path: a SentencePiece model file of any name, a `tokenizer.json`, or a directory that holds one of the two. Of
            a directory with both, the SentencePiece model is meant, as in exports of this project: there
            `tokenizer.json` was made from it.

    Raises:
        UserError: there is no tokenizer at `path`.
    """
    if path.is_dir():
        for name in IDENTIFYING_FILES:
            if (path / name).is_file():
                return tokenizer_files(path / name)
        raise UserError(
            f"tokenizer {path}: a directory without {SENTENCEPIECE_FILE} and {HF_FILE}; a slow Hugging Face tokenizer "
            f"gets its {HF_FILE} from AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if path.name == HF_FILE:
        companions = (path.with_name(name) for name in HF_COMPANIONS)
        return [path, *(file for file in companions if file.is_file())]
    if path.suffix in (".json", ".txt", ".jinja"):
        raise UserError(f"tokenizer {path}: give a {SENTENCEPIECE_FILE}, a {HF_FILE} or the directory of one")
    return [path]


def stored_name(file: Path) -> str:
    """The name that a tokenizer's file gets in a data folder or checkpoint; a SentencePiece model may come with any."""
    return file.name if file.name in TOKENIZER_FILES else SENTENCEPIECE_FILE
