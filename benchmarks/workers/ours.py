"""One training step of our decoder's layers: forward, backward, AdamW. Also times a GEMM beside each step."""

from __future__ import annotations

import os
import sys
import time

from vha_paddle.host import prepare_process

prepare_process()
import numpy as np  # noqa: E402
import paddle  # noqa: E402
import shape  # noqa: E402
from harness import serve  # noqa: E402

from vha_paddle.host import set_compute_threads  # noqa: E402
from vha_paddle.model.decoder import build_decoder  # noqa: E402
from vha_paddle.parallel.mesh import Mesh  # noqa: E402
from vha_paddle.train.metrics import measured_gemm_rate  # noqa: E402


def main() -> None:
    name, with_gemm = sys.argv[1], "--gemm" in sys.argv
    threads = set_compute_threads()
    assert threads == len(os.sched_getaffinity(0))
    model = build_decoder(shape.model_config(name), Mesh(), seed=0)
    parameters = [p for p in model.parameters() if p is not model.embed_tokens.weight]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=parameters, weight_decay=0.1)
    x_BSD = paddle.to_tensor(
        np.random.default_rng(0).standard_normal((1, shape.SEQUENCE, shape.HIDDEN), dtype=np.float32)
    )

    def step() -> dict[str, float]:
        start = time.perf_counter()
        y_BSD = x_BSD
        for block in model.layers:
            y_BSD = block(y_BSD)
        model.norm(y_BSD).mean().backward()
        without_optimizer = time.perf_counter() - start
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        answer = {"seconds": time.perf_counter() - start, "forward_backward": without_optimizer}
        if with_gemm:
            answer["gemm_rate"] = measured_gemm_rate("float32", size=2048, seconds=1.0)
        return answer

    serve(step)


if __name__ == "__main__":
    main()
