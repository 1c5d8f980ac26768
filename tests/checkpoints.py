"""Checkpoints on disk without a training run: numpy writes the same directory that a run would."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests import weights as any_model
from tests.oracles import forward
from tests.oracles.spec import OracleSpec
from vha_paddle.checkpoint import layout
from vha_paddle.checkpoint.logical import Cut, cuts_metadata
from vha_paddle.config import MixtureOfExperts, Model, Recipe, VirtualHeadAttention, recipe_from_dict, recipe_to_yaml
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece
from vha_paddle.data.tokenizer_files import SENTENCEPIECE_FILE
from vha_paddle.tensor_file import write_tensors

STATE = layout.RunState(step=7, tokens=1792, samples=56, seed=3, data_fingerprint="none", version="0.0.9")

# Sizes that differ from each other, so that exchanged axes show.
SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 330,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rope_theta": 3e4,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.03,
    "tie_word_embeddings": True,
}
SMALL_VHA = {
    "kind": "vha",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "postmix_rank": 3,
}
SMALL_GROUPED = {"kind": "grouped", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


SMALL_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router_aux_loss_coef": 2e-3,
}
# Of 4 layers the second and the last see all, and the window is shorter than every test's sequence.
SMALL_HYBRID = {"num_hidden_layers": 4, "sliding_window": {"window": 5, "full_every": 2}}
SMALL_MIXTURE = {"intermediate_size": None, "experts": SMALL_EXPERTS}


def small_recipe(attention: Mapping[str, Any], **model: Any) -> Recipe:
    """A complete recipe of a tiny model; `model` overrides `SMALL_MODEL`."""
    values = {
        "run": {"name": "small", "seed": 3, "output": "runs/small"},
        "model": SMALL_MODEL | model | {"attention": dict(attention)},
        "data": {
            "train": "data/train",
            "tokenizer": "data/tokenizer.model",
            "sequence_length": 32,
            "global_batch_size": 8,
            "micro_batch_size": 8,
        },
        "optim": {"lr": 1e-3} | ({"decay_target": "zero"} if _has_maps(attention, model) else {}),
        "schedule": {"kind": "cosine", "total_tokens": 2560, "warmup_tokens": 256, "min_lr": 1e-4},
    }
    return recipe_from_dict(values, source="small_recipe")


def _has_maps(attention: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    sliding = (model.get("sliding_window") or {}).get("attention") or attention
    return "vha" in (attention["kind"], sliding["kind"])


def small_model(attention: Mapping[str, Any], **model: Any) -> Model:
    """The model section of `small_recipe`."""
    return small_recipe(attention, **model).model


def forward_spec(model: Model) -> forward.ForwardSpec:
    """A model of plain or virtual heads as the oracle of forward passes describes it."""
    layers = []
    for layer in range(model.num_hidden_layers):
        attention = model.attention_of(layer)
        layers.append(
            forward.LayerSpec(
                num_attention_heads=attention.num_attention_heads,
                num_key_value_heads=attention.num_key_value_heads,
                head_dim=attention.head_dim,
                window=model.window_of(layer),
                gate_after_postmix=attention.output_gate == "after_postmix",
            )
        )
    return forward.ForwardSpec(
        layers=tuple(layers),
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        num_experts_per_tok=model.experts.num_experts_per_tok if model.experts else 0,
        norm_topk_prob=model.experts.norm_topk_prob if model.experts else True,
    )


def oracle_spec(recipe: Recipe) -> OracleSpec:
    """The recipe's model as the oracles describe it."""
    model, attention = recipe.model, recipe.model.attention
    has_maps = isinstance(attention, VirtualHeadAttention)
    return OracleSpec(
        kind=attention.kind,
        hidden_size=model.hidden_size,
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        premix=has_maps,
        postmix_rank=attention.postmix_rank if has_maps else 0,
        qk_norm=attention.qk_norm,
        attention_bias=attention.attention_bias,
        num_hidden_layers=model.num_hidden_layers,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
    )


def trained_weights(recipe: Recipe, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights with every map at the size that training reaches."""
    weights = any_model.trained_weights(recipe.model, seed)
    return {name: array.astype(np.float32) for name, array in weights.items()}


@functools.cache
def small_tokenizer(vocab_size: int = 320) -> bytes:
    """A SentencePiece model trained on a few sentences of prose and code."""
    prose = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
    code = "def fox(dog):\n    if dog is None:\n        return 1\n"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.model"
        return train_sentencepiece([prose * 3, code * 3], vocab_size, path).model_bytes


def write_checkpoint(
    path: Path, recipe: Recipe, weights: Mapping[str, np.ndarray], tokenizer_model: bytes, num_files: int = 1
) -> Path:
    """Write `path` as a complete checkpoint holding `weights` as they are, right or wrong for the recipe.

    With several files, each holds equal rows of every tensor whose rows divide; the first holds the others whole.
    """
    path.mkdir(parents=True)
    for number in range(num_files):
        parts, cuts = {}, {}
        for name, array in weights.items():
            rows = len(array) // num_files
            if num_files > 1 and rows * num_files == len(array):
                parts[name] = array[number * rows : (number + 1) * rows]
                begin, rest = (number * rows, *[0] * (array.ndim - 1)), array.shape[1:]
                cuts[name] = Cut(array.shape, array.shape, begin, ((number + 1) * rows, *rest))
            elif number == 0:
                parts[name] = array
        specs = {name: (array.dtype, array.shape) for name, array in parts.items()}
        file = path / layout.tensor_file("model", number, num_files)
        write_tensors(file, specs, parts.values(), layout.TENSOR_METADATA | cuts_metadata(cuts))
    write_tensors(path / layout.tensor_file("optimizer", 0, 1), {}, [], layout.TENSOR_METADATA)
    if recipe.model.experts is not None:
        _write_router(path, recipe.model.num_hidden_layers, recipe.model.experts)
    (path / layout.RECIPE_FILE).write_text(recipe_to_yaml(recipe), encoding="utf-8")
    (path / SENTENCEPIECE_FILE).write_bytes(tokenizer_model)
    is_step = path.name.startswith("step-")
    layout.write_state(path, replace(STATE, step=int(path.name.removeprefix("step-"))) if is_step else STATE)
    layout.write_manifest(path, {file.name: layout.record_of(file) for file in path.iterdir()})
    return path


def _write_router(path: Path, num_layers: int, experts: MixtureOfExperts) -> None:
    """What the routers remember: the loads of the last step, and biases if they have any."""
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for layer in range(num_layers):
        arrays[f"model.layers.{layer}.mlp.gate.load"] = generator.integers(1, 99, experts.num_experts)
        if experts.router_bias_update_rate:
            arrays[f"model.layers.{layer}.mlp.gate.bias"] = generator.uniform(-0.2, 0.2, experts.num_experts)
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(path / layout.tensor_file("router", 0, 1), specs, arrays.values(), layout.TENSOR_METADATA)


@dataclass(frozen=True)
class Exported:
    """A checkpoint and what was exported from it."""

    recipe: Recipe
    weights: dict[str, np.ndarray]
    checkpoint: Path
    directory: Path
    report: dict[str, Any]
