"""One layer's feed-forward as it is stored: a SwiGLU, or a mixture of experts.

    PaddleFleet                                             ours
    mlp.up_gate_proj [D, 2F], columns [gate | up]           mlp.gate_proj, mlp.up_proj
    mlp.experts.E.up_gate_proj, .down_proj                  mlp.experts.*, stacked; under SonicMoE each is transposed
    mlp.grouped_gemm_experts.weight1 [E*D, 2F], .weight2    mlp.experts.*
    mlp.gate.weight [E, D]                                  mlp.gate, the router
    mlp.shared_experts                                      mlp.shared_expert

    export: mlp.{gate,up,down}_proj; block_sparse_moe.experts.E.{w1,w3,w2} (gate, up, down), block_sparse_moe.gate

Letters: D hidden, F width, E experts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from vha_paddle.config import MixtureOfExperts
from vha_paddle.errors import UserError
from vha_paddle.sources.upstream.config import UpstreamConfig
from vha_paddle.sources.upstream.heads import Parts
from vha_paddle.sources.upstream.kinds import Kind
from vha_paddle.sources.upstream.stored import Part, Stored

EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
"""What configurations call the number of experts."""

_EVERY = slice(None)
_GROUPED = "grouped_gemm_experts"
_MIXTURE_OF = {True: "mlp.", False: "block_sparse_moe."}  # by whether gate and up are fused, as PaddleFleet does
_EXPERT = re.compile(r"experts\.(0|[1-9][0-9]*)\.(.+)")
# Tensors of a router that leave it as it is when every value of them is the one given.
_NEUTRAL = {
    "gate.e_score_correction_bias": (0.0, "a selection bias per expert"),
    "e_score_correction_bias": (0.0, "a selection bias per expert"),
    "gate.routed_scaling_factor_param": (1.0, "a factor per expert"),
}


@dataclass(frozen=True)
class FeedForward:
    """What a layer's tensors say of its feed-forward."""

    intermediate_size: int
    """Width of the MLP, or of one expert."""
    num_experts: int = 0
    shared_size: int = 0


