"""A layout on a GPU: does it fit, how long does a step take. Times are estimates at a utilisation that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vha_paddle.config import Recipe, VirtualHeadAttention
from vha_paddle.counts import TRAINING_OVER_FORWARD, FlopRule, forward_flops_by_part, training_flops
from vha_paddle.errors import UserError
from vha_paddle.plan.communication import Transfer, transfers
from vha_paddle.plan.gpus import GPUS_PER_NODE, Gpu
from vha_paddle.plan.memory import RESERVE, RankMemory, all_ranks, best, worst
from vha_paddle.plan.schedule import Schedule, schedule_of
from vha_paddle.plan.stages import owned_sizes

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A run whose optimizer steps take this long."""

    recipe: Recipe
    step_seconds: float

    @property
    def days(self) -> float:
        return self.recipe.num_steps * self.step_seconds / SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        return 24 * self.days * self.recipe.num_ranks

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.recipe.tokens_per_step / self.step_seconds / self.recipe.num_ranks

    def mfu(self, gpu: Gpu) -> float:
        """Model FLOPs over the bfloat16 peak of all GPUs for the time that the steps take."""
        flops = training_flops(self.recipe.model, _rule(self.recipe))
        return flops * self.tokens_per_second_per_gpu / gpu.bf16_flops


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
        """What is rounded to FP8 runs at that peak, the rest at bfloat16's."""
        slow, fast = _flops_by_precision(self.recipe)
        seconds = slow / self.gpu.bf16_flops + (fast / self.gpu.fp8_flops if self.gpu.fp8_flops else 0.0)
        busy = seconds * self.recipe.tokens_per_step / (self.recipe.num_ranks * self.mfu)
        return busy / (1 - self.schedule.bubble)

    @property
    def communication_seconds(self) -> float:
        """Ring bytes over the bandwidth of the slowest link they cross, nothing overlapped."""
        return _seconds(self.transfers, self.recipe, self.gpu)

    @property
    def stated(self) -> Pace:
        """At the stated utilisation, all communication within it."""
        return Pace(recipe=self.recipe, step_seconds=self.step_seconds)

    @property
    def with_communication(self) -> Pace:
        """With all communication added, none of it overlapped: the trainer overlaps none."""
        return Pace(recipe=self.recipe, step_seconds=self.step_seconds + self.communication_seconds)


def make_plan(recipe: Recipe, gpu: Gpu, mfu: float) -> Plan:
    """Raises `UserError` for an impossible utilisation or pipeline, or FP8 on a GPU that has none."""
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: must be above 0 and at most 1; large models reach 0.35 to 0.5")
    if recipe.precision.fp8 != "none" and gpu.fp8_flops is None:
        raise UserError(f"precision.fp8={recipe.precision.fp8}: {gpu.name} has no FP8; use none or another --gpu")
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
    return sum(_recomputed(recipe).values())


def _recomputed(recipe: Recipe) -> dict[str, int]:
    """The parts of a forward pass that run again in backward."""
    mode, parts = recipe.memory.recompute, forward_flops_by_part(recipe.model, _rule(recipe))
    if mode == "none":
        return {}
    if mode == "full":
        return {part: flops for part, flops in parts.items() if part != "lm_head"}
    inside = {"scores", "composition", "compose_factors", "key_map", "kv_b_proj", "premix"}
    spaces = {one.postmix_space for one in recipe.model.attentions if isinstance(one, VirtualHeadAttention)}
    if "activation" in spaces:
        inside.add("postmix")
    return {part: flops for part, flops in parts.items() if part in inside}


def _flops_by_precision(recipe: Recipe) -> tuple[int, int]:
    """FLOPs per token of a step, recomputed ones included: in the compute dtype, and rounded to FP8."""
    again = _recomputed(recipe)
    slow = fast = 0
    for part, forward in forward_flops_by_part(recipe.model, _rule(recipe)).items():
        flops = TRAINING_OVER_FORWARD * forward + again.get(part, 0)
        if _is_fp8(part, recipe.precision.fp8):
            fast += flops
        else:
            slow += flops
    return slow, fast


def _is_fp8(part: str, fp8: str) -> bool:
    """Projections and feed-forward under `all`; head, router, scores, and the maps of VHA and DCMHA never."""
    if fp8 != "all":
        return fp8 == "experts" and part == "experts"
    is_projection = part.endswith(("_proj", "_with_mqa")) and part not in ("compose_proj", "diagonal_proj")
    return is_projection or part in ("mlp", "experts", "shared_expert")


def _rule(recipe: Recipe) -> FlopRule:
    return FlopRule(sequence_length=recipe.data.sequence_length, causal=True)


def crosses_nodes(recipe: Recipe, axis: str) -> bool:
    """Whether a group of an axis spans nodes, with ranks numbered in the order below.

    Experts lie on neighbouring sharding ranks.
    """
    span = 1
    if axis == "expert":
        degrees = recipe.parallel
        return degrees.tensor * degrees.context * degrees.expert > GPUS_PER_NODE
    for name in ("tensor", "context", "sharding", "pipeline", "data"):
        span *= getattr(recipe.parallel, name)
        if name == axis:
            return span > GPUS_PER_NODE
    raise AssertionError(f"no axis {axis}")


def _seconds(transfers: Sequence[Transfer], recipe: Recipe, gpu: Gpu) -> float:
    def bandwidth(axis: str) -> float:
        return gpu.network if crosses_nodes(recipe, axis) else gpu.nvlink

    return sum(transfer.ring / bandwidth(transfer.axis) for transfer in transfers)
