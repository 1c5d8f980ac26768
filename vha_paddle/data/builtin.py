"""The built-in corpus as a data folder, made by whichever process needs it first."""

from __future__ import annotations

import fcntl
from pathlib import Path

from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.tokenizer_files import SENTENCEPIECE_FILE
from vha_paddle.errors import UserError

VALIDATION_FRACTION = 0.05


def ensure_builtin_data(folder: Path, vocab_size: int) -> None:
    """Make `folder` of the running CPython's documentation unless it is there: a few seconds, 4 MB.

    The folder appears whole. Several ranks may ask for it at once: one makes it, the others wait for that one.

    Raises:
        UserError: the folder's parent cannot be written.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "w", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # released when the file is closed
            if not (folder / SENTENCEPIECE_FILE).is_file():
                _make(folder, vocab_size)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); run where it can be") from None


def _make(folder: Path, vocab_size: int) -> None:
    plan = Plan(
        out=folder,
        inputs=None,
        tokenizer=None,
        train_vocab_size=vocab_size,
        validation_fraction=VALIDATION_FRACTION,
        overwrite=False,
    )
    prepare(plan)
