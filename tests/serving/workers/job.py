"""What every worker is asked and what it answers: JSON files, named on its command line.

The job: `models` (name: directory), `tokens` (the prompt), `num_new` (tokens to add greedily), `text` (to encode),
`options` (of the client). The answer, for each model: `prompt` (log-probability of every prompt token but the first),
`greedy` (the new tokens), `greedy_logprobs` (theirs), `text_tokens` (null where it has no
tokenizer); or `error`, where the client refuses the model.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Job = dict[str, Any]


def serve(version: str, answer: Callable[[str, str, Job], dict[str, Any]]) -> None:
    """Read the job, call `answer(name, directory, job)` for every model, write what it gives."""
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    models = {}
    for name, directory in job["models"].items():
        try:
            models[name] = answer(name, directory, job)
        except Exception as error:  # whatever a client raises where it cannot serve a model
            traceback.print_exc()
            models[name] = {"error": f"{type(error).__name__}: {error}"}
    answer_file.write_text(json.dumps({"version": version, "models": models}))


def log_softmax(logits_SV: Any) -> np.ndarray:
    logits_SV = np.asarray(logits_SV, np.float64)
    below_SV = logits_SV - logits_SV.max(-1, keepdims=True)
    return below_SV - np.log(np.exp(below_SV).sum(-1, keepdims=True))


def greedy_answer(next_logits: Callable[[list[int]], Any], job: Job, text_tokens: list[int] | None) -> dict[str, Any]:
    """The answer of a client that gives logits `[S, V]`, for every token that it is given after those before."""
    tokens = job["tokens"]
    logprobs_SV = log_softmax(next_logits(tokens))
    prompt = [float(logprobs_SV[at, token]) for at, token in enumerate(tokens[1:])]
    greedy: list[int] = []
    greedy_logprobs: list[float] = []
    for _ in range(job["num_new"]):
        token = int(logprobs_SV[-1].argmax())
        greedy.append(token)
        greedy_logprobs.append(float(logprobs_SV[-1, token]))
        logprobs_SV = log_softmax(next_logits([token]))
    return {"prompt": prompt, "greedy": greedy, "greedy_logprobs": greedy_logprobs, "text_tokens": text_tokens}
