"""What a verification gives, with any result, without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Verified:
    """A verification that found what a test says."""

    fault: str | None = None

    def figures(self) -> dict[str, Any]:
        figures = dict.fromkeys(("max_abs_difference", "mean_abs_difference", "scale", "relative", "bound"), 9e-6)
        figures |= dict.fromkeys(("kl_mean", "kl_max", "top1_agreement"), 0.0)
        absent = dict.fromkeys(("text", "fold_relative", "cast", "expert_agreement", "checkpoint_loss", "export_loss"))
        return figures | absent | {"num_tokens": 8, "num_text_tokens": 0, "attention": {"export": [0.0], "fold": None}}

    def describe(self) -> str:
        return "verified"
