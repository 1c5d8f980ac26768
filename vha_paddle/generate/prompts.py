"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from vha_paddle.errors import UserError


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: of a `.jsonl` file the string `prompt` of each object, of any other file the line itself.

    Raises:
        UserError: the file cannot be read, or it has no line; a line is empty, or no object with a prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a UTF-8 file with a prompt on each line") from None
    lines = text.removesuffix("\n").split("\n")  # no other character ends a line: JSON may hold them
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise UserError(f"{path}: line {number} is empty; each line must be a prompt")
        prompts.append(_prompt_of(line, f"{path}: line {number}") if path.suffix == ".jsonl" else line)
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(
            f'{where} is no JSON ({error}); each line must be an object like {{"prompt": "text"}}'
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise UserError(f'{where} has no string "prompt"; each line must be an object like {{"prompt": "text"}}')
    prompt: str = value["prompt"]
    return prompt
