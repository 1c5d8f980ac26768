"""A recipe made small enough for any machine, with the structure that it had.

Kept are what decides which code runs: the attention kind, its groups and variants, full-rank and low-rank Postmix, the
pattern of sliding layers, experts and the share of them that a token uses, FP8, recompute, the shape of the schedule,
the decay target, and parallel axes up to four ranks. Made small are widths, layers, lengths and batches. Rules, not a
second recipe: every number follows from the recipe's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vha_paddle.config.attention import (
    Attention,
    ComposedAttention,
    FactorizedAttention,
    GroupedAttention,
    GroupedValueAttention,
    LatentAttention,
    VirtualHeadAttention,
)
from vha_paddle.config.differences import differences
from vha_paddle.config.load import recipe_from_dict
from vha_paddle.config.model import MixtureOfExperts, Model, SlidingWindow
from vha_paddle.config.schema import Parallel, Recipe, Schedule, WSDSchedule

VOCAB_SIZE = 512
OUTPUT = "runs/reduced"
DATA = f"{OUTPUT}/data"
"""Folder of the data that reduced runs share; `vha_paddle.data.builtin` makes it."""
MOST_RANKS = 4

_STEPS = 20
_INTERVAL = 10  # steps between lines, evaluations, checkpoints
_LAYERS, _HIDDEN, _INTERMEDIATE, _EXPERT_WIDTH = 2, 64, 128, 32
_HEAD_DIM, _ROPE_DIM, _LATENT, _HEADS_PER_GROUP, _TOP_K = 16, 8, 32, 4, 2
_SEQUENCE, _WINDOW, _MICRO_BATCH, _MICROBATCHES, _EVAL_SEQUENCES = 64, 24, 2, 2, 4


@dataclass(frozen=True)
class Reduced:
    """The small recipe, and `key: from -> to` for all that differs."""

    recipe: Recipe
    changes: list[str]


def reduced(recipe: Recipe, on_cpu: bool, most_ranks: int = MOST_RANKS) -> Reduced:
    """Shrink a recipe that keeps its rules to one that does too, with the same structure.

    Args:
        on_cpu: the run will be on a CPU, where Paddle has no bfloat16 kernels.
        most_ranks: that the small recipe may need.
    """
    parallel = _parallel(recipe.parallel, most_ranks)
    ranks = parallel.tensor * parallel.pipeline * parallel.context * parallel.sharding * parallel.data
    data_ranks = parallel.data * parallel.sharding
    micro_batch = min(recipe.data.micro_batch_size, _MICRO_BATCH)
    length = min(recipe.data.sequence_length, _SEQUENCE)
    global_batch = micro_batch * data_ranks * min(recipe.num_microbatches, _MICROBATCHES)
    data = {
        "train": f"{DATA}/train",
        "validation": f"{DATA}/validation",
        "tokenizer": f"{DATA}/tokenizer.model",
        "sequence_length": length,
        "global_batch_size": global_batch,
        "micro_batch_size": micro_batch,
    }
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": f"{recipe.run.name}_reduced", "output": f"{OUTPUT}/{recipe.run.name}", "start_from": None},
        "data": data,
        "schedule": _schedule(recipe.schedule, global_batch * length),
        "parallel": parallel.model_dump(),
        "checkpoint": {"interval": _capped(recipe.checkpoint.interval, _INTERVAL)},
        "logging": {
            "interval": min(recipe.logging.interval, _INTERVAL),
            "eval_interval": _capped(recipe.logging.eval_interval, _INTERVAL),
            "maps_interval": _capped(recipe.logging.maps_interval, _INTERVAL),
            "eval_sequences": min(recipe.logging.eval_sequences, _EVAL_SEQUENCES),
            "wandb": "off",
            "wandb_project": None,
            "visualdl": False,
        },
        "debug": {"check_ranks_interval": _capped(recipe.debug.check_ranks_interval, _INTERVAL) if ranks > 1 else None},
    }
    if on_cpu:
        sections["precision"] = {"compute": "float32"}
    values = recipe.model_dump()
    for name, changes in sections.items():
        values[name] |= changes
    values["model"] = _model(recipe.model, parallel, length).model_dump()
    small = recipe_from_dict(values, source=f"{recipe.run.name}, reduced")
    return Reduced(small, [f"{key}: {_shown(old)} -> {_shown(new)}" for key, old, new in differences(recipe, small)])


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _capped(interval: int | None, most: int) -> int | None:
    return None if interval is None else min(interval, most)


def _parallel(parallel: Parallel, most_ranks: int) -> Parallel:
    """Every axis above 1 becomes 2 while at most `most_ranks` are needed, the ones that cut the model first.

    An odd tensor degree goes: what it divides, such as heads that stay as they are, need not be even.
    """
    degrees = parallel.model_dump()
    axes = ("tensor", "pipeline", "context", "sharding", "data")
    if parallel.expert > 1:  # experts lie on the sharding axis
        degrees["expert"] = 2
        axes = ("sharding", "tensor", "pipeline", "context", "data")
    ranks = 1
    for axis in axes:
        divides = axis != "tensor" or degrees[axis] % 2 == 0
        kept = degrees[axis] > 1 and divides and 2 * ranks <= most_ranks
        degrees[axis] = 2 if kept else 1
        ranks *= degrees[axis]
    degrees["sequence"] = parallel.sequence and degrees["tensor"] > 1
    degrees["virtual_pipeline"] = 1  # Paddle interleaves three stages and more
    degrees["expert"] = min(degrees["expert"], degrees["sharding"])
    if degrees["sharding"] == 1:
        degrees["sharding_stage"] = 1
    return Parallel.model_validate(degrees)


def _schedule(schedule: Schedule, tokens_per_step: int) -> dict[str, int]:
    """The same shares of warmup and decay in fewer tokens."""
    total = _STEPS * tokens_per_step
    shares = {"total_tokens": total, "warmup_tokens": total * schedule.warmup_tokens // schedule.total_tokens}
    if isinstance(schedule, WSDSchedule):
        shares["decay_tokens"] = total * schedule.decay_tokens // schedule.total_tokens
    return shares


def _model(model: Model, parallel: Parallel, length: int) -> Model:
    period = model.sliding_window.full_every if model.sliding_window is not None else 1
    layers = min(model.num_hidden_layers, max(_LAYERS, period))
    layers += -layers % parallel.pipeline
    return model.model_copy(
        update={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": min(model.hidden_size, _HIDDEN),
            "intermediate_size": _capped(model.intermediate_size, _INTERMEDIATE),
            "num_hidden_layers": layers,
            "max_position_embeddings": length,
            "attention": _attention(model.attention),
            "experts": None if model.experts is None else _experts(model.experts, parallel.expert),
            "sliding_window": None if model.sliding_window is None else _sliding(model.sliding_window),
        }
    )


def _sliding(sliding: SlidingWindow) -> SlidingWindow:
    attention = None if sliding.attention is None else _attention(sliding.attention)
    return sliding.model_copy(update={"window": min(sliding.window, _WINDOW), "attention": attention})


def _experts(experts: MixtureOfExperts, degree: int) -> MixtureOfExperts:
    """The same share of experts per token, two of them where there were more: with one, probabilities are all 1."""
    chosen = min(experts.num_experts_per_tok, _TOP_K)
    number = max(chosen, experts.num_experts * chosen // experts.num_experts_per_tok)
    return experts.model_copy(
        update={
            "num_experts": number + -number % degree,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": min(experts.moe_intermediate_size, _EXPERT_WIDTH),
            "shared_expert_intermediate_size": min(experts.shared_expert_intermediate_size, _EXPERT_WIDTH),
        }
    )


def _attention(attention: Attention) -> Attention:
    """The same kind, groups and variants, with fewer heads per group and narrow ones."""
    changes: dict[str, int | None]
    if isinstance(attention, LatentAttention):
        changes = {
            "num_attention_heads": min(attention.num_attention_heads, _HEADS_PER_GROUP),
            "kv_lora_rank": min(attention.kv_lora_rank, _LATENT),
            "q_lora_rank": _capped(attention.q_lora_rank, _LATENT),
            "qk_nope_head_dim": min(attention.qk_nope_head_dim, _HEAD_DIM),
            "qk_rope_head_dim": min(attention.qk_rope_head_dim, _ROPE_DIM),
            "v_head_dim": min(attention.v_head_dim, _HEAD_DIM),
        }
    elif isinstance(attention, FactorizedAttention):
        changes = {
            "num_attention_heads": min(attention.num_attention_heads, _HEADS_PER_GROUP),
            "head_dim": min(attention.head_dim, _HEAD_DIM),
            "q_lora_rank": min(attention.q_lora_rank, _LATENT),
        }
    elif isinstance(attention, ComposedAttention):
        per_group = attention.num_attention_heads // attention.num_groups
        changes = {
            "num_attention_heads": attention.num_groups * min(per_group, _HEADS_PER_GROUP),
            "head_dim": min(attention.head_dim, _HEAD_DIM),
        }
    else:
        changes = _grouped(attention)
    return attention.model_copy(update=changes)


def _grouped(attention: GroupedAttention | VirtualHeadAttention | GroupedValueAttention) -> dict[str, int | None]:
    heads = attention.num_key_value_heads * min(attention.query_group_size, _HEADS_PER_GROUP)
    changes: dict[str, int | None] = {
        "num_attention_heads": heads,
        "head_dim": min(attention.head_dim, _HEAD_DIM),
    }
    if isinstance(attention, GroupedValueAttention):
        changes["qk_rope_head_dim"] = min(attention.qk_rope_head_dim, _ROPE_DIM)
    if isinstance(attention, VirtualHeadAttention):
        before = attention.num_attention_heads
        if attention.postmix_rank is not None:  # the same share of full rank
            changes["postmix_rank"] = max(1, attention.postmix_rank * heads // before)
        if attention.physical_head_dim is not None:
            scaled = attention.physical_head_dim * min(attention.head_dim, _HEAD_DIM) // attention.head_dim
            changes["physical_head_dim"] = max(1, scaled)
    return changes
