"""A plan as plain values for JSON, and as text to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vha_paddle.config import Recipe
from vha_paddle.counts import active_parameters, parameters
from vha_paddle.plan.activations import layer_terms
from vha_paddle.plan.communication import Transfer, postmix_values
from vha_paddle.plan.cost import Pace, Plan
from vha_paddle.plan.layouts import OWN, SAME_TIME, SEARCHED, Proposal
from vha_paddle.plan.memory import RESERVE, RankMemory, worst
from vha_paddle.plan.stages import stage_tensors

DEGREES = (
    "tensor",
    "sequence",
    "pipeline",
    "virtual_pipeline",
    "context",
    "data",
    "sharding",
    "sharding_stage",
    "expert",
)


def summary(plan: Plan, proposed: Sequence[Proposal], num_gpus: int) -> dict[str, Any]:
    """Everything a plan says; keys carry their units."""
    recipe, gpu = plan.recipe, plan.gpu
    return {
        "run": recipe.run.name,
        "gpus": recipe.num_ranks,
        "gpu": asdict(gpu),
        "layout": _layout(recipe),
        "parameters_total": parameters(recipe.model).total,
        "parameters_active_per_token": active_parameters(recipe.model),
        "fits": plan.fits,
        "memory_limit_bytes": {"gpu": gpu.memory, "usable": plan.usable_memory, "kept_free_share": RESERVE},
        "worst_rank": rank_values(plan.worst),
        "best_rank": rank_values(plan.best),
        "ranks": [rank_values(rank) for rank in plan.ranks],
        "activation_bytes_per_layer_per_microbatch": layer_terms(recipe),
        "communication_stage": plan.stage,
        "communication_bytes_per_step": [_transfer(transfer) for transfer in plan.transfers],
        "vha_over_grouped_attention": _vha(recipe),
        "time": _time(plan),
        "proposed_for_gpus": num_gpus,
        "proposed": [_proposal(other) for other in proposed],
    }


def _layout(recipe: Recipe) -> dict[str, Any]:
    degrees = {name: getattr(recipe.parallel, name) for name in DEGREES}
    return degrees | {
        "recompute": recipe.memory.recompute,
        "micro_batch_size": recipe.data.micro_batch_size,
        "microbatches": recipe.num_microbatches,
    }


def rank_values(rank: RankMemory) -> dict[str, Any]:
    """The memory of a rank, what is exact apart from what is estimated."""
    exact = {"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer}
    estimated = {"activations": rank.activations, "loss": rank.loss, "block": rank.block}
    return {
        "stage": rank.stage,
        "sharding_rank": rank.sharding_rank,
        "parameters": rank.parameters,
        "parameters_owned": rank.owned,
        "exact_bytes": exact,
        "estimated_bytes": estimated,
        "activation_bytes_per_microbatch": rank.activations_per_microbatch,
        "microbatches_kept": rank.microbatches_kept,
        "total_bytes": rank.total,
    }


def _transfer(transfer: Transfer) -> dict[str, Any]:
    return asdict(transfer) | {"ring": transfer.ring}


def _vha(recipe: Recipe) -> dict[str, int] | None:
    """What VHA sums over the tensor ranks beyond grouped attention of as many query and KV heads."""
    extra = postmix_values(recipe)
    if extra is None:
        return None
    whole = [tensor for tensor in stage_tensors(recipe.model, recipe.parallel, 0) if tensor.partial_gradient]
    premix = [tensor.size for tensor in whole if tensor.name.endswith(".premix")]
    return {
        "postmix_values_per_token_per_layer_forward": extra.per_token,
        "postmix_values_per_token_per_layer_backward": extra.per_token,
        "postmix_values_per_layer_per_pass_forward": extra.per_pass,
        "postmix_values_per_layer_per_pass_backward": extra.per_pass,
        "premix_values_per_token_per_layer": 0,
        "premix_gradient_values_per_layer_per_step": premix[0] if premix else 0,
    }


def _time(plan: Plan) -> dict[str, Any]:
    return {
        "mfu_stated": plan.mfu,
        "training_flops_per_token": plan.flops_per_token,
        "recomputed_share": plan.recomputed,
        "pipeline_schedule": plan.schedule.name,
        "bubble_share": plan.schedule.bubble,
        "communication_seconds_if_none_overlaps": plan.communication_seconds,
        "steps": plan.recipe.num_steps,
        **_paces(plan),
    }


def _paces(plan: Plan) -> dict[str, Any]:
    """The run at the stated MFU, and with all communication added."""
    return {"at_stated_mfu": _pace(plan.stated, plan), "with_all_communication": _pace(plan.with_communication, plan)}


def _pace(pace: Pace, plan: Plan) -> dict[str, float]:
    return {
        "step_seconds": pace.step_seconds,
        "days": pace.days,
        "gpu_hours": pace.gpu_hours,
        "tokens_per_second_per_gpu": pace.tokens_per_second_per_gpu,
        "mfu_overall": pace.mfu(plan.gpu),
    }


def overrides(recipe: Recipe) -> list[str]:
    """The keys of a layout as they are typed behind a recipe."""
    degrees = {name: getattr(recipe.parallel, name) for name in DEGREES}
    typed = [f"parallel.{name}={str(value).lower()}" for name, value in degrees.items()]
    typed.append(f"data.micro_batch_size={recipe.data.micro_batch_size}")
    return [*typed, f"memory.recompute={recipe.memory.recompute}"]


def _proposal(proposal: Proposal) -> dict[str, Any]:
    plan = proposal.plan
    return {
        "origin": proposal.origin,
        "overrides": overrides(plan.recipe),
        "fits": plan.fits,
        "worst_rank_bytes": plan.worst.total,
        **_paces(plan),
        "reason": reason(plan),
    }


def reason(plan: Plan) -> str:
    """Why a layout stands where it does."""
    parts = []
    if not plan.fits:
        over = plan.worst.total - plan.usable_memory
        parts.append(f"{gibibytes(over)} GiB too large on stage {plan.worst.stage}")
    if plan.recipe.memory.recompute != "none":
        parts.append(f"recomputes {plan.recomputed:.0%} of the FLOPs")
    if plan.schedule.pipeline > 1:
        parts.append(f"waits {plan.schedule.bubble:.1%} of the time ({plan.schedule.name})")
    return "; ".join(parts)


def render(plan: Plan, proposed: Sequence[Proposal], num_gpus: int) -> str:
    """The plan as text; layouts for another number of GPUs than the recipe's come first, as they were asked for."""
    own = [*_heading(plan), "", *_memory(plan), "", *_communication(plan), "", *_prediction(plan)]
    if not proposed:
        return "\n".join(own)
    others = list(_proposals(plan, proposed, num_gpus))
    if num_gpus == plan.recipe.num_ranks:
        return "\n".join([*own, "", *others])
    return "\n".join([*others, "", f"the recipe as it stands, on {plan.recipe.num_ranks} GPUs:", "", *own])


