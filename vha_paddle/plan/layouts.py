"""Which layouts of a recipe a number of GPUs allows, and which of them are best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from vha_paddle.config import Memory, Parallel, Recipe
from vha_paddle.config.check import check
from vha_paddle.errors import UserError
from vha_paddle.plan.cost import Plan, make_plan
from vha_paddle.plan.gpus import GPUS_PER_NODE, Gpu

NUM_PROPOSED = 5
SAME_TIME = 0.15
"""The estimate of a time is not finer than this."""
_MAX_VIRTUAL = 4
_MAX_CONTEXT = 16
_SEARCHED_COUNTS = 64  # GPU counts on either side of one that does not work


OWN = "the recipe's own layout, scaled"
OWN_TUNED = "the same degrees, with the microbatch and recompute that are fastest"
SEARCHED = "searched"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A layout for a number of GPUs, and where it comes from: `OWN`, `OWN_TUNED` or `SEARCHED`."""

    plan: Plan
    origin: str


def proposals(recipe: Recipe, num_gpus: int, gpu: Gpu, mfu: float) -> list[Proposal]:
    """The recipe's own layout on `num_gpus`, whether it fits or not; then the best ones, best first.

    The own layout is left out where it is the recipe as it stands, or where it cannot be scaled to so many.

    Raises:
        UserError: as `propose`.
    """
    found: list[Proposal] = []

    def add(plan: Plan, origin: str) -> None:
        if plan.recipe not in (recipe, *(proposal.plan.recipe for proposal in found)):
            found.append(Proposal(plan=plan, origin=origin))

    own = rescaled(recipe, num_gpus)
    if own is not None:
        add(make_plan(own, gpu, mfu), OWN)
        add(min((make_plan(tuned, gpu, mfu) for tuned in _tunings(own)), key=_rank), OWN_TUNED)
    for plan in propose(recipe, num_gpus, gpu, mfu):
        add(plan, SEARCHED)
    return found


def rescaled(recipe: Recipe, num_gpus: int) -> Recipe | None:
    """The recipe's layout on `num_gpus`: its sharding ranks, or else its data ranks, become more or fewer.

    Everything else stays, as far as the rules allow it: experts are divided over a smaller degree, and a microbatch is
    made smaller, where the scaled ranks do not divide them. None where no such layout uses all GPUs.
    """
    degrees = recipe.parallel
    scaled = "sharding" if degrees.sharding > 1 else "data"
    fixed = degrees.tensor * degrees.pipeline * degrees.context * (degrees.data if scaled == "sharding" else 1)
    degree, left_over = divmod(num_gpus, fixed)
    if left_over or degree == 0:
        return None
    changed = {scaled: degree}
    if scaled == "sharding":
        changed |= {"expert": math.gcd(degrees.expert, degree)}
        if degree == 1:
            changed |= {"sharding_stage": 1}
    parallel = degrees.model_copy(update=changed)
    for size in reversed(_divisors(recipe.data.micro_batch_size)):
        own = _with_microbatch(recipe.model_copy(update={"parallel": parallel}), size)
        if _allowed(own):
            return own
    return None


def _tunings(recipe: Recipe) -> Iterator[Recipe]:
    """A layout with every microbatch that divides the recipe's and is allowed, and every way to recompute."""
    for size in _divisors(recipe.data.micro_batch_size):
        changed = _with_microbatch(recipe, size)
        if _allowed(changed):
            for mode in ("none", "selective", "full"):
                yield changed.model_copy(update={"memory": Memory(recompute=mode)})


def _with_microbatch(recipe: Recipe, size: int) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"micro_batch_size": size})})


def propose(recipe: Recipe, num_gpus: int, gpu: Gpu, mfu: float) -> list[Plan]:
    """The best layouts on `num_gpus`, best first; where none fits, those that need least memory.

    One for each combination of tensor, pipeline and context degrees: the fastest that fits. Of these, layouts within
    `SAME_TIME` of the fastest count as equal and the plainest comes first.

    Raises:
        UserError: no layout divides this model and batch over so many GPUs.
    """
    best: dict[tuple[int, int, int], Plan] = {}
    for candidate in candidates(recipe, num_gpus):
        plan, degrees = make_plan(candidate, gpu, mfu), candidate.parallel
        key = (degrees.tensor, degrees.pipeline, degrees.context)
        if key not in best or _rank(plan) < _rank(best[key]):
            best[key] = plan
    if not best:
        raise UserError(f"--gpus {num_gpus}: {_why_not(recipe, num_gpus)}")
    fastest = min(map(_seconds, filter(_fits, best.values())), default=0.0)

    def place(plan: Plan) -> tuple[float, ...]:
        slower = _seconds(plan) > fastest * (1 + SAME_TIME)
        return _rank(plan) if slower or not plan.fits else (0, fastest, _moving_parts(plan), *_rank(plan))

    return sorted(best.values(), key=place)[:NUM_PROPOSED]


