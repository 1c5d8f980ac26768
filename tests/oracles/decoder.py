"""The whole decoder: embedding, pre-norm blocks, final norm, tied or untied head, mean cross-entropy.

    x = E[tokens]
    per layer: x = x + attention(rms_norm(x)),  x = x + swiglu(rms_norm(x)), or a mixture of experts
    logits = rms_norm(x) W_head, with W_head = E^T when tied

The attention of a layer is `spec.of_layer(layer)`.

Weights have canonical names and are `[in, out]`. Letters: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.oracles import ops
from tests.oracles.attention import attention_backward, attention_forward
from tests.oracles.moe import RouterMemory, moe_backward, moe_forward
from tests.oracles.spec import OracleSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MLP_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def attention_weights(weights: Mapping[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """One layer's attention weights under their short names."""
    prefix = f"model.layers.{layer}.self_attn."
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def decoder_logits(weights: Mapping[str, np.ndarray], tokens_BS: np.ndarray, spec: OracleSpec) -> np.ndarray:
    """Logits `[B, S, V]`."""
    return _forward(weights, tokens_BS, spec)[0]


def decoder_loss_and_gradients(
    weights: Mapping[str, np.ndarray],
    tokens_BS: np.ndarray,
    labels_BS: np.ndarray,
    spec: OracleSpec,
    routers: Sequence[RouterMemory] = (),
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Mean cross-entropy, logits `[B, S, V]`, and the loss's gradient for every weight.

    With experts, `routers` has each layer's memory; the balancing losses are in the gradients and not in the loss.

    `labels_BS[b, s]` is the token that position s shall predict (already shifted); `ops.IGNORED_LABEL` takes
    a position out of the mean.
    """
    logits_BSV, layers, final = _forward(weights, tokens_BS, spec, routers)
    loss, dlogits_BSV = ops.cross_entropy(logits_BSV, labels_BS)
    grads: dict[str, np.ndarray] = {}

    dhead_DV = np.einsum("bsd,bsv->dv", final["normed"], dlogits_BSV)
    dx_BSD = dlogits_BSV @ _head(weights, spec).T
    dx_BSD, grads[FINAL_NORM] = ops.rms_norm_backward(dx_BSD, final["norm"])
    for layer in reversed(range(spec.num_hidden_layers)):
        dx_BSD, layer_grads = _block_backward(dx_BSD, layers[layer])
        grads |= {f"model.layers.{layer}.{name}": grad for name, grad in layer_grads.items()}

    grads[EMBEDDING] = ops.embedding_backward(dx_BSD, tokens_BS, spec.vocab_size)
    if spec.tie_word_embeddings:
        grads[EMBEDDING] = grads[EMBEDDING] + dhead_DV.T
    else:
        grads[HEAD] = dhead_DV
    return loss, logits_BSV, grads


def _head(weights: Mapping[str, np.ndarray], spec: OracleSpec) -> np.ndarray:
    return weights[EMBEDDING].T if spec.tie_word_embeddings else weights[HEAD]


def _forward(
    weights: Mapping[str, np.ndarray], tokens_BS: np.ndarray, spec: OracleSpec, routers: Sequence[RouterMemory] = ()
) -> tuple[np.ndarray, list[dict[str, Any]], dict[str, Any]]:
    """Logits, one cache per block, and the cache of the final norm."""
    x_BSD = weights[EMBEDDING][tokens_BS]
    layers = []
    for layer in range(spec.num_hidden_layers):
        x_BSD, cache = _block_forward(x_BSD, weights, layer, spec, routers)
        layers.append(cache)
    normed_BSD, norm = ops.rms_norm(x_BSD, weights[FINAL_NORM], spec.rms_norm_eps)
    return normed_BSD @ _head(weights, spec), layers, {"normed": normed_BSD, "norm": norm}


def _block_forward(
    x_BSD: np.ndarray,
    weights: Mapping[str, np.ndarray],
    layer: int,
    spec: OracleSpec,
    routers: Sequence[RouterMemory],
) -> tuple[np.ndarray, dict[str, Any]]:
    prefix = f"model.layers.{layer}."
    gain_1, gain_2 = (
        weights[f"{prefix}input_layernorm.weight"],
        weights[f"{prefix}post_attention_layernorm.weight"],
    )
    normed, norm_1 = ops.rms_norm(x_BSD, gain_1, spec.rms_norm_eps)
    attended, attention = attention_forward(normed, attention_weights(weights, layer), spec.of_layer(layer))
    x_BSD = x_BSD + attended
    normed, norm_2 = ops.rms_norm(x_BSD, gain_2, spec.rms_norm_eps)
    if spec.experts is None:
        expanded, mlp = ops.swiglu(normed, *(weights[f"{prefix}mlp.{part}"] for part in MLP_PARTS))
    else:
        own = {name.removeprefix(f"{prefix}mlp."): w for name, w in weights.items() if name.startswith(f"{prefix}mlp.")}
        expanded, mlp = moe_forward(normed, own, spec.experts, routers[layer])
    return x_BSD + expanded, {"norm_1": norm_1, "attention": attention, "norm_2": norm_2, "mlp": mlp}


def _block_backward(dy_BSD: np.ndarray, cache: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gradient of the block's input, and those of its weights by their names within the layer."""
    grads: dict[str, np.ndarray] = {}
    if isinstance(cache["mlp"], dict):
        dnormed, dmixture = moe_backward(dy_BSD, cache["mlp"])
        grads |= {f"mlp.{name}": grad for name, grad in dmixture.items()}
    else:
        dnormed, *dmlp = ops.swiglu_backward(dy_BSD, cache["mlp"])
        grads |= {f"mlp.{part}": grad for part, grad in zip(MLP_PARTS, dmlp, strict=True)}
    dbranch, grads["post_attention_layernorm.weight"] = ops.rms_norm_backward(dnormed, cache["norm_2"])
    dx_BSD = dy_BSD + dbranch
    dnormed, dattention = attention_backward(dx_BSD, cache["attention"])
    grads |= {f"self_attn.{name}": grad for name, grad in dattention.items()}
    dbranch, grads["input_layernorm.weight"] = ops.rms_norm_backward(dnormed, cache["norm_1"])
    return dx_BSD + dbranch, grads
