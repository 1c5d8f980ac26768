"""One training step of a decoder's layers, argument `moe` or `dense`: forward, backward, AdamW."""

from __future__ import annotations

import sys
from typing import Any

from vha_paddle.host import prepare_process

prepare_process()
from harness import serve  # noqa: E402
from layer_step import layer_step  # noqa: E402

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
    serve(layer_step(model, (BATCH, SEQUENCE, HIDDEN)))


if __name__ == "__main__":
    main()
