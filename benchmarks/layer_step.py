"""One training step of a decoder's layers, as workers time it: forward, backward, AdamW, without embedding and head."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import paddle

from vha_paddle.model.decoder import Decoder


def layer_step(model: Decoder, shape_BSD: tuple[int, int, int]) -> Callable[[], dict[str, float]]:
    """A function that takes a step on random inputs and answers with its seconds."""
    parameters = [p for p in model.parameters() if p is not model.embed_tokens.weight]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=parameters, weight_decay=0.1)
    x_BSD = paddle.to_tensor(np.random.default_rng(0).standard_normal(shape_BSD, dtype=np.float32))

    def step() -> dict[str, float]:
        start = time.perf_counter()
        y_BSD = x_BSD
        for block in model.layers:
            y_BSD = block(y_BSD)
        model.norm(y_BSD).mean().backward()
        forward_backward = time.perf_counter() - start
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        if model.balance is not None:
            model.balance.finish_step()
        return {"seconds": time.perf_counter() - start, "forward_backward": forward_backward}

    return step
