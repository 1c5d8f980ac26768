"""One training step of our decoder's layers: forward, backward, AdamW. Also times a GEMM beside each step."""

from __future__ import annotations

import os
import sys

from vha_paddle.host import prepare_process

prepare_process()
import shape  # noqa: E402
from harness import serve  # noqa: E402
from layer_step import layer_step  # noqa: E402

from vha_paddle.host import set_compute_threads  # noqa: E402
from vha_paddle.model.decoder import build_decoder  # noqa: E402
from vha_paddle.parallel.mesh import Mesh  # noqa: E402
from vha_paddle.train.usage import measured_gemm_rate  # noqa: E402


def main() -> None:
    name, with_gemm = sys.argv[1], "--gemm" in sys.argv
    threads = set_compute_threads()
    assert threads == len(os.sched_getaffinity(0))
    model = build_decoder(shape.model_config(name), Mesh(), seed=0)
    step = layer_step(model, (1, shape.SEQUENCE, shape.HIDDEN))

    def answer() -> dict[str, float]:
        figures = step()
        if with_gemm:
            figures["gemm_rate"] = measured_gemm_rate("float32", size=2048, seconds=1.0)
        return figures

    serve(answer)


if __name__ == "__main__":
    main()
