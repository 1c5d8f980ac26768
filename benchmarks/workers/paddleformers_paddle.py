"""One training step of PaddleFormers' pure-Paddle Qwen3 layers: forward, backward, AdamW.

PaddleFormers imports paddlefleet, which is not published for CPU; inert stand-ins let its pure-Paddle classes load.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
from vha_paddle.host import prepare_process  # noqa: E402

prepare_process()  # the peer gets the same GEMM kernels
import paddle  # noqa: E402
import shape  # noqa: E402
from harness import serve  # noqa: E402

_ENUMERATIONS = {"ModelType"}  # their members are read when classes are made


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ENUMERATIONS:
            return mock.MagicMock(name=name)
        return type(name, (), {})  # an empty class: it may be subclassed and is never used


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ("paddlefleet", "paddlefleet_ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> None:
    sys.meta_path.insert(0, _Finder())
    from paddleformers.utils import import_utils

    import_utils.is_paddlefleet_available = lambda: True
    from paddleformers.transformers.qwen3 import modeling
    from paddleformers.transformers.qwen3.configuration import Qwen3Config

    config = Qwen3Config(**shape.hf_config_values())
    config.fuse_rms_norm = False
    config._attn_implementation = "eager"
    model = modeling.Qwen3ForCausalLMDeprecated(config).model
    model.train()
    parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=parameters, weight_decay=0.1)
    x_BSD = paddle.randn([1, shape.SEQUENCE, shape.HIDDEN])

    def step() -> dict[str, float]:
        start = time.perf_counter()
        output = model(inputs_embeds=x_BSD)
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        hidden.mean().backward()
        without_optimizer = time.perf_counter() - start
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        return {"seconds": time.perf_counter() - start, "forward_backward": without_optimizer}

    serve(step)


if __name__ == "__main__":
    main()