def _heading(plan: Plan) -> Iterator[str]:
    recipe, gpu = plan.recipe, plan.gpu
    total = parameters(recipe.model).total
    active = "" if recipe.model.experts is None else f" ({active_parameters(recipe.model):,} active per token)"
    kind = recipe.model.attention.kind
    yield f"{recipe.run.name}: {kind}, {total:,} parameters{active}, on {recipe.num_ranks} x {gpu.name}"
    layout = [f"{name} {str(value).lower()}" for name, value in _layout(recipe).items()]
    yield "  " + ", ".join(layout[: len(DEGREES)])
    yield "  " + ", ".join(layout[len(DEGREES) :])
    fp8 = "" if recipe.precision.fp8 == "none" else f", {(gpu.fp8_flops or 0) / 1e12:.0f} FP8 ({recipe.precision.fp8})"
    yield f"  a GPU: {gpu.bf16_flops / 1e12:.0f} TFLOPS dense bfloat16{fp8}, {gpu.memory / 1e9:.0f} GB"
    yield f"  source: {gpu.source}"


def memory_table(ranks: Mapping[str, RankMemory]) -> Iterator[str]:
    """Lines of a table with a row for each labelled rank."""
    yield "memory of a rank, GiB       exact                        | estimated (flash attention)"
    columns = ("weights", "gradients", "optimizer", "activations", "loss", "block", "total")
    yield f"  {'rank':<24}{'parameters':>15}" + "".join(f"{name:>12}" for name in columns)
    for label, rank in ranks.items():
        cells = [getattr(rank, name) for name in columns]
        name = f"{label}: stage {rank.stage}, shard {rank.sharding_rank}"
        yield f"  {name:<24}{rank.parameters:>15,}" + "".join(f"{gibibytes(cell):>12}" for cell in cells)
    fullest = worst(list(ranks.values()))
    yield (
        f"  activations: {gibibytes(fullest.activations_per_microbatch)} GiB a microbatch, "
        f"{fullest.microbatches_kept:g} kept; the total counts the larger of loss and block, which never meet"
    )


def _memory(plan: Plan) -> Iterator[str]:
    yield from memory_table({"worst": plan.worst, "best": plan.best})
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield (
        f"  {verdict}: {gibibytes(plan.worst.total)} GiB of {gibibytes(plan.usable_memory)} usable "
        f"({gibibytes(plan.gpu.memory)} less {RESERVE:.0%} for what is not modelled)"
    )


