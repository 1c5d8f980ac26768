"""The GPUs a plan can be made for."""

from __future__ import annotations

from dataclasses import dataclass

from vha_paddle.errors import UserError

GPUS_PER_NODE = 8
"""GPUs that NVLink joins in the machines these GPUs are sold in (HGX and DGX boards)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    bf16_flops: float
    """Peak of dense bfloat16 products, per second."""
    fp8_flops: float | None
    """Peak of dense FP8 products, per second; None has no FP8."""
    memory: int
    """Bytes. The data sheet's figure in decimal units: what a process can use is never less."""
    memory_bandwidth: float
    """Bytes per second between the GPU and its memory."""
    nvlink: float
    """Bytes per second that a GPU sends to the others of its node; the data sheets print both directions together."""
    network: float
    """Bytes per second that a GPU sends to other nodes. Assumed: one InfiniBand port each, 400 Gb/s, A100 200 Gb/s."""
    source: str


_SHEET = "NVIDIA {} data sheet: dense is half of the figure printed with sparsity"
GPUS = {
    "h800": Gpu(
        name="H800 SXM 80 GB",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory=80 * 10**9,
        memory_bandwidth=3350e9,
        nvlink=200e9,
        network=50e9,
        source=_SHEET.format("H100 SXM") + "; the H800 differs in NVLink, cut from 900 to 400 GB/s, and in FP64",
    ),
    "h100": Gpu(
        name="H100 SXM 80 GB",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory=80 * 10**9,
        memory_bandwidth=3350e9,
        nvlink=450e9,
        network=50e9,
        source=_SHEET.format("H100 SXM"),
    ),
    "h200": Gpu(
        name="H200 SXM 141 GB",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory=141 * 10**9,
        memory_bandwidth=4800e9,
        nvlink=450e9,
        network=50e9,
        source=_SHEET.format("H200 SXM"),
    ),
    "a100": Gpu(
        name="A100 SXM 80 GB",
        bf16_flops=312e12,
        fp8_flops=None,
        memory=80 * 10**9,
        memory_bandwidth=2039e9,
        nvlink=300e9,
        network=25e9,
        source=_SHEET.format("A100 SXM"),
    ),
}


def gpu_named(name: str) -> Gpu:
    """Raises `UserError` for a GPU that is not in the table."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UserError(f"--gpu {name}: no such GPU in the table; use {', '.join(GPUS)}")
    return gpu
