"""Which class of Hugging Face computes a model once it is folded, and why some models have none.

    what is served                                         class
    grouped heads with QK-norm, MLP; also with windows     Qwen3ForCausalLM
    grouped heads with QK-norm, experts                    Qwen3MoeForCausalLM
    grouped heads without QK-norm, MLP                     LlamaForCausalLM
    latent heads (mla), MLP                                DeepseekV3ForCausalLM, all layers dense
    latent heads (mla), experts and a shared one           DeepseekV2ForCausalLM

A model that none computes can be written as it is, or folded in part, under a class of our own (`unfolded_target`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vha_paddle.config import Attention, GroupedAttention, LatentAttention, Model, VirtualHeadAttention
from vha_paddle.counts import folded
from vha_paddle.errors import UserError
from vha_paddle.names import QWEN3, UNFOLDED, Naming, deepseek, expected_tensors, hf_tensors
from vha_paddle.sources.unfolded import ARCHITECTURE, MODEL_TYPE

Heads = GroupedAttention | VirtualHeadAttention


@dataclass(frozen=True)
class StockClass:
    """A class of transformers, as config.json names it."""

    architecture: str
    model_type: str


DENSE = StockClass("Qwen3ForCausalLM", "qwen3")
MIXTURE = StockClass("Qwen3MoeForCausalLM", "qwen3_moe")
LLAMA = StockClass("LlamaForCausalLM", "llama")
LATENT = StockClass("DeepseekV3ForCausalLM", "deepseek_v3")
LATENT_MIXTURE = StockClass("DeepseekV2ForCausalLM", "deepseek_v2")
OURS = StockClass(ARCHITECTURE, MODEL_TYPE)

LATENT_NORM_EPS = 1e-6  # of the latents' norms in transformers' DeepSeek classes, whatever rms_norm_eps is


@dataclass(frozen=True)
class Target:
    """What a directory is written as."""

    stock: StockClass
    """`OURS` where no stock class is meant."""
    model: Model
    """That is written: folded, folded in part, or as it was trained."""
    naming: Naming

    @property
    def is_stock(self) -> bool:
        return self.stock != OURS

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, as they are there, in the order in which they are written."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in expected_tensors(self.model).items():
            found |= hf_tensors(name, shape, self.naming)
        return found


def stock_class(model: Model, source: str) -> StockClass:
    """The class that serves the recipe's model.

    Args:
        model: as it was trained, before the fold.
        source: what an error calls the place that the model came from.

    Raises:
        UserError: there is none; the line names the key, the reason and what does work.
    """
    for obstacle in _obstacles(model):
        raise UserError(
            f"{source}: {obstacle}; --no-fold writes it as it was trained, which tools/evaluate.py reads, as it does a "
            "checkpoint of this package itself"
        )
    if isinstance(model.attention, LatentAttention):
        return LATENT if model.experts is None else LATENT_MIXTURE
    assert isinstance(model.attention, Heads), "anything else has no stock class"
    if not model.attention.qk_norm:
        return LLAMA
    return DENSE if model.experts is None else MIXTURE


def stock_target(model: Model, source: str) -> Target:
    """The folded model as a directory of its stock class.

    Raises:
        UserError: as `stock_class`.
    """
    stock, attention = stock_class(model, source), model.attention
    naming = deepseek(attention, model.tie_word_embeddings) if isinstance(attention, LatentAttention) else QWEN3
    return Target(stock, folded(model), naming)


def unfolded_target(model: Model, source: str) -> Target:
    """The model as it was trained, as a directory of our own class.

    Raises:
        UserError: it cannot be written so.
    """
    if model.experts is not None and model.experts.router_bias_update_rate:
        raise UserError(
            f"{source}: model.experts.router_bias_update_rate={model.experts.router_bias_update_rate}: experts are "
            "chosen with biases that the run remembers, and a model directory has no place for them; use the "
            "checkpoint itself"
        )
    return Target(OURS, model, UNFOLDED)


def partial_target(model: Model, source: str) -> Target:
    """The model folded as far as it folds, as a directory of our own class.

    Raises:
        UserError: nothing of it folds, all of it does and has a stock class, or it cannot be written so.
    """
    target = unfolded_target(folded(model), source)
    if target.model == model:
        raise UserError(f"{source}: nothing of this model folds; --no-fold writes it as it is")
    if not target.model.has_maps and not list(_obstacles(model)):
        raise UserError(f"{source}: all of this model folds, into a stock class; leave out --allow-partial")
    return target


def _obstacles(model: Model) -> Iterator[str]:
    for where, attention in model.attention_sections.items():
        yield from _attention_obstacles(attention, where)
    if isinstance(model.attention, LatentAttention):
        yield from _latent_obstacles(model, model.attention)
    elif isinstance(model.attention, Heads):
        yield from _grouped_obstacles(model, model.attention)


def _attention_obstacles(attention: Attention, where: str) -> Iterator[str]:
    if isinstance(attention, LatentAttention):
        return
    if not isinstance(attention, Heads):
        yield f"{where}.kind={attention.kind}: has nothing to fold, and no stock class computes it"
    elif attention.output_gate not in (False, "none"):
        value = str(attention.output_gate).lower()
        yield (
            f"{where}.output_gate={value}: no stock Qwen3 has a gate on the heads' outputs (--allow-partial folds what "
            "folds and writes the rest as our own class)"
        )


def _grouped_obstacles(model: Model, attention: Heads) -> Iterator[str]:
    yield from _mixture_obstacles(model)
    sliding = model.sliding_window
    if sliding is not None and isinstance(sliding.attention, Heads) and _form(sliding.attention) != _form(attention):
        yield (
            f"model.sliding_window.attention: sliding layers have {_form(sliding.attention)}, the others "
            f"{_form(attention)}, and Qwen3 has one form for all layers; give both the same num_attention_heads, "
            "num_key_value_heads, head_dim, qk_norm and attention_bias"
        )
    if not attention.qk_norm:
        yield from _llama_obstacles(model, attention)


def _mixture_obstacles(model: Model) -> Iterator[str]:
    experts = model.experts
    if experts is None:
        return
    if width := experts.shared_expert_intermediate_size:
        yield (
            f"model.experts.shared_expert_intermediate_size={width}: Qwen3-MoE has no shared expert, and Qwen2-MoE's "
            "has a gate of its own"
        )
    yield from _router_obstacles(model, "Qwen3-MoE")
    if model.sliding_window is not None:
        yield (
            "model.sliding_window with model.experts: Qwen3-MoE has one window for all layers, and here some see "
            "all; a window exports with intermediate_size, experts without a window"
        )


def _router_obstacles(model: Model, theirs: str) -> Iterator[str]:
    experts = model.experts
    assert experts is not None
    if experts.router_bias_update_rate:
        yield (
            f"model.experts.router_bias_update_rate={experts.router_bias_update_rate}: experts were chosen with a "
            f"bias on softmax probabilities, which {theirs}'s router does not have"
        )
    if experts.capacity_factor is not None:
        yield (
            f"model.experts.capacity_factor={experts.capacity_factor}: tokens pass by a full expert, and no expert of "
            f"{theirs} is ever full"
        )


def _llama_obstacles(model: Model, attention: Heads) -> Iterator[str]:
    if model.experts is not None:
        yield (
            "model.attention.qk_norm=false with model.experts: Qwen3-MoE always has QK-norm; Mixtral, which has none, "
            "comes nearest, but it always divides the chosen probabilities by their sum, has no biases and calls its "
            "tensors otherwise, and that export is not there"
        )
    if model.sliding_window is not None:
        yield (
            "model.attention.qk_norm=false with model.sliding_window: Llama, which has no QK-norm, has no windows, "
            "and Qwen2, which has both, always has biases on q, k and v and none on o"
        )
    if model.hidden_size % attention.num_attention_heads:
        yield (
            f"model.attention.qk_norm=false with num_attention_heads={attention.num_attention_heads}: transformers 5 "
            f"takes a Llama only where model.hidden_size={model.hidden_size} is a multiple of it"
        )


def _latent_obstacles(model: Model, attention: LatentAttention) -> Iterator[str]:
    """What DeepSeek-V2 and V3 compute otherwise: a line of every difference, for there are often several."""
    differences = []
    if model.rms_norm_eps != LATENT_NORM_EPS:
        differences.append(
            f"model.rms_norm_eps={model.rms_norm_eps:g}, where transformers norms the latents with {LATENT_NORM_EPS:g}"
        )
    if model.experts is not None:
        differences += _latent_mixture_differences(model, attention)
        differences += _router_obstacles(model, "DeepSeek-V2")
    if differences:
        yield f"model.attention.kind=mla: DeepSeek's classes differ: {'; '.join(differences)}"


def _latent_mixture_differences(model: Model, attention: LatentAttention) -> Iterator[str]:
    experts = model.experts
    assert experts is not None
    shared, width = experts.shared_expert_intermediate_size, experts.moe_intermediate_size
    if experts.norm_topk_prob:
        yield (
            "model.experts.norm_topk_prob=true, where DeepSeek-V2 leaves softmax probabilities as they are and V3 "
            "divides those of a sigmoid"
        )
    if not shared or shared % width:
        yield (
            f"model.experts.shared_expert_intermediate_size={shared}, where theirs is a multiple, not zero, of "
            f"moe_intermediate_size={width}"
        )
    if model.hidden_size % attention.num_attention_heads:
        yield (
            f"num_attention_heads={attention.num_attention_heads}, where transformers 5 takes a DeepSeek-V2 only if "
            f"model.hidden_size={model.hidden_size} is a multiple of it"
        )


def _form(attention: Heads) -> str:
    """What a fold leaves as it is."""
    return (
        f"{attention.num_attention_heads} query heads on {attention.num_key_value_heads} KV heads of width "
        f"{attention.head_dim} {'with' if attention.qk_norm else 'without'} QK-norm and "
        f"{'with' if attention.attention_bias else 'without'} biases"
    )
