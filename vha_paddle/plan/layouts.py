"""Which layouts of a recipe a number of GPUs allows, and which of them are best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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

    The model and the batch, microbatches included, stay; what changes is `parallel` and `memory.recompute`. Tensor
    parallel stays within a node, and cuts the sequence outside its region wherever it can.
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
                changed = recipe.model_copy(update={"parallel": parallel})
                if not _allowed(changed):
                    continue
                found = True
                for mode in ("none", "selective", "full"):
                    yield changed.model_copy(update={"memory": Memory(recompute=mode)})
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
    """Time of a step with all its communication, none of it overlapped: the trainer overlaps none."""
    return plan.step_seconds + plan.communication_seconds


def _moving_parts(plan: Plan) -> int:
    """How far the model is cut up."""
    degrees = plan.recipe.parallel
    return degrees.tensor * degrees.pipeline * degrees.virtual_pipeline * degrees.context * degrees.expert


def _why_not(recipe: Recipe, num_gpus: int) -> str:
    counts = range(max(1, num_gpus - _SEARCHED_COUNTS), num_gpus + _SEARCHED_COUNTS + 1)
    nearest = sorted(counts, key=lambda count: abs(count - num_gpus))
    works = sorted(itertools.islice((count for count in nearest if any(candidates(recipe, count))), 2))
    samples = recipe.data.global_batch_size // recipe.data.micro_batch_size
    rule = (
        f"no tensor degree of {_listed(_divisors(GPUS_PER_NODE))}, pipeline degree that divides "
        f"{recipe.model.num_hidden_layers} layers, context degree, and data degree that divides {samples} microbatches "
        "multiply to it"
    )
    return f"{rule}; use {_listed(works)}" if works else f"{rule}; change data.global_batch_size"


def _listed(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