def _communication(plan: Plan) -> Iterator[str]:
    yield f"communication of a rank of stage {plan.stage} per optimizer step, GiB (docs/planning.md has the convention)"
    if plan.transfers:
        yield f"  {'axis, ranks':<13}{'kind':<15}{'phase':<10}{'purpose':<36}{'payload':>10}{'ring':>10}"
    else:
        yield "  none"
    for transfer in plan.transfers:
        group = f"{transfer.axis} {transfer.ranks}"
        yield (
            f"  {group:<13}{transfer.kind:<15}{transfer.phase:<10}{transfer.purpose:<36}"
            f"{gibibytes(transfer.payload):>10}{gibibytes(transfer.ring):>10}"
        )
    extra = _vha(plan.recipe)
    if extra is not None:
        token = extra["postmix_values_per_token_per_layer_forward"]
        layer = extra["postmix_values_per_layer_per_pass_forward"]
        what = f"{token:,} values per token and layer" if token else f"{layer:,} values per layer and microbatch"
        yield "  VHA over grouped attention of the same heads, under tensor parallelism:"
        yield f"  Postmix sums {what} in forward, as many in backward; Premix none"


def _prediction(plan: Plan) -> Iterator[str]:
    yield f"time, estimated at an MFU of {plan.mfu:g} while a GPU neither waits for a stage nor recomputes"
    schedule = plan.schedule
    yield f"  {'FLOPs per token':<18}{plan.flops_per_token / 1e9:.3f} G (training, causal scores)"
    yield f"  {'recomputed':<18}{plan.recomputed:.1%}"
    waits = f"{schedule.bubble:.1%} ({schedule.name}, microbatches: {schedule.microbatches})"
    yield f"  {'pipeline bubble':<18}{waits}"
    yield f"  {'communication':<18}{duration(plan.communication_seconds)} of ring transfers a step if none overlaps"
    yield f"  {'run':<18}{plan.recipe.num_steps:,} steps"
    yield f"  {'':<24}{'at that MFU':>14}{'with all communication':>26}"
    paces = plan.stated, plan.with_communication
    rows = {
        "step": [duration(pace.step_seconds) for pace in paces],
        "days": [f"{pace.days:,.2f}" for pace in paces],
        "GPU-hours": [f"{pace.gpu_hours:,.0f}" for pace in paces],
        "tokens/second and GPU": [f"{pace.tokens_per_second_per_gpu:,.0f}" for pace in paces],
        "MFU over all": [f"{pace.mfu(plan.gpu):.3f}" for pace in paces],
    }
    for name, (least, most) in rows.items():
        yield f"  {name:<24}{least:>14}{most:>26}"
    yield "  the trainer overlaps none: a run is near the right, unless the MFU was measured with communication in it"


def _proposals(plan: Plan, proposed: Sequence[Proposal], num_gpus: int) -> Iterator[str]:
    yield f"{plan.recipe.run.name} on {num_gpus} x {plan.gpu.name}, estimates at an MFU of {plan.mfu:g}"
    yield "times: at that MFU .. with all communication, as the trainer overlaps none"
    if num_gpus != plan.recipe.num_ranks and proposed[0].origin != OWN:
        yield f"the recipe's own layout cannot be scaled to {num_gpus}: its other degrees or its batch do not divide"
    searched = [one for one in proposed if one.origin == SEARCHED]
    for place, proposal in enumerate(proposed, 1):
        if searched and proposal is searched[0]:
            order = f"fastest with communication first, times within {SAME_TIME:.0%} equal and the plainest first"
            yield f"other layouts, {order if proposal.plan.fits else 'NONE FITS, smallest first'}:"
        yield from _row(place, proposal)


def _row(place: int, proposal: Proposal) -> Iterator[str]:
    plan, paces = proposal.plan, (proposal.plan.stated, proposal.plan.with_communication)
    fits = "fits" if plan.fits else "DOES NOT FIT"
    parts = [
        f"{gibibytes(plan.worst.total)} GiB of {gibibytes(plan.usable_memory)}, {fits}",
        "step " + " .. ".join(duration(pace.step_seconds) for pace in paces),
        " .. ".join(f"{pace.days:,.2f}" for pace in paces) + " days",
        " .. ".join(f"{pace.gpu_hours:,.0f}" for pace in paces) + " GPU-hours",
    ]
    yield f"  {place}. {'; '.join(parts)}"
    remarks = [proposal.origin] * (proposal.origin != SEARCHED) + [reason(plan)] * bool(reason(plan))
    if remarks:
        yield f"     {'; '.join(remarks)}"
    yield f"     {' '.join(overrides(plan.recipe))}"


def duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def gibibytes(size: float) -> str:
    return f"{size / 2**30:,.2f}" if size >= 2**30 / 200 or size == 0 else f"{size / 2**30:.1e}"
