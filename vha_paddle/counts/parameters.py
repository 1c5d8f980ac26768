"""Parameters: of the whole model, of one rank, and those that one token uses.

Letters: D hidden, V vocabulary, E experts, k experts of a token, t tensor degree, e expert degree.

How a tensor is held over t and e ranks stands in `vha_paddle/tensors.py`. The embedding and the head are split by
vocabulary, V/t. A tied head is the embedding and counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vha_paddle.config import Attention, Model
from vha_paddle.config.check import check_tensor_parallel
from vha_paddle.errors import UserError
from vha_paddle.tensors import TensorSpec, attention_tensors, embedding_tensor, end_tensors, mlp_tensors


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer, or of a rank's part of it."""

    attention: int
    """QK-norm and biases included."""
    experts: int
    """Routed experts; 0 where the feed-forward is an MLP."""
    dense_mlp: int
    """The rest of the feed-forward: the MLP, or the router and the shared expert."""
    norms: int
    """The two norms on the residual stream."""

    @property
    def mlp(self) -> int:
        return self.experts + self.dense_mlp

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.norms


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a model, or of one rank's part of it when there is one pipeline stage."""

    embedding: int
    layers: tuple[LayerParameters, ...]
    final_norm: int
    lm_head: int
    """0 where the head is tied to the embedding."""

    @property
    def attention(self) -> int:
        """Of all layers."""
        return sum(layer.attention for layer in self.layers)

    @property
    def mlp(self) -> int:
        """Of all layers, experts included."""
        return sum(layer.mlp for layer in self.layers)

    @property
    def experts(self) -> int:
        """Routed experts of all layers."""
        return sum(layer.experts for layer in self.layers)

    @property
    def non_embedding(self) -> int:
        """All but the embedding and the head."""
        return sum(layer.total for layer in self.layers) + self.final_norm

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.lm_head


def attention_parameters(attention: Attention, hidden_size: int, tensor: int = 1) -> dict[str, int]:
    """Parameters of one layer's attention on one rank, by tensor."""
    return _by_tensor(attention_tensors(attention, hidden_size, tensor), tensor)


def mlp_parameters(model: Model, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    """Parameters of one layer's feed-forward on one rank, by tensor."""
    return _by_tensor(mlp_tensors(model), tensor, expert)


def _by_tensor(specs: Iterable[TensorSpec], tensor: int, expert: int = 1) -> dict[str, int]:
    return {spec.name.removesuffix(".weight"): spec.local_size(tensor, expert) for spec in specs}


def parameters(model: Model, tensor: int = 1, expert: int = 1) -> Parameters:
    """Parameters of one of `tensor` times `expert` ranks.

    Raises:
        UserError: heads, widths or vocabulary do not divide by `tensor`, or the experts by `expert`.
    """
    check_tensor_parallel(model, tensor)
    _check_experts(model, expert)
    mlp = mlp_tensors(model)
    experts = sum(spec.local_size(tensor, expert) for spec in mlp if spec.is_expert)
    dense_mlp = sum(spec.local_size(tensor) for spec in mlp if not spec.is_expert)
    by_attention = {
        attention: sum(attention_parameters(attention, model.hidden_size, tensor).values())
        for attention in model.attentions
    }
    layers = (
        LayerParameters(
            attention=by_attention[model.attention_of(layer)],
            experts=experts,
            dense_mlp=dense_mlp,
            norms=2 * model.hidden_size,
        )
        for layer in range(model.num_hidden_layers)
    )
    final_norm, *heads = end_tensors(model)
    return Parameters(
        embedding=embedding_tensor(model).local_size(tensor),
        layers=tuple(layers),
        final_norm=final_norm.size,
        lm_head=sum(head.local_size(tensor) for head in heads),
    )


def active_parameters(model: Model) -> int:
    """Parameters that take part in one token's forward pass: all but the experts it is not sent to.

    Embedding and head count, as in the names of models ("30B-A3B").
    """
    whole = parameters(model)
    return whole.total - whole.experts + active_experts(model, whole.experts)


def active_experts(model: Model, count: int) -> int:
    """The part of `count`, over all routed experts, that falls to those of one token."""
    if model.experts is None:
        return count
    return count // model.experts.num_experts * model.experts.num_experts_per_tok


def _check_experts(model: Model, degree: int) -> None:
    if degree == 1:
        return
    if model.experts is None:
        raise UserError(f"expert-parallel degree {degree}: there is no model.experts to divide; use 1")
    if model.experts.num_experts % degree:
        raise UserError(
            f"expert-parallel degree {degree}: must divide model.experts.num_experts={model.experts.num_experts}; "
            "use a divisor"
        )
