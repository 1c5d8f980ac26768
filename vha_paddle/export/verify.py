"""Do the exported files compute what the checkpoint computes? A comparison of logits and its bound.

The reference is the checkpoint as trained, unfolded. The exported weights are read back from their files and
used in float32, so the difference is what the fold and the rounding to the file's dtype did to the weights,
and nothing else. It is measured against the largest logit of the reference, and the bound is

    float32     1e-5: the same products in another order.
    bfloat16    8 u = 3.1e-2, with u = 2^-8 the largest relative rounding of one weight;
    float16     8 u = 3.9e-3, with u = 2^-11.

The factor 8 is an estimate, not a theorem: rounding moves each weight by a different amount up to u, so the
effects add like random steps. Measured on folded models of 2 to 64 layers with random weights and maps of
trained size: 1 to 5 u, the same in both dtypes. Whether the rounding matters in use is a question for an
evaluation.

That bound is too wide to show that the fold is right where the maps have learned little: leaving Postmix out
may move the logits by less. So for bfloat16 and float16 the checkpoint is folded once more without rounding,
which must meet the bound of float32, and each weight of the files must be its weight rounded.

In a mixture of experts routers have near ties, and where round-off decides one the other way, even in float32, the
token is off by as much as experts differ. So the exported model is made to use the experts that the checkpoint chose,
with the probabilities that its own router gives them; how many of them it would have chosen itself is a figure of its
own. Measured after rounding to bfloat16: 0.993 and more. A wrong router agrees by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vha_paddle.errors import RunError
from vha_paddle.export.config import ExportDtype

Logits = Callable[[np.ndarray], np.ndarray]
"""Tokens `[B, S]`, int64, to logits `[B, S, V]`, float32."""

Agreement = Callable[[], float]
"""Once the exported model has run: the share of the checkpoint's choices of experts that it would have made too."""

MIN_EXPERT_AGREEMENT = 0.9
MAX_ROUNDING = 1.01  # times the largest; what the files are compared with is rounded too, to float32
ROUNDING: dict[ExportDtype, tuple[float, float]] = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}
"""Largest rounding of a number: relative to it, and absolute where it is smaller than the smallest normal one."""
BOUNDS: dict[ExportDtype, float] = {"float32": 1e-5, "bfloat16": 8 * 2.0**-8, "float16": 8 * 2.0**-11}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Difference of the exported model's logits from the checkpoint's."""

    num_tokens: int
    """Positions compared."""
    max_abs_difference: float
    mean_abs_difference: float
    scale: float
    """The reference's largest absolute logit."""
    relative: float
    """max_abs_difference / scale: what the bound is for."""
    top1_agreement: float
    """Share of positions where both rank the same token first."""
    bound: float
    expert_agreement: float | None = None
    """Share of the checkpoint's choices of experts that the exported model makes too; None where there are none."""
    fold_relative: float | None = None
    """As `relative`, of the fold before it is rounded; None where the files are float32."""
    largest_rounding: float | None = None
    """Of all weights the largest difference from the fold before rounding, over the largest that rounding makes."""

    @property
    def passed(self) -> bool:
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """What is not as it must be."""
        if not self.relative <= self.bound:
            return f"logits differ by {self.relative:.2e} of the largest, the bound is {self.bound:.1e}"
        if self.fold_relative is not None and not self.fold_relative <= BOUNDS["float32"]:
            return (
                f"before rounding, logits differ by {self.fold_relative:.2e} of the largest, the bound is "
                f"{BOUNDS['float32']:.1e}"
            )
        if self.largest_rounding is not None and not self.largest_rounding <= MAX_ROUNDING:
            return f"a weight is {self.largest_rounding:.2g} times as far from the fold as rounding takes it"
        if self.expert_agreement is not None and not self.expert_agreement >= MIN_EXPERT_AGREEMENT:
            return (
                f"the routers choose {self.expert_agreement:.1%} of the checkpoint's experts, at least "
                f"{MIN_EXPERT_AGREEMENT:.0%} are required"
            )
        return None

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def random_tokens(vocab_size: int, max_length: int) -> np.ndarray:
    """Tokens `[2, S]` to compare on, S up to 128: every id may come, and any text would need a corpus."""
    return np.random.default_rng(0).integers(0, vocab_size, (2, min(128, max_length)))


def verify_logits(
    reference: Logits,
    exported: Logits,
    tokens_BS: np.ndarray,
    dtype: ExportDtype,
    expert_agreement: Agreement | None = None,
) -> Verification:
    """Compare the two models on `tokens_BS`, the reference first; the caller decides what a breach means.

    Raises:
        RunError: logits of different shapes, or values that are not finite.
    """
    expected_BSV = np.asarray(reference(tokens_BS), np.float64)
    actual_BSV = np.asarray(exported(tokens_BS), np.float64)
    if expected_BSV.shape != actual_BSV.shape:
        raise RunError(f"verification: logits {list(actual_BSV.shape)}, the checkpoint's {list(expected_BSV.shape)}")
    if not (np.isfinite(expected_BSV).all() and np.isfinite(actual_BSV).all()):
        raise RunError("verification: logits that are not finite; the weights or the tokens are broken")
    difference_BSV = np.abs(actual_BSV - expected_BSV)
    scale = float(np.abs(expected_BSV).max())
    largest = float(difference_BSV.max())
    return Verification(
        num_tokens=tokens_BS.size,
        max_abs_difference=largest,
        mean_abs_difference=float(difference_BSV.mean()),
        scale=scale,
        relative=largest / scale if scale > 0 else largest,
        top1_agreement=float((actual_BSV.argmax(-1) == expected_BSV.argmax(-1)).mean()),
        bound=BOUNDS[dtype],
        expert_agreement=expert_agreement() if expert_agreement is not None else None,
    )
