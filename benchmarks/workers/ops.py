"""The operations of one decoder layer, each forward and backward alone; argument: ours, paddle or torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from vha_paddle.host import prepare_process

prepare_process()
import numpy as np  # noqa: E402
import shape  # noqa: E402
from harness import serve  # noqa: E402

S, D, H, N, F = shape.SEQUENCE, shape.HIDDEN, shape.HEAD_DIM, shape.QUERY_HEADS, shape.INTERMEDIATE
VOCAB = 4096
EPS, THETA = 1e-6, 1e6
# name: shapes of the inputs, in the layout of Paddle ([B, S, heads, H])
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ((1, S, D), (D,)),
    "rms_norm of heads": ((1, S, N, H), (H,)),
    "rope": ((1, S, N, H),),
    "attention, 8 KV heads": ((1, S, N, H), (1, S, 8, H), (1, S, 8, H)),
    "attention, 2 KV heads": ((1, S, N, H), (1, S, 2, H), (1, S, 2, H)),
    "swiglu": ((1, S, F), (1, S, F)),
    "cross_entropy": ((1, S, VOCAB),),
}
LABELS = np.random.default_rng(0).integers(0, VOCAB, (1, S))
Operations = dict[str, Callable[..., Any]]


def ours() -> Operations:
    import paddle

    from vha_paddle.ops.attention import causal_attention
    from vha_paddle.ops.loss import cross_entropy
    from vha_paddle.ops.norm import rms_norm
    from vha_paddle.ops.rope import apply_rope, rope_tables
    from vha_paddle.ops.swiglu import swiglu

    tables, labels = rope_tables(H, THETA, S, "float32"), paddle.to_tensor(LABELS)
    operations = [
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: rms_norm(x, w, EPS),
        lambda x: apply_rope(x, *tables),
        causal_attention,
        causal_attention,
        swiglu,
        lambda x: cross_entropy(x, labels),
    ]
    return dict(zip(SHAPES, operations, strict=True))


def paddle_operations() -> Operations:
    import paddle
    import paddle.nn.functional as P

    from vha_paddle.ops.rope import rope_tables

    cos_S1H, sin_S1H = (x.unsqueeze(1) for x in rope_tables(H, THETA, S, "float32"))
    labels = paddle.to_tensor(LABELS).unsqueeze(-1)

    def norm(x: Any, weight: Any) -> Any:
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    def rope(x: Any) -> Any:
        first, second = x.chunk(2, axis=-1)
        return x * cos_S1H + paddle.concat([-second, first], axis=-1) * sin_S1H

    def attention(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(N // x.shape[2], axis=2) for x in (k, v))
        return P.scaled_dot_product_attention(q, k, v, is_causal=True)

    operations = [norm, norm, rope, attention, attention, P.swiglu]
    operations.append(lambda x: P.cross_entropy(x, labels, reduction="none"))
    return dict(zip(SHAPES, operations, strict=True))


def torch_operations() -> Operations:
    import torch
    import torch.nn.functional as T
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    def norm(x: Any, weight: Any) -> Any:
        layer = layers[weight.shape[0]]
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return T.scaled_dot_product_attention(
            q.transpose(1, 2), qwen3.repeat_kv(k.transpose(1, 2), N // k.shape[2]),
            qwen3.repeat_kv(v.transpose(1, 2), N // v.shape[2]), is_causal=True,
        )  # fmt: skip

    def rope(x: Any) -> Any:
        return x * cos + qwen3.rotate_half(x) * sin

    layers = {size: qwen3.Qwen3RMSNorm(size, EPS) for size in (D, H)}
    cos, sin = torch.randn(S, 1, H), torch.randn(S, 1, H)
    labels = torch.from_numpy(LABELS)[0]
    operations = [norm, norm, rope, attention, attention, lambda gate, up: T.silu(gate) * up]
    operations.append(lambda x: T.cross_entropy(x[0], labels, reduction="none"))
    return dict(zip(SHAPES, operations, strict=True))


def main() -> None:
    kind = sys.argv[1]
    rng = np.random.default_rng(0)
    random = {name: [rng.standard_normal(s, dtype=np.float32) for s in shapes] for name, shapes in SHAPES.items()}
    if kind == "torch":
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        operations = torch_operations()
        inputs = {name: [torch.tensor(x, requires_grad=True) for x in xs] for name, xs in random.items()}
        like = torch.ones_like
    else:
        import paddle

        from vha_paddle.host import set_compute_threads

        set_compute_threads()
        operations = ours() if kind == "ours" else paddle_operations()
        inputs = {n: [paddle.to_tensor(x, stop_gradient=False) for x in xs] for n, xs in random.items()}
        like = paddle.ones_like

    def step() -> dict[str, float]:
        answer = {}
        for name, operation in operations.items():
            start = time.perf_counter()
            output = operation(*inputs[name])
            between = time.perf_counter()
            gradient = like(output)
            resumed = time.perf_counter()
            output.backward(gradient)
            answer[name] = between - start + time.perf_counter() - resumed
            for x in inputs[name]:
                x.grad = None
        return answer | {"seconds": sum(answer.values())}

    serve(step)


if __name__ == "__main__":
    main()