class FeedForwardReader:
    """Of one layer; `found` and `parts` (by name within the layer) are the result.

    Raises:
        UserError: a tensor is missing, has a shape that does not go with the others, or has no place in this package.
    """

    def __init__(self, stored: Stored, kind: Kind, prefix: str, hidden_size: int) -> None:
        """
        Args:
            prefix: of the layer, up to its number and a dot.
        """
        self.stored, self.kind, self.D = stored, kind, hidden_size
        self.parts: Parts = {}
        self.mixture = prefix + _MIXTURE_OF[kind.has_fused_gate_up]
        biases = [
            name for name in stored if name.startswith((prefix + "mlp.", self.mixture)) and name.endswith(".bias")
        ]
        if biases:
            raise self._refusal(biases[0], "no feed-forward of this package has biases")
        if self.mixture + "gate.weight" in stored:
            self.found = self._experts()
        else:
            self.found = FeedForward(self._swiglu(prefix + "mlp.", "mlp."))

    def _swiglu(self, theirs: str, ours: str) -> int:
        """A feed-forward of one piece; gives its width."""
        D = self.D
        if self.kind.is_out_in:
            F = self.stored.matrix(theirs + "gate_proj.weight")[0]
            for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
                self.stored.check_shape(f"{theirs}{name}.weight", shape, "gate_proj and the embedding need it")
                self.parts[f"{ours}{name}.weight"] = (
                    Part(self.stored.use(f"{theirs}{name}.weight"), is_transposed=True),
                )
            return F
        F = self.stored.matrix(theirs + "down_proj.weight")[0]
        self.stored.check_shape(theirs + "up_gate_proj.weight", (D, 2 * F), "down_proj and the embedding need it")
        self.stored.check_shape(theirs + "down_proj.weight", (F, D), "the embedding needs it")
        fused = self.stored.use(theirs + "up_gate_proj.weight")
        for half, name in enumerate(("gate_proj", "up_proj")):
            self.parts[f"{ours}{name}.weight"] = (Part(fused, (D, 2, F), (_EVERY, half)),)
        self.parts[f"{ours}down_proj.weight"] = (Part(self.stored.use(theirs + "down_proj.weight")),)
        return F

    def _experts(self) -> FeedForward:
        for name, (neutral, what) in _NEUTRAL.items():
            if self.mixture + name in self.stored:
                self._leave_neutral(self.mixture + name, neutral, what)
        if self.mixture + f"{_GROUPED}.weight1" in self.stored:
            num_experts, width = self._grouped_experts()
        else:
            num_experts, width = self._separate_experts()
        router = self.mixture + "gate.weight"
        is_out_in = self.stored.shape(router) != (self.D, num_experts) or self.D == num_experts
        self.stored.check_shape(
            router, (num_experts, self.D) if is_out_in else (self.D, num_experts), f"{num_experts} experts need it"
        )
        self.parts["mlp.gate.weight"] = (Part(self.stored.use(router), is_transposed=is_out_in),)
        shared = 0
        if self.mixture + "shared_experts.down_proj.weight" in self.stored:
            shared = self._swiglu(self.mixture + "shared_experts.", "mlp.shared_expert.")
        return FeedForward(width, num_experts, shared)

    def _leave_neutral(self, name: str, neutral: float, what: str) -> None:
        if not bool(np.all(self.stored.read(name) == neutral)):
            raise self._refusal(name, f"{what}, which no stock mixture has")
        self.stored.leave(name, f"{what}, {neutral:g} for all, which changes nothing")

    def _grouped_experts(self) -> tuple[int, int]:
        """Experts of which each weight lies below that of the one before; gives their number and width."""
        first, second = (f"{self.mixture}{_GROUPED}.weight{number}" for number in (1, 2))
        rows, columns = self.stored.matrix(first)
        D, E, F = self.D, rows // self.D, columns // 2
        self.stored.check_shape(first, (E * D, 2 * F), "the embedding needs it")
        self.stored.check_shape(second, (E * F, D), f"{first} needs it")
        for half, name in enumerate(("gate_proj", "up_proj")):
            part = Part(self.stored.use(first), (E, D, 2, F), (_EVERY, _EVERY, half))
            self.parts[f"mlp.experts.{name}"] = (part,)
        self.parts["mlp.experts.down_proj"] = (Part(self.stored.use(second), (E, F, D)),)
        return E, F

    def _separate_experts(self) -> tuple[int, int]:
        """Experts with tensors of their own; gives their number and width."""
        tails = [name.removeprefix(self.mixture) for name in self.stored if name.startswith(self.mixture)]
        numbers = sorted({int(match[1]) for match in map(_EXPERT.fullmatch, tails) if match})
        if not numbers or numbers != list(range(len(numbers))):
            raise UserError(
                f"{self.stored.path}: {self.mixture}experts are numbered {numbers[:4]}…; they must go from 0 without a "
                "gap; copy all files of the checkpoint"
            )
        before = [f"{self.mixture}experts.{number}." for number in numbers]
        F = self._written_apart(before) if self.kind.is_out_in else self._fused_apart(before)
        return len(numbers), F

    def _written_apart(self, before: list[str]) -> int:
        D, F = self.D, self.stored.matrix(before[0] + "w1.weight")[0]
        for theirs, ours, shape in (("w1", "gate", (F, D)), ("w3", "up", (F, D)), ("w2", "down", (D, F))):
            for expert in before:
                self.stored.check_shape(f"{expert}{theirs}.weight", shape, "the first expert and the embedding need it")
            entries = (self.stored.use(f"{expert}{theirs}.weight") for expert in before)
            self.parts[f"mlp.experts.{ours}_proj"] = tuple(Part(entry, is_transposed=True) for entry in entries)
        return F

    def _fused_apart(self, before: list[str]) -> int:
        D, down = self.D, self.stored.matrix(before[0] + "down_proj.weight")
        F, is_sonic = down[0], False
        if self.stored.shape(before[0] + "up_gate_proj.weight") != (D, 2 * F):  # the shapes never fit both ways
            F, is_sonic = down[1], True
        shapes = (
            {"up_gate_proj": (2 * F, D), "down_proj": (D, F)}
            if is_sonic
            else {"up_gate_proj": (D, 2 * F), "down_proj": (F, D)}
        )
        for name, shape in shapes.items():
            for expert in before:
                self.stored.check_shape(f"{expert}{name}.weight", shape, "the first expert and the embedding need it")
        view, axis = ((2, F, D), 0) if is_sonic else ((D, 2, F), 1)
        for half, name in enumerate(("gate_proj", "up_proj")):
            take = (_EVERY,) * axis + (half,)
            fused = (self.stored.use(f"{expert}up_gate_proj.weight") for expert in before)
            self.parts[f"mlp.experts.{name}"] = tuple(Part(entry, view, take, is_sonic) for entry in fused)
        entries = (self.stored.use(f"{expert}down_proj.weight") for expert in before)
        self.parts["mlp.experts.down_proj"] = tuple(Part(entry, is_transposed=is_sonic) for entry in entries)
        return F

    def _refusal(self, short: str, fault: str) -> UserError:
        return UserError(f"{self.stored.path}: {self.stored.name(short)}: {fault}; it cannot be read")


def mixture_of(found: FeedForward, config: UpstreamConfig) -> MixtureOfExperts:
    """The section of a mixture, with what the tensors do not tell from the configuration.

    Raises:
        UserError: it does not say it, or says something that no model here does.
    """
    for key in EXPERT_KEYS:
        config.agree(key, found.num_experts, "the experts' tensors")
    config.agree("moe_intermediate_size", found.intermediate_size, "the experts' tensors")
    if config.require("scoring_func", "how a router makes weights of its logits") != "softmax":
        raise config.refusal("scoring_func", "only softmax over all experts can be read")
    if config.get("topk_method") not in (None, "greedy"):
        raise config.refusal("topk_method", "only greedy, the largest scores, can be read")
    shared = config.get("n_shared_experts")
    if bool(shared) != bool(found.shared_size) and shared is not None:
        raise config.refusal(
            "n_shared_experts", "the tensors say otherwise; the configuration belongs to another model"
        )
    norm_topk_prob = config.flag("norm_topk_prob")
    if norm_topk_prob is None:
        config.require("norm_topk_prob", "whether the weights of a token's experts are made to sum to 1")
    extra = {}
    if config.get("router_aux_loss_coef") is not None:
        extra["router_aux_loss_coef"] = float(config.get("router_aux_loss_coef"))
    return MixtureOfExperts(
        num_experts=found.num_experts,
        num_experts_per_tok=config.count("num_experts_per_tok", "how many experts a token is sent to"),
        moe_intermediate_size=found.intermediate_size,
        norm_topk_prob=bool(norm_topk_prob),
        shared_expert_intermediate_size=found.shared_size,
        **extra,
    )
