"""Weights of any model at the scale that training reaches: at initialisation VHA's maps hide their own faults."""

from __future__ import annotations

import numpy as np

from tests.oracles.spec import BIAS_STD, PREMIX_DEPARTURE
from vha_paddle.config import Attention, Model
from vha_paddle.tensors import TensorSpec, attention_tensors, model_tensors


def trained_weights(model: Model, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a model under its canonical name, float64."""
    generator = np.random.default_rng(seed)
    return {spec.name: _trained(spec, generator) for spec in model_tensors(model)}


def trained_attention(attention: Attention, hidden_size: int, seed: int) -> dict[str, np.ndarray]:
    """The tensors of one `self_attn` under their names in it, float64."""
    generator = np.random.default_rng(seed)
    return {spec.name: _trained(spec, generator) for spec in attention_tensors(attention, hidden_size)}


def _trained(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    name, shape = spec.name.rpartition("self_attn.")[2], spec.shape
    normal = generator.standard_normal(shape)
    if name.endswith("_proj.bias"):
        return BIAS_STD * normal
    if len(shape) == 1:
        return np.exp(0.3 * normal)  # gains off 1 and positive
    if name == "premix":
        return np.eye(*shape[1:]) + PREMIX_DEPARTURE / np.sqrt(shape[-1]) * normal
    if name in ("postmix_a", "postmix_b"):
        return (shape[0] * shape[1]) ** -0.25 * normal  # rows of B A^T about as long as a row of the identity
    if name == "model.embed_tokens.weight":
        return normal
    return normal / np.sqrt(shape[-2])
