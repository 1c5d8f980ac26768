"""One training step of a decoder's layers, argument `moe` or `dense`: forward, backward, AdamW."""

from __future__ import annotations

import sys
import time
from typing import Any

from vha_paddle.host import prepare_process

prepare_process()
import numpy as np  # noqa: E402
import paddle  # noqa: E402
from harness import serve  # noqa: E402

from vha_paddle.config import GroupedAttention, MixtureOfExperts, Model  # noqa: E402
from vha_paddle.host import set_compute_threads  # noqa: E402
from vha_paddle.model.decoder import build_decoder  # noqa: E402
from vha_paddle.parallel.mesh import Mesh  # noqa: E402

HIDDEN, SEQUENCE, BATCH = 512, 512, 8
EXPERTS = MixtureOfExperts(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256)
FEED_FORWARD: dict[str, dict[str, Any]] = {
    "moe": {"experts": EXPERTS},
    "dense": {"intermediate_size": EXPERTS.num_experts_per_tok * EXPERTS.moe_intermediate_size},
}


def main() -> None:
    set_compute_threads()
    config = Model(
        vocab_size=256,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        attention=GroupedAttention(kind="grouped", num_attention_heads=8, num_key_value_heads=2, head_dim=64),
        **FEED_FORWARD[sys.argv[1]],
    )
    model = build_decoder(config, Mesh(), seed=0)
    parameters = [p for p in model.parameters() if p is not model.embed_tokens.weight]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=parameters, weight_decay=0.1)
    x_BSD = paddle.to_tensor(np.random.default_rng(0).standard_normal((BATCH, SEQUENCE, HIDDEN), dtype=np.float32))

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

    serve(step)


if __name__ == "__main__":
    main()
