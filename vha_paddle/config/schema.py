"""The recipe: every section and key of a training run, typed. Rules that join several keys are in `check.py`.

Field names are Hugging Face's where they have one. Values that follow from others (physical heads, steps,
tokens per step) are properties, never fields, so they cannot disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integral(value: Any) -> Any:
    """Let token counts be written `50e9`: YAML reads that as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Tokens = Annotated[int, BeforeValidator(_integral), Field(gt=0)]
TokensOrZero = Annotated[int, BeforeValidator(_integral), Field(ge=0)]


class Section(BaseModel):
    """Strict (no conversions between types), closed (no unknown keys), immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run: letters, digits, `.`, `_`, `-`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of initialisation, data order and dropout. Two runs that differ in it differ in all three."""
    output: str
    """Directory of checkpoints, metrics and the resolved recipe. Relative paths start where the command runs."""


class GroupedAttention(Section):
    """Multi-head, multi-query and grouped-query attention: one class, told apart by the head counts."""

    kind: Literal["grouped"]
    num_attention_heads: Positive
    """Query heads N."""
    num_key_value_heads: Positive
    """Key/value heads K: N is MHA, 1 is MQA."""
    head_dim: Positive
    """Width H of a head."""

    @property
    def query_group_size(self) -> int:
        """Query heads that read one KV head, N / K."""
        return self.num_attention_heads // self.num_key_value_heads


class VirtualHeadAttention(Section):
    """Virtual head attention (VHA). `num_attention_heads` counts the virtual heads: what is served."""

    kind: Literal["vha"]
    num_attention_heads: Positive
    """Virtual query heads N = P * K. The physical heads are P = N / K."""
    num_key_value_heads: Positive
    """Key/value heads K, one Premix each."""
    head_dim: Positive
    """Width H of a head."""
    postmix_rank: Positive
    """Rank R of Postmix, M = I + B A^T. The paper uses N / 4; N or more is full rank."""
    premix_init: Literal["scaled", "unscaled"] = "scaled"
    """Premix starts at I + noise * normal: `scaled` divides the noise by sqrt(head_dim) (upstream's code and the
    paper's Figure 2, ||W-I||_F = 1.13 at 128), `unscaled` does not (the paper's Table 12, 12.8)."""
    premix_init_noise: NonNegativeFloat = 0.1
    """The noise factor of `premix_init`."""
    postmix_init_std: PositiveFloat = 0.01
    """Standard deviation of A at the start. B starts at zero, so Postmix starts as the identity."""
    postmix_space: Literal["activation", "weight"] = "activation"
    """Where training applies Postmix: to the heads' outputs, or to W_O once per forward pass. The same function and
    gradients; `weight` saves no activation and adds no communication per token under tensor parallelism."""

    @property
    def num_physical_heads(self) -> int:
        """Query heads P that W_Q projects to; Premix makes K virtual heads of each."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def query_group_size(self) -> int:
        """Virtual query heads that read one KV head: the physical heads, P."""
        return self.num_physical_heads


Attention = Annotated[GroupedAttention | VirtualHeadAttention, Field(discriminator="kind")]


class Model(Section):
    architecture: Literal["qwen3"] = "qwen3"
    """Decoder of the Qwen3 architecture: RMSNorm, QK-norm, RoPE, SwiGLU, no biases."""
    vocab_size: Positive
    """Rows V of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: Positive
    """Width D of the residual stream."""
    intermediate_size: Positive
    """Width F of the MLP."""
    num_hidden_layers: Positive
    max_position_embeddings: Positive = 40960
    """Longest sequence the exported model promises to serve (tokens)."""
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 1e6
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of every projection and of the embedding at the start."""
    tie_word_embeddings: bool
    """Use the embedding as the output projection."""
    hidden_dropout: Fraction = 0.0
    """Share of each attention and MLP output that is dropped before it joins the residual stream, in training. Which
    values are dropped follows from run.seed, layer, sample, position and channel, so it is alike in every layout."""
    attention: Attention


class Data(Section):
    train: str
    """Prefix of the training set's `.bin` and `.idx` (see tools/prepare_data.py)."""
    validation: str | None = None
    """Prefix of the validation set; none means no evaluation."""
    tokenizer: str
    """The SentencePiece model the data was made with; copied into checkpoints and exports."""
    sequence_length: Positive
    """Tokens a training sample predicts, S."""
    global_batch_size: Positive
    """Sequences per optimizer step, over all ranks and microbatches."""
    micro_batch_size: Positive
    """Sequences of one forward pass on one data-parallel rank; the rest is gradient accumulation."""


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


class Precision(Section):
    compute: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations. AdamW keeps float32 master weights where this is lower. Paddle has no
    bfloat16 kernels on CPU."""


class Memory(Section):
    """What is computed again in backward rather than kept."""

    recompute: Literal["none", "selective", "full"] = "none"
    """`selective`: attention between its projections (norms, RoPE, scores and VHA's maps). `full`: every block."""


class Checkpoint(Section):
    interval: Positive | None = None
    """Optimizer steps between checkpoints; none means only the last step is saved."""
    keep: Positive = 2
    """Newest checkpoints kept; older ones are removed after a newer one is complete."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the newest complete checkpoint in run.output; `never` refuses to start over one."""
    asynchronous: bool = False
    """Training goes on as soon as the state is copied to host memory; the files are written behind it."""


class Logging(Section):
    interval: Positive = 10
    """Optimizer steps between console lines. metrics.jsonl gets every step."""
    eval_interval: Positive | None = None
    """Optimizer steps between evaluations; the last step is always evaluated where there is validation data."""
    eval_sequences: Positive = 64
    """Validation sequences per evaluation, the same ones each time."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str | None = None
    """Required when wandb is on."""


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
