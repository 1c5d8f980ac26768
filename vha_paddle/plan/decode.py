"""A decoder step: what it reads, and the most tokens per second that a GPU can give.

Every step reads the weights once for the whole batch and each sequence's cache:

    bytes per token   = (weights + batch * cache(context)) / batch
    tokens per second <= batch / max(bytes / bandwidth, FLOPs / peak)

An upper bound: kernels reach less of both, activations and the launch of kernels are left out, and one GPU holds
everything. Of experts a step reads those that its batch reaches, E (1 - (1 - k/E)^batch) of E if routing is even.
"""

from __future__ import annotations

from dataclasses import dataclass

from vha_paddle.config import Model
from vha_paddle.counts import BYTES, Dtype, FlopRule, cache_bytes, folded, forward_flops, parameters, weights_read
from vha_paddle.errors import UserError
from vha_paddle.plan.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One step of `batch` sequences that have `context` tokens each, of the model as served."""

    batch: int
    context: int
    weights_read: float
    """Bytes of weights that a step reads: layers, the experts reached, the head, and a row of the embedding a token."""
    cache_read: int
    """Bytes of all sequences' caches."""
    resident: int
    """Bytes of all weights and all caches."""
    flops: int
    """Of the step."""
    gpu: Gpu

    @property
    def bytes_per_token(self) -> float:
        return (self.weights_read + self.cache_read) / self.batch

    @property
    def cache_share(self) -> float:
        """Of the bytes read."""
        return self.cache_read / (self.weights_read + self.cache_read)

    @property
    def intensity(self) -> float:
        """FLOPs per byte read."""
        return self.flops / (self.weights_read + self.cache_read)

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which the GPU's memory and its products take as long."""
        return self.gpu.bf16_flops / self.gpu.memory_bandwidth

    @property
    def limit(self) -> str:
        """What bounds the step."""
        return "memory" if self.intensity < self.ridge else "compute"

    @property
    def tokens_per_second(self) -> float:
        """Upper bound, over the whole batch."""
        memory = (self.weights_read + self.cache_read) / self.gpu.memory_bandwidth
        return self.batch / max(memory, self.flops / self.gpu.bf16_flops)

    @property
    def fits(self) -> bool:
        """Whether weights and caches are within the GPU's memory."""
        return self.resident <= self.gpu.memory


def decode(model: Model, batch: int, context: int, gpu: Gpu, dtype: Dtype = "bfloat16") -> Decode:
    """A step of the served model. Raises `UserError` for a batch or a context below 1."""
    for name, value in (("--batch", batch), ("--context", context)):
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    served = folded(model)
    cache = batch * cache_bytes(served, context, dtype)
    rule = FlopRule(sequence_length=context, absorbed=True)
    return Decode(
        batch=batch,
        context=context,
        weights_read=weights_read(served, batch, dtype),
        cache_read=cache,
        resident=BYTES[dtype] * parameters(served).total + cache,
        flops=batch * forward_flops(served, rule),
        gpu=gpu,
    )


def values(found: Decode) -> dict[str, int | float | str | bool]:
    """For JSON and for the table; keys carry their units."""
    return {
        "batch": found.batch,
        "context_tokens": found.context,
        "weight_bytes_per_step": round(found.weights_read),
        "cache_bytes_per_step": found.cache_read,
        "bytes_per_token": round(found.bytes_per_token),
        "cache_share_of_bytes": found.cache_share,
        "flops_per_token": found.flops // found.batch,
        "flops_per_byte": found.intensity,
        "gpu": found.gpu.name,
        "gpu_flops_per_byte": found.ridge,
        "limited_by": found.limit,
        "tokens_per_second_at_most": found.tokens_per_second,
        "tokens_per_second_and_sequence_at_most": found.tokens_per_second / found.batch,
        "resident_bytes": found.resident,
        "fits_one_gpu": found.fits,
    }
