"""The recipe: every section and key of a training run, typed. Rules that join several keys are in `check.py`.

Field names are Hugging Face's where they have one. Values that follow from others (physical heads, steps,
tokens per step) are properties, never fields, so they cannot disagree.
"""

from __future__ import annotations

import fractions
import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from vha_paddle.config.fields import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Tokens,
    TokensOrZero,
)
from vha_paddle.config.model import Model


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run: letters, digits, `.`, `_`, `-`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of initialisation, data order and dropout. Two runs that differ in it differ in all three."""
    output: str
    """Directory of checkpoints, metrics and the resolved recipe. Relative paths start where the command runs."""
    start_from: str | None = None
    """A checkpoint, or a run directory whose newest one is taken, of a model of the same shape: the run starts from
    its weights, with a fresh optimizer and its own data order. None starts from random weights."""


class TrainingSet(Section):
    """One of several training sets."""

    prefix: str
    """Of its `.bin` and `.idx`."""
    weight: PositiveFloat
    """Its share of the samples, relative to the other weights; they need not sum to 1."""


def _form(value: Any) -> Literal["prefix", "sets"]:
    """What the value of `data.train` or `data.validation` is meant to be."""
    return "sets" if isinstance(value, list | dict) else "prefix"


Prefix = Annotated[str, Tag("prefix")]
TrainingSets = Annotated[list[TrainingSet], Field(min_length=1), Tag("sets")]
ValidationSets = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], str], Field(min_length=1), Tag("sets")
]


class Data(Section):
    train: Annotated[Prefix | TrainingSets, Discriminator(_form)]
    """Prefix of the training set's `.bin` and `.idx` (see tools/prepare_data.py), or a list of sets with a `prefix` and
    a `weight` each: every set is gone through in epochs of its own, and after any number of samples each has had its
    share to less than one."""
    validation: Annotated[Prefix | ValidationSets, Discriminator(_form)] | None = None
    """Prefix of the validation set, or prefixes by name: each set is evaluated and logged by its name, and the
    validation loss is the mean over the sets. None means no evaluation."""
    document_mask: bool = False
    """Attention keeps to documents: a token sees none before the end-of-document token that precedes its own document.
    What follows that token is predicted all the same, and positions count on."""
    tokenizer: str
    """What the data was made with: a SentencePiece `tokenizer.model`, a Hugging Face `tokenizer.json`, or a folder that
    holds one, such as the data's. Copied into checkpoints and exports."""
    sequence_length: Positive
    """Tokens a training sample predicts, S."""
    global_batch_size: Positive
    """Sequences per optimizer step, over all ranks and microbatches."""
    micro_batch_size: Positive
    """Sequences of one forward pass on one data-parallel rank; the rest is gradient accumulation."""

    @property
    def training_sets(self) -> list[TrainingSet]:
        """The sets of a blend, or the one there is."""
        return [TrainingSet(prefix=self.train, weight=1.0)] if isinstance(self.train, str) else self.train

    @property
    def whole_weights(self) -> list[int]:
        """The weights of `training_sets` as the smallest whole numbers in the same proportion, to the digit that the
        recipe has."""
        weights = [fractions.Fraction(repr(part.weight)) for part in self.training_sets]
        scale = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * scale) for weight in weights]
        return [weight // math.gcd(*whole) for weight in whole]

    @property
    def validation_sets(self) -> dict[str, str]:
        """Prefixes by name; none without validation, and one without names is called `validation`."""
        if isinstance(self.validation, str):
            return {"validation": self.validation}
        return self.validation or {}


class Optim(Section):
    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices: embedding and projections. Gains (one-dimensional) never decay."""
    decay_target: Literal["none", "zero", "identity"] | None = None
    """Where weight decay pulls VHA's maps. `identity`: Premix to I and Postmix to I, so decay limits the departure
    the maps exist to learn. `zero`: as upstream; alone it takes Premix to ||W-I||_F = 2.5 over the paper's 1.7B
    schedule. `none`: the maps do not decay. Required when the attention kind is vha, meaningless otherwise."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient of all parameters together is scaled down to this norm."""


class CosineSchedule(Section):
    kind: Literal["cosine"]
    total_tokens: Tokens
    """Length of the run; whole optimizer steps that fit into it are trained."""
    warmup_tokens: TokensOrZero
    """Linear rise from 0 to optim.lr."""
    min_lr: NonNegativeFloat
    """Learning rate at the end of the half cosine."""


class WSDSchedule(Section):
    """Warmup, stable, decay: constant after the warmup, linear fall over the last `decay_tokens`."""

    kind: Literal["wsd"]
    total_tokens: Tokens
    warmup_tokens: TokensOrZero
    decay_tokens: TokensOrZero
    min_lr: NonNegativeFloat


Schedule = Annotated[CosineSchedule | WSDSchedule, Field(discriminator="kind")]


class Parallel(Section):
    """Degrees of the mesh. Their product must be the number of ranks."""

    tensor: Positive = 1
    sequence: bool = False
    """Split activations outside the tensor-parallel region by sequence."""
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline rank."""
    data: Positive = 1
    """Replicas of the model."""
    sharding: Positive = 1
    """Data-parallel ranks that split optimizer state (ZeRO)."""
    sharding_stage: Literal[1, 2, 3] = 1
    """What they split: 1 the optimizer's state, 2 also the gradients, 3 also the weights."""
    context: Positive = 1
    """Ranks that split the sequence; each holds two pieces of it, an early and a late one, so that causal attention
    costs all of them the same."""
    expert: Positive = 1
    """Ranks that hold different experts and exchange tokens: neighbours on the sharding axis, so the degree must
    divide `sharding` and takes no ranks of its own."""


class Precision(Section):
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations. AdamW keeps float32 master weights where this is lower. Paddle has no
    bfloat16 kernels on CPU."""
    fp8: Literal["none", "experts", "all"] = "none"
    """GEMMs whose factors are rounded to E4M3 in blocks, as DeepSeek-V3: of the `experts`, or of `all` projections of
    attention and feed-forward. Embedding, head, router, norms, the attention core and VHA's maps stay in `compute`.
    Kernels on a GPU; on a CPU the same rounding is emulated."""


class Memory(Section):
    """What is computed again in backward rather than kept."""

    recompute: Literal["none", "selective", "full"] = "none"
    """`selective`: attention between its projections (norms, RoPE, scores and VHA's maps). `full`: every block."""


class Checkpoint(Section):
    interval: Positive | None = None
    """Optimizer steps between checkpoints; none means only the last step is saved."""
    keep: Positive = 2
    """Newest checkpoints kept; older ones are removed after a newer one is complete. The last one that no skipped step
    precedes (see `failure`) is kept too."""
    keep_every_tokens: Tokens | None = None
    """The first checkpoint at or after each multiple of so many tokens is kept for ever."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the newest whole checkpoint in run.output; a damaged one is passed over and kept under
    another name. `never` refuses to start over one."""
    asynchronous: bool = False
    """Training goes on as soon as the state is copied to host memory; the files are written behind it."""
    max_failed_saves: NonNegative = 3
    """Saves that may fail one after another, such as on a full disk, before the run ends. The last step's may not."""


class Failure(Section):
    """When a run that goes wrong ends, and which steps it passes over before."""

    hang_seconds: Annotated[float, Field(ge=10, le=86400)] = 45.0
    """The least time that a phase of a step may take before its rank counts as hung and the job ends. Five times what
    the phase has taken at most is allowed too, and ten minutes where it has not ended before."""
    max_skipped_steps: NonNegative = 10
    """Steps of the whole run that may be skipped before it ends: those whose loss or gradient norm is no finite number,
    and spikes. A skipped step takes its batch and its place in the schedule; weights, moments and routers stay."""
    spike_sigmas: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """A step is also skipped if its loss is above the mean of the last 128 losses by more than so many standard
    deviations of them."""


class Logging(Section):
    interval: Positive = 10
    """Optimizer steps between console lines. metrics.jsonl gets every step."""
    eval_interval: Positive | None = None
    """Optimizer steps between evaluations; the last step is always evaluated where there is validation data."""
    maps_interval: Positive | None = None
    """Optimizer steps between records of VHA's maps, per layer: distance from the identity, divergence between the
    groups, effective rank and largest singular value of B A^T, off-diagonal share of M."""
    eval_sequences: Positive = 64
    """Validation sequences per evaluation, the same ones each time."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str | None = None
    """Required when wandb is on."""
    visualdl: bool = False
    """Write the curves for VisualDL too, to `visualdl` in run.output."""


class Debug(Section):
    check_ranks_interval: Positive | None = None
    """Optimizer steps between checks that ranks which hold the same parameter hold the same values."""


class Recipe(Section):
    """One training run, complete."""

    run: Run
    model: Model
    data: Data
    optim: Optim
    schedule: Schedule
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    failure: Failure = Failure()
    logging: Logging = Logging()
    debug: Debug = Debug()

    @property
    def tokens_per_step(self) -> int:
        return self.data.global_batch_size * self.data.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps that fit into schedule.total_tokens."""
        return self.schedule.total_tokens // self.tokens_per_step

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.parallel.data * self.parallel.sharding

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one data-parallel rank per optimizer step."""
        return self.data.global_batch_size // (self.data.micro_batch_size * self.num_data_ranks)

    @property
    def num_ranks(self) -> int:
        """Processes the mesh needs."""
        degrees = self.parallel
        return degrees.tensor * degrees.pipeline * degrees.context * self.num_data_ranks
