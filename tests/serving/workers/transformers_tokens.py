"""transformers, of whatever version runs this: float32, eager attention, with its own cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from job import Job, greedy_answer, serve
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(name: str, directory: str, job: Job) -> dict[str, Any]:
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, torch_dtype=torch.float32, attn_implementation="eager"
    )
    unfit = {key: list(value) for key, value in info.items() if value}
    if unfit:  # transformers itself would go on, with random values
        raise ValueError(f"tensors that do not fit: {unfit}")
    cache = None

    def next_logits(tokens: list[int]) -> Any:
        nonlocal cache
        with torch.no_grad():
            output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        return output.logits[0].numpy()

    return greedy_answer(next_logits, job, AutoTokenizer.from_pretrained(directory).encode(job["text"]))


if __name__ == "__main__":
    serve(f"transformers {transformers.__version__}", answer)
