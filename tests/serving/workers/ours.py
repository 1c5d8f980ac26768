"""This package: `generate`, the cached decoder on an export, or `checkpoint`, the unfolded model on whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from job import Job, greedy_answer, serve

import vha_paddle
from vha_paddle.host import prepare_process


def generate(name: str, directory: str, job: Job) -> dict[str, Any]:
    from vha_paddle.generate.model import TextModel

    loaded = TextModel.load(Path(directory))
    decoder = loaded.decoder(len(job["tokens"]), job["num_new"])

    def next_logits(tokens: list[int]) -> Any:
        """The first token as the prompt, every other in a step of its own, on the cache."""
        return np.concatenate([decoder.read([[token]]) for token in tokens])

    return greedy_answer(next_logits, job, loaded.encode(job["text"]))


def checkpoint(name: str, directory: str, job: Job) -> dict[str, Any]:
    from vha_paddle.evaluate import model_logits

    logits, seen = model_logits(Path(directory)), []

    def next_logits(tokens: list[int]) -> Any:
        seen.extend(tokens)
        return logits(np.array([seen]))[0, -len(tokens) :]

    return greedy_answer(next_logits, job, None)


if __name__ == "__main__":
    prepare_process()
    forms = {"generate": generate, "checkpoint": checkpoint}
    serve(
        f"vha_paddle {vha_paddle.__version__}", lambda name, path, job: forms[job["options"]["form"]](name, path, job)
    )
