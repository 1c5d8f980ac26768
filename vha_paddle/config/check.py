"""Rules of a recipe that join several keys. Each breach names the key, the value, the rule and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vha_paddle.config.attention import (
    Attention,
    ComposedAttention,
    GroupedAttention,
    GroupedValueAttention,
    VirtualHeadAttention,
)
from vha_paddle.config.check_model import check_model, multiples
from vha_paddle.config.model import Model
from vha_paddle.config.schema import Parallel, Recipe, WSDSchedule
from vha_paddle.errors import UserError

_LONGEST_BLEND = 1_000_000  # samples until its pattern repeats
_LARGEST_DEGREE = 10_000  # that is looked at for a remedy


def check(recipe: Recipe) -> None:
    """Raise `UserError` for the first rule that the recipe breaks."""
    check_model(recipe.model)
    _check_axes(recipe.parallel)
    check_tensor_parallel(recipe.model, recipe.parallel.tensor)
    _check_experts(recipe)
    _check_pipeline(recipe)
    _check_data(recipe)
    _check_optimisation(recipe)
    _check_logging(recipe)
    if recipe.checkpoint.keep_every_tokens is not None and recipe.checkpoint.interval is None:
        raise UserError(
            f"checkpoint.keep_every_tokens={recipe.checkpoint.keep_every_tokens}: has no effect without "
            "checkpoint.interval, as only the last step is saved; name an interval or remove the key"
        )
    if recipe.debug.check_ranks_interval is not None and recipe.num_ranks == 1:
        raise UserError(
            f"debug.check_ranks_interval={recipe.debug.check_ranks_interval}: compares ranks, so it has no effect "
            "with one; remove the key"
        )


def _check_axes(parallel: Parallel) -> None:
    """Rules of single axes, and keys that would have no effect."""
    if parallel.sequence and parallel.tensor == 1:
        raise UserError(
            "parallel.sequence=true: splits the sequence over the tensor ranks, so it has no effect with "
            "parallel.tensor=1; raise that or remove the key"
        )
    stage = parallel.sharding_stage
    if stage > 1 and parallel.sharding == 1:
        raise UserError(
            f"parallel.sharding_stage={stage}: has no effect with parallel.sharding=1; raise that or remove the key"
        )
    if stage > 1 and parallel.pipeline > 1:
        raise UserError(
            f"parallel.sharding_stage={stage}: must be 1 with parallel.pipeline={parallel.pipeline}, which has many "
            "microbatches under way at once; use 1"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline < 3:
        raise UserError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: Paddle interleaves chunks on 3 pipeline ranks and "
            f"more, and parallel.pipeline={parallel.pipeline}; use virtual_pipeline=1, or a pipeline of 3 or more"
        )


def _check_pipeline(recipe: Recipe) -> None:
    parallel, num_layers = recipe.parallel, recipe.model.num_hidden_layers
    if parallel.pipeline == 1:
        return
    if num_layers % (parallel.pipeline * parallel.virtual_pipeline):
        interleaved = parallel.virtual_pipeline > 1
        rule = f"multiplied by parallel.virtual_pipeline={parallel.virtual_pipeline} it " * interleaved + "must divide"
        least = 3 if interleaved else 1
        up_to = min(num_layers, _LARGEST_DEGREE)
        works = [degree for degree in range(least, up_to + 1) if num_layers % (degree * parallel.virtual_pipeline) == 0]
        remedy = f"use {_nearest(works, parallel.pipeline)}" if works else "use virtual_pipeline=1"
        raise UserError(
            f"parallel.pipeline={parallel.pipeline}: {rule} model.num_hidden_layers={num_layers}, so that stages are "
            f"equal; {remedy}"
        )
    enough = recipe.num_microbatches == parallel.pipeline or recipe.num_microbatches >= 2 * parallel.pipeline
    if parallel.virtual_pipeline > 1 and not enough:
        raise UserError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: Paddle interleaves parallel.pipeline="
            f"{parallel.pipeline} microbatches per optimizer step, or twice as many and more; there are "
            f"{recipe.num_microbatches}; change data.micro_batch_size or data.global_batch_size, or use "
            "virtual_pipeline=1"
        )


def check_tensor_parallel(model: Model, degree: int) -> None:
    """The split of each kind is described in its attention module."""

    def broken(candidate: int) -> str | None:
        return next((rule for rule in _tensor_rules(model, candidate)), None)

    rule = broken(degree)
    if rule is not None:
        works = [candidate for candidate in range(1, min(2 * degree, _LARGEST_DEGREE)) if broken(candidate) is None]
        raise UserError(f"parallel.tensor={degree}: {rule}; use {_nearest(works, degree)}")


def _tensor_rules(model: Model, degree: int) -> Iterator[str]:
    """What `degree` must divide and does not."""
    sections = model.attention_sections
    sizes = {"model.vocab_size": model.vocab_size}
    if model.experts is not None:
        sizes["model.experts.moe_intermediate_size"] = model.experts.moe_intermediate_size
        sizes["model.experts.shared_expert_intermediate_size"] = model.experts.shared_expert_intermediate_size
    elif model.intermediate_size is not None:
        sizes["model.intermediate_size"] = model.intermediate_size
    sizes |= dict(_split_heads(section, attention) for section, attention in sections.items())
    for name, size in sizes.items():
        if size % degree:
            yield f"must divide {name}={size}"
    for section, attention in sections.items():
        if isinstance(attention, GroupedAttention | GroupedValueAttention):
            num_kv_heads = attention.num_key_value_heads
            if num_kv_heads % degree and degree % num_kv_heads:
                yield f"must divide {section}.num_key_value_heads={num_kv_heads} or be a multiple of it"


def _split_heads(section: str, attention: Attention) -> tuple[str, int]:
    """What tensor parallelism divides of an attention kind: its name and number."""
    if isinstance(attention, VirtualHeadAttention):
        return f"{section}'s physical heads (num_attention_heads / num_key_value_heads)", attention.num_physical_heads
    if isinstance(attention, ComposedAttention):
        return f"{section}.num_groups", attention.num_groups
    return f"{section}.num_attention_heads", attention.num_attention_heads


def _check_experts(recipe: Recipe) -> None:
    experts, parallel = recipe.model.experts, recipe.parallel
    if experts is None:
        if parallel.expert != 1:
            raise UserError(
                f"parallel.expert={parallel.expert}: splits the experts of a mixture-of-experts model, and there is no "
                "model.experts; use 1"
            )
        if recipe.precision.fp8 == "experts":
            raise UserError("precision.fp8=experts: has no effect without model.experts; use all or none")
        return
    if parallel.sharding % parallel.expert or experts.num_experts % parallel.expert:
        works = [
            degree
            for degree in range(1, parallel.sharding + 1)
            if parallel.sharding % degree == 0 and experts.num_experts % degree == 0
        ]
        remedy = f"use {_nearest(works, parallel.expert)}"
        if experts.num_experts % parallel.expert == 0:
            remedy += f", or make parallel.sharding a multiple of {parallel.expert}"
        raise UserError(
            f"parallel.expert={parallel.expert}: must divide parallel.sharding={parallel.sharding} and "
            f"model.experts.num_experts={experts.num_experts}; {remedy}"
        )
    if experts.capacity_factor is not None and parallel.context > 1:
        raise UserError(
            f"model.experts.capacity_factor={experts.capacity_factor}: is counted per sequence, of which a rank holds "
            f"a part with parallel.context={parallel.context}; use context=1 or remove the key"
        )


def _check_data(recipe: Recipe) -> None:
    data, model = recipe.data, recipe.model
    if data.sequence_length > model.max_position_embeddings:
        raise UserError(
            f"data.sequence_length={data.sequence_length}: must not exceed "
            f"model.max_position_embeddings={model.max_position_embeddings}; raise the latter"
        )
    sliding = model.sliding_window
    if sliding is not None and sliding.window >= data.sequence_length:
        raise UserError(
            f"model.sliding_window.window={sliding.window}: has no effect on sequences of data.sequence_length="
            f"{data.sequence_length}; use a smaller one or remove model.sliding_window"
        )
    _check_blend(recipe)
    _check_sequence_length(recipe)
    per_microbatch = data.micro_batch_size * recipe.num_data_ranks
    if data.global_batch_size % per_microbatch:
        remedy = f"use {multiples(data.global_batch_size, per_microbatch)}"
        degrees = range(1, min(recipe.num_data_ranks, _LARGEST_DEGREE))
        works = [ranks for ranks in degrees if data.global_batch_size % (data.micro_batch_size * ranks) == 0]
        if works:
            remedy += (
                f", or {_nearest(works, recipe.num_data_ranks)} data ranks (parallel.data times parallel.sharding)"
            )
        raise UserError(
            f"data.global_batch_size={data.global_batch_size}: must be a multiple of data.micro_batch_size="
            f"{data.micro_batch_size} times {recipe.num_data_ranks} data ranks; {remedy}"
        )
    if recipe.num_steps < 1:
        raise UserError(
            f"schedule.total_tokens={recipe.schedule.total_tokens}: one optimizer step takes "
            f"{recipe.tokens_per_step} tokens (global_batch_size * sequence_length); use at least that"
        )


def _check_blend(recipe: Recipe) -> None:
    data = recipe.data
    prefixes = [part.prefix for part in data.training_sets]
    twice = [prefix for prefix in prefixes if prefixes.count(prefix) > 1]
    if twice:
        raise UserError(f"data.train: names {twice[0]} {len(twice)} times; name it once, with the sum of the weights")
    if sum(data.whole_weights) > _LONGEST_BLEND:
        raise UserError(
            f"data.train: the weights are {' : '.join(map(str, data.whole_weights))} in whole numbers, whose sum must "
            f"not exceed {_LONGEST_BLEND}, after which a blend repeats; round them to fewer digits"
        )


def _check_sequence_length(recipe: Recipe) -> None:
    """What cuts the sequence must cut it into equal parts."""
    parallel, length = recipe.parallel, recipe.data.sequence_length
    factors = []
    if parallel.context > 1:
        factors.append((2 * parallel.context, f"twice parallel.context={parallel.context}"))
    if parallel.sequence:
        factors.append((parallel.tensor, f"parallel.tensor={parallel.tensor} with parallel.sequence"))
    multiple = math.prod(factor for factor, _ in factors)
    if length % multiple:
        rule = " times ".join(reason for _, reason in factors)
        remedy = f"use {multiples(length, multiple)}"
        tensor = parallel.tensor if parallel.sequence else 1
        works = [
            context
            for context in range(1, min(2 * parallel.context, _LARGEST_DEGREE))
            if length % (tensor * (2 * context if context > 1 else 1)) == 0
        ]
        if parallel.context > 1 and works:
            remedy += f", or parallel.context={_nearest(works, parallel.context)}"
        raise UserError(f"data.sequence_length={length}: must be a multiple of {rule}; {remedy}")


def _check_optimisation(recipe: Recipe) -> None:
    optim, schedule = recipe.optim, recipe.schedule
    if schedule.min_lr > optim.lr:
        raise UserError(f"schedule.min_lr={schedule.min_lr}: must not exceed optim.lr={optim.lr}; lower it")
    falls = schedule.decay_tokens if isinstance(schedule, WSDSchedule) else 0
    if schedule.warmup_tokens + falls > schedule.total_tokens:
        raise UserError(
            f"schedule.warmup_tokens={schedule.warmup_tokens}: warmup and decay together exceed "
            f"schedule.total_tokens={schedule.total_tokens}; shorten one"
        )
    sections = recipe.model.attention_sections.items()
    with_maps = {section: attention for section, attention in sections if isinstance(attention, VirtualHeadAttention)}
    if with_maps and optim.decay_target is None:
        raise UserError(
            f"optim.decay_target=null: {next(iter(with_maps))}.kind=vha needs to know where decay pulls Premix and "
            "Postmix; use identity, zero (as upstream) or none"
        )
    if not with_maps and optim.decay_target is not None:
        raise UserError(
            f"optim.decay_target={optim.decay_target}: has no effect with model.attention.kind="
            f"{recipe.model.attention.kind}; remove the key"
        )
    if optim.decay_target == "identity":
        for section, attention in with_maps.items():
            if attention.projected_head_dim != attention.head_dim:
                raise UserError(
                    f"optim.decay_target=identity: there is no identity between {section}.physical_head_dim="
                    f"{attention.physical_head_dim} and head_dim={attention.head_dim}; use zero or none"
                )


def _check_logging(recipe: Recipe) -> None:
    logging = recipe.logging
    if logging.maps_interval is not None and not recipe.model.has_maps:
        raise UserError(
            f"logging.maps_interval={logging.maps_interval}: has no effect with model.attention.kind="
            f"{recipe.model.attention.kind}, which has no maps; remove the key"
        )
    if logging.eval_interval is not None and recipe.data.validation is None:
        raise UserError(
            f"logging.eval_interval={logging.eval_interval}: has no effect without data.validation; "
            "name a validation set or remove the key"
        )
    if logging.wandb != "off" and logging.wandb_project is None:
        raise UserError(
            f"logging.wandb_project=null: a project is required with logging.wandb={logging.wandb}; name one"
        )
    if logging.wandb == "off" and logging.wandb_project is not None:
        raise UserError(
            f"logging.wandb_project={logging.wandb_project}: has no effect with logging.wandb=off; "
            "use offline or online, or remove the key; as an override, logging.wandb_project=null"
        )


def _nearest(works: list[int], degree: int) -> str:
    """The two of `works` that are closest to a degree that does not work."""
    return " or ".join(map(str, sorted(sorted(works, key=lambda candidate: abs(candidate - degree))[:2])))
