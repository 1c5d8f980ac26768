"""What a model's routers remember from one optimizer step to the next, and what they count during one.

    aux loss   coefficient * E * sum_i f_i P_i     P: mean probability of the global batch, f: load, see below
    z loss     coefficient * mean of logsumexp(logits)^2
    bias       b_i += rate * sign(mean load - load_i), then less its mean; added to the probabilities to choose by

f is the share of token copies that the router sent to expert i in the global batch *before*, and 1 / E in the first
step. So it is known before a step begins, is the same in every layout and under every microbatch size, and what a
token adds to the loss depends on no other token: no rank waits for another in forward. Source of the forms:
arXiv 2101.03961 (aux), 2202.08906 (z), 2408.15664 (bias); the load of the step before is ours.

Letters: L layers, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from vha_paddle.config import MixtureOfExperts
from vha_paddle.ops.routing import Routing, route
from vha_paddle.parallel.mesh import Mesh

Array = np.ndarray[Any, Any]


class Balance:
    """The load and the biases of all layers; every rank has the same, whichever layers it holds."""

    def __init__(self, config: MixtureOfExperts, num_layers: int, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.scale = 0.0
        """What the summed loss of the tokens is multiplied by before it is differentiated."""
        shape = (num_layers, config.num_experts)
        # replaced and never written to, so that a checkpoint can be taken of them while training goes on
        self.load_LE: Array = np.zeros(shape, np.int64)
        """Copies sent to each expert in the step before; zero before the first."""
        self.bias_LE: Array | None = np.zeros(shape) if config.router_bias_update_rate else None
        self._counts_LE, self._probability_LE = np.zeros(shape, np.int64), np.zeros(shape)
        self._squares_L, self._dropped_L = np.zeros(num_layers), np.zeros(num_layers, np.int64)

    def route(self, layer: int, logits_TE: paddle.Tensor, counted: bool) -> Routing:
        """Choose the experts of some tokens; where they are counted, the losses join their gradient.

        Tensor ranks route the same tokens, and the gradient of the logits is summed over them.
        """
        config = self.config
        bias_E = None if self.bias_LE is None else self.bias_LE[layer]
        balance_E, z = np.zeros(config.num_experts), 0.0
        if counted:
            scale = self.mesh.part_inside(self.scale)
            balance_E = scale * config.router_aux_loss_coef * config.num_experts * self._shares()[layer]
            z = scale * config.router_z_loss_coef
        routing = route(logits_TE, config.num_experts_per_tok, config.norm_topk_prob, bias_E, balance_E, z)
        if counted:
            self._counts_LE[layer] += np.bincount(routing.experts_Tk.reshape(-1), minlength=config.num_experts)
            self._probability_LE[layer] += routing.probability_E
            self._squares_L[layer] += routing.squared_logsumexp
        return routing

    def count_dropped(self, layer: int, copies: int) -> None:
        """Of counted tokens, the copies that no expert takes."""
        self._dropped_L[layer] += copies

    def _shares(self) -> Array:
        """f of each layer."""
        total_L1 = self.load_LE.sum(axis=1, keepdims=True)
        even = np.full(self.load_LE.shape, 1 / self.config.num_experts)
        return np.divide(self.load_LE, total_L1, out=even, where=total_L1 > 0)

    def finish_step(self) -> dict[str, Any]:
        """Once per optimizer step, after its last backward, on every rank: turn what was counted into the next
        step's load and biases. Returns the step's figures, lists with a value per layer."""
        config, E = self.config, self.config.num_experts
        counted = np.column_stack([self._counts_LE, self._probability_LE, self._squares_L, self._dropped_L])
        summed = self.mesh.sum_over_tokens(counted)
        counts_LE = summed[:, :E].astype(np.int64)  # below 2^53 they are exact as float64
        num_tokens = int(counts_LE[0].sum()) // config.num_experts_per_tok
        mean_LE = summed[:, E : 2 * E] / num_tokens
        aux = config.router_aux_loss_coef * E * float((self._shares() * mean_LE).sum())
        z = config.router_z_loss_coef * float(summed[:, 2 * E].sum()) / num_tokens
        figures = load_figures(counts_LE) | {"aux_loss": aux, "z_loss": z}
        if config.capacity_factor is not None:
            figures["dropped"] = (summed[:, 2 * E + 1] / counts_LE.sum(axis=1)).tolist()
        self.load_LE = counts_LE
        if self.bias_LE is not None:
            self.bias_LE = updated_bias(self.bias_LE, counts_LE, config.router_bias_update_rate)
        self.discard_step()
        return figures

    def discard_step(self) -> None:
        """Forget what was counted; instead of `finish_step` where the optimizer step is skipped."""
        for array in (self._counts_LE, self._probability_LE, self._squares_L, self._dropped_L):
            array[...] = 0

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps, by canonical name."""
        state = {f"{_prefix(layer)}.load": load_E for layer, load_E in enumerate(self.load_LE)}
        if self.bias_LE is not None:
            state |= {f"{_prefix(layer)}.bias": bias_E for layer, bias_E in enumerate(self.bias_LE)}
        return state

    def restore(self, state: dict[str, Array]) -> None:
        """Put a state back, or a part of one, of the names and shapes of `state`."""
        state, layers = self.state() | state, range(len(self.load_LE))
        self.load_LE = np.stack([state[f"{_prefix(layer)}.load"] for layer in layers])
        if self.bias_LE is not None:
            self.bias_LE = np.stack([state[f"{_prefix(layer)}.bias"] for layer in layers])


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.gate"


def updated_bias(bias_LE: Array, load_LE: Array, rate: float) -> Array:
    """The biases after a step with this load."""
    moved = bias_LE + rate * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    return moved - moved.mean(axis=1, keepdims=True)


def load_figures(load_LE: Array) -> dict[str, Any]:
    """How even the load is: per layer the largest over the mean, and experts without a token; the worst layer."""
    worst_L = load_LE.max(axis=1) / load_LE.mean(axis=1)
    return {
        "max_load": worst_L.tolist(),
        "worst_load": float(worst_L.max()),
        "dead_experts": (load_LE == 0).sum(axis=1).tolist(),
    }
