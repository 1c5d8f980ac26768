"""One training step of transformers' Qwen3 layers on torch: forward, backward, AdamW."""

from __future__ import annotations

import os
import time

import shape
import torch
from harness import serve
from transformers import Qwen3Config, Qwen3Model


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**shape.hf_config_values(), attn_implementation="sdpa")).train()
    parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)
    x_BSD = torch.randn(1, shape.SEQUENCE, shape.HIDDEN)

    def step() -> dict[str, float]:
        start = time.perf_counter()
        model(inputs_embeds=x_BSD).last_hidden_state.mean().backward()
        without_optimizer = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"seconds": time.perf_counter() - start, "forward_backward": without_optimizer}

    serve(step)


if __name__ == "__main__":
    main()
