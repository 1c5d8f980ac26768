"""How the cells are trained: data, optimizer, schedule, mesh. One `Training` per kind of run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.recipe_book.models import Scale
from tools.recipe_book.values import Section, Value, assumed, derived, paper, upstream

_FINEWEB = "FineWeb-Edu (paper), the path is ours; which part of it, and its order, are unknown"
_UNKNOWN_CORPUS = "unknown; FineWeb-Edu as in the runs on 50B tokens, the path is ours"
_TOKENIZER = "the Qwen3 tokenizer, as upstream's dense models have it; the path is ours"
_OURS = "ours; it changes nothing of what is trained"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length and mesh of a run."""

    sequence_length: Value
    global_batch_size: Value
    micro_batch_size: Value
    total_tokens: Value
    warmup_tokens: Value
    sharding: Value
    corpus: str = _FINEWEB
    """Why data.train is what it is."""
    expert: int = 1
    context: int = 1
    fp8: Value | None = None

    @property
    def tokens_per_step(self) -> int:
        return int(self.global_batch_size.value) * int(self.sequence_length.value)


_STEP_50B = 512 * 4096
DENSE_50B = Training(
    sequence_length=paper(4096),
    global_batch_size=upstream(512, "2,097,152 tokens a step"),
    micro_batch_size=upstream(4, "with 128 ranks one microbatch a step"),
    total_tokens=derived(24_000 * _STEP_50B, "24,000 steps (upstream); the paper says 50B"),
    warmup_tokens=derived(2_000 * _STEP_50B, "2,000 steps (upstream)"),
    sharding=upstream(128),
)
WARM_START = replace(
    DENSE_50B,
    total_tokens=assumed(5_000 * _STEP_50B, "ours: 5,000 steps, a fifth of the source's run"),
    warmup_tokens=assumed(200 * _STEP_50B, "ours: 200 steps"),
)
_AS_DENSE = "unknown; as in the dense runs"
MOE_50B = Training(
    sequence_length=paper(4096),
    global_batch_size=assumed(512, f"{_AS_DENSE}: 2,097,152 tokens a step"),
    micro_batch_size=assumed(4, _AS_DENSE),
    total_tokens=derived(24_000 * _STEP_50B, "24,000 steps as in the dense runs; the paper says 50B"),
    warmup_tokens=assumed(2_000 * _STEP_50B, "2,000 steps, as in the dense runs"),
    sharding=assumed(128, _AS_DENSE),
    expert=8,
)
MOE_500B = Training(
    sequence_length=paper(8192),
    global_batch_size=assumed(512, "unknown; 4,194,304 tokens a step"),
    micro_batch_size=assumed(1, "unknown; with 128 ranks four microbatches a step"),
    total_tokens=paper(500_000_000_000),
    warmup_tokens=assumed(2_000 * 512 * 8192, "2,000 steps, as in the dense runs"),
    sharding=assumed(128, "unknown; 16 nodes of 8 GPUs"),
    corpus=_UNKNOWN_CORPUS,
    expert=8,
    fp8=assumed("all", "the paper says FP8, not which products: all projections of attention and experts"),
)


def _stage(length: Value, sequences: int, tokens: int, warmup_steps: int, context: int) -> Training:
    """A stage of the hybrids: 128 ranks, 4,194,304 tokens a step."""
    tokens_per_step = sequences * int(length.value)
    return Training(
        sequence_length=length,
        global_batch_size=assumed(sequences, f"unknown; {tokens_per_step:,} tokens a step in every stage"),
        micro_batch_size=assumed(1, "unknown"),
        total_tokens=assumed(tokens, "unknown"),
        warmup_tokens=assumed(warmup_steps * tokens_per_step, f"unknown; {warmup_steps:,} steps"),
        sharding=assumed(128 // context, "unknown; 128 GPUs in every stage"),
        corpus=_UNKNOWN_CORPUS,
        expert=8,
        context=context,
    )


_LAST_LENGTH = "the paper tests up to 128K, and calls its 32K checkpoint intermediate"
STAGES = {
    "stage1_8k": _stage(assumed(8192, "unknown; the shortest length that the paper tests"), 512, 100 * 10**9, 2000, 1),
    "stage2_32k": _stage(paper(32768), 128, 10 * 10**9, 100, 2),
    "stage3_128k": _stage(derived(131072, _LAST_LENGTH), 32, 5 * 10**9, 100, 8),
}


def recipe(
    file: str, scale: Scale, model: Section, training: Training, maps: Value | None, seed: Value, start: Value | None
) -> dict[str, Section]:
    """A whole recipe; `maps` is optim.decay_target, for models that have VHA's maps."""
    known = scale.known
    return {
        "run": {
            "name": assumed(file, "ours"),
            "seed": seed,
            "output": assumed(f"runs/{file}", "ours"),
            **({} if start is None else {"start_from": start}),
        },
        "model": model,
        "data": {
            "train": assumed("data/fineweb-edu/train", training.corpus),
            "validation": assumed("data/fineweb-edu/validation", "ours; the paper reports tasks, no validation loss"),
            "tokenizer": assumed("data/fineweb-edu/tokenizer.json", _TOKENIZER),
            "sequence_length": training.sequence_length,
            "global_batch_size": training.global_batch_size,
            "micro_batch_size": training.micro_batch_size,
        },
        "optim": {
            "lr": scale.lr,
            "beta1": known(0.9),
            "beta2": known(0.95),
            "eps": assumed(1e-8, "unknown; the common value"),
            "weight_decay": known(0.1),
            **({} if maps is None else {"decay_target": maps}),
            "max_grad_norm": known(1.0),
        },
        "schedule": {
            "kind": known("cosine"),
            "total_tokens": training.total_tokens,
            "warmup_tokens": training.warmup_tokens,
            "min_lr": known(1e-5),
        },
        "parallel": _mesh(training, known(1)),
        "precision": {"compute": known("bfloat16")} | ({} if training.fp8 is None else {"fp8": training.fp8}),
        "memory": {"recompute": known("full")},
        "checkpoint": {
            "interval": known(3000),
            "keep": assumed(2, _OURS),
            "asynchronous": assumed(True, _OURS),
        },
        "logging": {
            "interval": assumed(10, _OURS),
            "eval_interval": assumed(1000, _OURS),
            **({} if maps is None else {"maps_interval": assumed(1000, _OURS)}),
        },
    }


def _mesh(training: Training, stage: Value) -> Section:
    mesh = {"sharding": training.sharding, "sharding_stage": stage}
    if training.context > 1:
        mesh["context"] = assumed(training.context, "unknown; each rank holds 16,384 tokens of a sequence")
    if training.expert > 1:
        mesh["expert"] = assumed(training.expert, "unknown; within a node of 8 GPUs, 16 of 128 experts on each")
    return mesh