def candidates(recipe: Recipe, num_gpus: int) -> Iterator[Recipe]:
    """The recipe in every layout that its rules and the trainer allow.

    The model and the batch stay; what changes is `parallel`, `memory.recompute` and `data.micro_batch_size`, of which
    the divisors are tried. Tensor parallel stays within a node, and cuts the sequence outside its region wherever it
    can.
    """
    num_layers = recipe.model.num_hidden_layers
    for tensor in (degree for degree in _divisors(GPUS_PER_NODE) if num_gpus % degree == 0):
        for pipeline in _divisors(num_layers):
            for context in (2**power for power in range(_MAX_CONTEXT.bit_length())):
                replicas, left_over = divmod(num_gpus, tensor * pipeline * context)
                if left_over == 0:
                    yield from _with_degrees(recipe, tensor, pipeline, context, replicas)


def _with_degrees(recipe: Recipe, tensor: int, pipeline: int, context: int, replicas: int) -> Iterator[Recipe]:
    chunks = [chunks for chunks in range(1, _MAX_VIRTUAL + 1) if pipeline > 1 or chunks == 1]
    shardings = {degree for degree in (1, recipe.parallel.sharding, replicas) if replicas % degree == 0}
    for sequence in (True, False) if tensor > 1 else (False,):
        found = False
        for virtual, sharding in itertools.product(chunks, sorted(shardings)):
            stages = (1, 2, 3) if sharding > 1 else (1,)
            for stage, expert in itertools.product(stages, _expert_degrees(recipe)):
                parallel = Parallel.model_validate(
                    {
                        "tensor": tensor,
                        "sequence": sequence,
                        "pipeline": pipeline,
                        "virtual_pipeline": virtual,
                        "context": context,
                        "sharding": sharding,
                        "sharding_stage": stage,
                        "expert": expert,
                        "data": replicas // sharding,
                    }
                )
                for tuned in _tunings(recipe.model_copy(update={"parallel": parallel})):
                    found = True
                    yield tuned
        if found:
            return


def _expert_degrees(recipe: Recipe) -> list[int]:
    """Those within a node, and the recipe's own; the rules refuse what divides the shards or the experts unequally."""
    if recipe.model.experts is None:
        return [1]
    return sorted({*_divisors(GPUS_PER_NODE), recipe.parallel.expert})


def _allowed(recipe: Recipe) -> bool:
    try:
        check(recipe)
    except UserError:
        return False
    return True


def _rank(plan: Plan) -> tuple[float, ...]:
    """Smaller is better: fits, is fast, is plain."""
    if not plan.fits:
        return (1, plan.worst.total)
    return (0, _seconds(plan), _moving_parts(plan), plan.recipe.parallel.sharding_stage, plan.worst.total)


def _fits(plan: Plan) -> bool:
    return plan.fits


def _seconds(plan: Plan) -> float:
    return plan.with_communication.step_seconds


def _moving_parts(plan: Plan) -> int:
    """How far the model is cut up."""
    degrees = plan.recipe.parallel
    return degrees.tensor * degrees.pipeline * degrees.virtual_pipeline * degrees.context * degrees.expert


def _why_not(recipe: Recipe, num_gpus: int) -> str:
    counts = range(max(1, num_gpus - _SEARCHED_COUNTS), num_gpus + _SEARCHED_COUNTS + 1)
    nearest = sorted(counts, key=lambda count: abs(count - num_gpus))
    works = sorted(itertools.islice((count for count in nearest if any(candidates(recipe, count))), 2))
    samples = recipe.data.global_batch_size
    rule = (
        f"no tensor degree of {_listed(_divisors(GPUS_PER_NODE))}, pipeline degree that divides "
        f"{recipe.model.num_hidden_layers} layers, context degree, and data degree that divides {samples} sequences "
        "multiply to it"
    )
    return f"{rule}; use {_listed(works)}" if works else f"{rule}; change data.global_batch_size"


def _listed(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
