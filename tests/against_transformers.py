"""A whole decoder of ours and one of transformers: the same weights, then losses, logits and every gradient."""

from __future__ import annotations

import numpy as np
import paddle
import torch

from tests.tolerances import assert_close
from vha_paddle.config import Model
from vha_paddle.model.decoder import build_decoder
from vha_paddle.model.microbatch import microbatches_of
from vha_paddle.parallel.mesh import Mesh


def to_theirs(name: str, array: np.ndarray) -> np.ndarray:
    """A linear weight is `[out, in]` there; the embedding is not a linear map, and a vector has no other side."""
    return array if array.ndim == 1 or name == "model.embed_tokens.weight" else array.T


def with_weights(theirs: torch.nn.Module, model: Model, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    """Their decoder in float64 with our weights, which are all that it has."""
    theirs = theirs.double()
    tensors = {name: torch.tensor(to_theirs(name, array)) for name, array in weights.items()}
    if model.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    theirs.load_state_dict(tensors, strict=True)
    return theirs


def assert_same_step(
    model: Model,
    weights: dict[str, np.ndarray],
    theirs: torch.nn.Module,
    tokens_BS: np.ndarray,
    labels_BS: np.ndarray,
    tolerance: float,
) -> None:
    """Loss, logits and gradients of one batch, ours in float64."""
    ours = build_decoder(model, Mesh(), seed=0, dtype="float64")
    parameters = ours.named_tensors()
    for name, parameter in parameters.items():
        parameter.set_value(paddle.to_tensor(weights[name]))
    loss = ours.forward_backward(microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh()), 1 / labels_BS.size)

    logits_BSV = theirs(torch.tensor(tokens_BS)).logits
    their_loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), torch.tensor(labels_BS).flatten())
    their_loss.backward()

    assert_close(ours(paddle.to_tensor(tokens_BS)).numpy(), logits_BSV.detach().numpy(), tolerance, "logits")
    assert_close(np.array(loss / labels_BS.size), their_loss.detach().numpy(), tolerance, "loss")
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert_close(to_theirs(name, parameter.grad.numpy()), gradients[name], tolerance, name)
