"""What a run takes of its machines: the share of their peak that it reaches, memory, and time in communication."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from vha_paddle.config import Recipe
from vha_paddle.counts import FlopRule, training_flops
from vha_paddle.parallel.gloo_channels import seconds_in_messages
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.plan.gpus import GPUS, Gpu

GEMM_SIZE_CPU, GEMM_SIZE_GPU = 512, 8192
"""Of the measured matrices. On a CPU a product takes a few milliseconds, so that among many some are not interrupted by
other processes; on a GPU one of 1024 rows would be over before its launch is."""
_KEYS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H800": "h800",
}
"""Names of devices, as their drivers give them, and the GPUs of the table that they are; the boards without NVLink
(PCIe, NVL) have other names and other peaks."""


@dataclass(frozen=True)
class Peaks:
    """Tokens per second at which all ranks would do nothing but the model's FLOPs."""

    measured: float
    """At the rate of a GEMM measured on the main rank."""
    stated: float | None
    """At the dense bfloat16 peak of the data sheet; None for a device that is not in the table."""

    def shares(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOPs utilisation, as records have it."""
        shares = {"mfu": tokens_per_second / self.measured}
        return shares if self.stated is None else shares | {"mfu_of_peak": tokens_per_second / self.stated}


def peaks_of(recipe: Recipe, num_ranks: int) -> Peaks:
    """The peaks of the ranks that train a recipe; takes a moment, in which the device should have nothing to do."""
    # causal: MFU counts only the scores that the mask keeps
    flops = training_flops(recipe.model, FlopRule(sequence_length=recipe.data.sequence_length, causal=True))
    gpu, size = None, GEMM_SIZE_CPU
    if paddle.device.get_device() != "cpu":  # not run on a GPU in this project's tests
        gpu, size = gpu_of(paddle.device.cuda.get_device_name()), GEMM_SIZE_GPU
    measured = measured_gemm_rate(recipe.precision.compute, size) * num_ranks / flops
    return Peaks(measured, None if gpu is None else gpu.bf16_flops * num_ranks / flops)


def gpu_of(device: str) -> Gpu | None:
    """The GPU that a device of this name is, or None."""
    return GPUS[_KEYS[device]] if device in _KEYS else None


def measured_gemm_rate(dtype: str, size: int, seconds: float = 0.3) -> float:
    """FLOP/s of a GEMM on this process's device and threads, the fastest of many: the ceiling that MFU is measured
    against, and on a shared machine not the average of its neighbours' work."""
    left, right = paddle.rand([size, size]).astype(dtype), paddle.rand([size, size]).astype(dtype)

    def wait_for(product: paddle.Tensor) -> None:
        product[0, 0].item()

    wait_for(paddle.matmul(left, right))
    fastest, end = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        wait_for(paddle.matmul(left, right))
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


class Usage:
    """What each record says of memory and communication; every rank holds one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counted = seconds_in_messages() or 0.0

    def record(self, with_memory: bool) -> dict[str, Any]:
        """The part of a record. Every rank calls it, all with the same `with_memory`, which takes a collective."""
        record: dict[str, Any] = {}
        seconds = seconds_in_messages()
        if seconds is not None:
            record["communication_seconds"] = round(seconds - self._counted, 6)
            self._counted = seconds
        if with_memory:
            peaks = peak_memory()
            largest = self._mesh.max_over_ranks(list(peaks.values()))
            record["memory"] = {name: int(size) for name, size in zip(peaks, largest, strict=True)}
        return record


def peak_memory() -> dict[str, int]:
    """The most bytes that this process has held so far: on a GPU what Paddle gave to tensors (`allocated`) and took
    for it (`reserved`), on a CPU its resident memory."""
    if paddle.device.get_device() != "cpu":  # not run on a GPU in this project's tests
        return {
            "allocated": paddle.device.cuda.max_memory_allocated(),
            "reserved": paddle.device.cuda.max_memory_reserved(),
        }
    # not getrusage's figure, which a process inherits from the one that started it
    found = re.search(r"^VmHWM:\s+([0-9]+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "Linux has it"
    return {"resident": int(found[1]) * 1024}
