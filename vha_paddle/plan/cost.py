"""A layout on a GPU: does it fit, how long does a step take. Times are estimates at a utilisation that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vha_paddle.config import Recipe, VirtualHeadAttention
from vha_paddle.counts import FlopRule, forward_flops_by_part, training_flops
from vha_paddle.errors import UserError
from vha_paddle.plan.communication import Transfer, transfers
from vha_paddle.plan.gpus import GPUS_PER_NODE, Gpu
from vha_paddle.plan.memory import RESERVE, RankMemory, all_ranks, best, worst
from vha_paddle.plan.schedule import Schedule, schedule_of
from vha_paddle.plan.stages import owned_sizes

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe's layout on a GPU."""

    recipe: Recipe
    gpu: Gpu
    mfu: float
    """Share of the peak that a GPU reaches in model FLOPs while it neither waits for a stage nor recomputes."""
    ranks: tuple[RankMemory, ...]
    stage: int
    """The pipeline stage that communicates longest."""
    transfers: tuple[Transfer, ...]
    """What the sharding rank of it communicates that owns most."""
    schedule: Schedule

    @property
    def worst(self) -> RankMemory:
        return worst(self.ranks)

    @property
    def best(self) -> RankMemory:
        return best(self.ranks)

    @property
    def usable_memory(self) -> int:
        return int(self.gpu.memory * (1 - RESERVE))

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.usable_memory

    @property
    def flops_per_token(self) -> int:
        """Of training, causal scores counted once: the rule by which the trainer reports its MFU."""
        return training_flops(self.recipe.model, _rule(self.recipe))

    @property
    def recomputed(self) -> float:
        """FLOPs run again in backward, as a share of the model's."""
        return recomputed_flops(self.recipe) / self.flops_per_token

    @property
    def step_seconds(self) -> float:
        peak = self.recipe.num_ranks * self.gpu.bf16_flops
        busy = self.flops_per_token * self.recipe.tokens_per_step / (peak * self.mfu)
        return busy * (1 + self.recomputed) / (1 - self.schedule.bubble)

    @property
    def overall_mfu(self) -> float:
        """Model FLOPs over the peak of all GPUs for the time that the step takes."""
        return self.mfu * (1 - self.schedule.bubble) / (1 + self.recomputed)

    @property
    def communication_seconds(self) -> float:
        """Ring bytes over the bandwidth of the slowest link they cross, nothing overlapped."""
        return _seconds(self.transfers, self.recipe, self.gpu)

    @property
    def days(self) -> float:
        return self.recipe.num_steps * self.step_seconds / SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        return 24 * self.days * self.recipe.num_ranks

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.recipe.tokens_per_step / self.step_seconds / self.recipe.num_ranks


def make_plan(recipe: Recipe, gpu: Gpu, mfu: float) -> Plan:
    """Raises `UserError` for an impossible utilisation or pipeline."""
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: must be above 0 and at most 1; large models reach 0.35 to 0.5")
    owned = [owned_sizes(recipe.model, recipe.parallel, stage) for stage in range(recipe.parallel.pipeline)]
    by_stage = [transfers(recipe, stage, sizes.index(max(sizes))) for stage, sizes in enumerate(owned)]
    stage = max(range(len(by_stage)), key=lambda stage: _seconds(by_stage[stage], recipe, gpu))
    return Plan(
        recipe=recipe,
        gpu=gpu,
        mfu=mfu,
        ranks=tuple(all_ranks(recipe)),
        stage=stage,
        transfers=tuple(by_stage[stage]),
        schedule=schedule_of(recipe.parallel, recipe.num_microbatches),
    )


def recomputed_flops(recipe: Recipe) -> int:
    """FLOPs per token that `memory.recompute` runs again."""
    mode, parts = recipe.memory.recompute, forward_flops_by_part(recipe.model, _rule(recipe))
    if mode == "none":
        return 0
    if mode == "full":
        return sum(parts.values()) - parts["lm_head"]
    attention = recipe.model.attention
    if not isinstance(attention, VirtualHeadAttention):
        return parts["scores"]
    postmix = parts["postmix"] if attention.postmix_space == "activation" else 0
    return parts["scores"] + parts["premix"] + postmix


def _rule(recipe: Recipe) -> FlopRule:
    return FlopRule(sequence_length=recipe.data.sequence_length, causal=True)


def crosses_nodes(recipe: Recipe, axis: str) -> bool:
    """Whether a group of an axis spans nodes, with ranks numbered in the order below."""
    span = 1
    for name in ("tensor", "context", "sharding", "pipeline", "data"):
        span *= getattr(recipe.parallel, name)
        if name == axis:
            return span > GPUS_PER_NODE
    raise AssertionError(f"no axis {axis}")


def _seconds(transfers: Sequence[Transfer], recipe: Recipe, gpu: Gpu) -> float:
    def bandwidth(axis: str) -> float:
        return gpu.network if crosses_nodes(recipe, axis) else gpu.nvlink

    return sum(transfer.ring / bandwidth(transfer.axis) for transfer in transfers)
