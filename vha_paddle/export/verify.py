"""Do the exported files compute what the checkpoint computes? What is measured, and the bounds.

Four models run on the same tokens, in float32 (`vha_paddle/proof/`):

    checkpoint   as trained, unfolded, from its best weights
    fold         what is folded, from the same weights in float64; rounded to float32 only to be run
    export       the files, read back
    cast         the checkpoint, unfolded, its weights rounded to the files' dtype

So the difference of the export from the checkpoint comes apart: FOLD ERROR, the fold from the checkpoint, and STORAGE
ERROR, the export from the fold; and the cast from the checkpoint is what anyone pays for that dtype, folded or not.
Differences of logits are measured against the checkpoint's largest logit. The bound of the export's is

    float32     1e-5: the same products in another order.
    bfloat16    8 u = 3.1e-2, with u = 2^-8 the largest relative rounding of one weight;
    float16     8 u = 3.9e-3, with u = 2^-11;
    fp8         8 u = 0.5, with u = 2^-4.

The factor 8 is an estimate, not a theorem: rounding moves each weight by a different amount up to u, so the
effects add like random steps. Measured on folded models of 2 to 64 layers with random weights and maps of
trained size: 1 to 5 u in the 16-bit dtypes, 1 to 3 u in fp8. Whether the rounding matters in use is a question for an
evaluation.

Those bounds are too wide to show that the fold is right where the maps have learned little: leaving Postmix out
may move the logits by less. So they decide nothing alone. The fold before rounding must meet the bound of float32; the
attention of each layer, given what reaches it in the checkpoint, must be the same folded and unfolded in float64; and
each weight of the files must be its weight of the fold, rounded.

In a mixture of experts routers have near ties, and where round-off decides one the other way, even in float32, the
token is off by as much as experts differ. So the other models are made to use the experts that the checkpoint chose,
with the probabilities that their own routers give them; how many of them the export would have chosen itself is a
figure of its own. Measured after rounding to bfloat16: 0.993 and more. A wrong router agrees by chance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vha_paddle.export.config import ExportDtype

BUILT_IN = "built in"
"""What a verification calls the text that comes with this package."""
MIN_EXPERT_AGREEMENT = 0.9
MAX_ROUNDING = 1.01  # times the largest; what the files are compared with may be rounded too, to float32
FOLDED_ATTENTION_BOUND = 1e-10  # of float64
BOUNDS: dict[ExportDtype, float] = {
    "float32": 1e-5,
    "bfloat16": 8 * 2.0**-8,
    "float16": 8 * 2.0**-11,
    "fp8": 8 * 2.0**-4,
}


@dataclass(frozen=True)
class Difference:
    """One model's logits beside those of another, its reference."""

    max_abs: float
    mean_abs: float
    relative: float
    """max_abs over the largest absolute logit of the reference."""
    kl_mean: float
    """KL(reference || other) in nats, over the positions."""
    kl_max: float
    top1_agreement: float
    """Share of positions where both rank the same token first."""


@dataclass(frozen=True)
class AttentionErrors:
    """Of each layer, the difference of what its attention adds to the residual stream, over the largest of that. Both
    attentions are given what reaches the layer in the checkpoint, so that errors do not accumulate."""

    export: tuple[float, ...]
    """From the checkpoint."""
    fold: tuple[float, ...] | None
    """From the checkpoint, both in float64."""
    cast: tuple[float, ...] | None
    """From the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Difference of the exported model from the checkpoint."""

    dtype: ExportDtype
    num_tokens: int
    """Positions compared."""
    text: str | None
    """Where those of them that are text come from; None where all are random."""
    num_text_tokens: int
    """Of the positions; the others are random ids."""
    scale: float
    """The checkpoint's largest absolute logit."""
    export: Difference
    """From the checkpoint: what the bound is for."""
    fold: Difference | None
    """The fold before rounding from the checkpoint; None where nothing is folded."""
    storage: Difference
    """The export from the fold, or from the checkpoint where nothing is folded."""
    cast: Difference | None
    """The checkpoint in the files' dtype from the checkpoint; None for float32."""
    attention: AttentionErrors
    largest_rounding: float
    """Of all weights the largest difference from the fold before rounding, over the largest that rounding makes."""
    largest_rounding_tensor: str
    """Which one that is, by our name."""
    config_differences: tuple[str, ...] = ()
    """What config.json says of the model and the checkpoint does not, as far as few tokens may not show it."""
    checkpoint_loss: float | None = None
    """Mean cross-entropy on the text in nats per token; None without one."""
    export_loss: float | None = None
    expert_agreement: float | None = None
    """Share of the checkpoint's choices of experts that the exported model makes too; None where there are none."""

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    @property
    def passed(self) -> bool:
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """What is not as it must be: the first thing, from the one that says most of where the fault is."""
        if self.config_differences:
            return self.config_differences[0]
        layer, error = _worst(self.attention.fold or (0.0,))
        if not error <= FOLDED_ATTENTION_BOUND:
            return (
                f"the fold is wrong: before rounding, the attention of layer {layer} differs by {error:.2e}, the bound "
                f"is {FOLDED_ATTENTION_BOUND:.0e}"
            )
        if self.fold is not None and not self.fold.relative <= BOUNDS["float32"]:
            return (
                f"before rounding, logits differ by {self.fold.relative:.2e} of the largest, the bound is "
                f"{BOUNDS['float32']:.1e}"
            )
        if not self.largest_rounding <= MAX_ROUNDING:
            return (
                f"{self.largest_rounding_tensor}: a weight is {self.largest_rounding:.2g} times as far from the fold "
                "as rounding takes it"
            )
        if not self.export.relative <= self.bound:
            layer, error = _worst(self.attention.export)
            return (
                f"logits differ by {self.export.relative:.2e} of the largest, the bound is {self.bound:.1e}; of the "
                f"layers' attentions {layer} differs most, by {error:.2e}"
            )
        if self.expert_agreement is not None and not self.expert_agreement >= MIN_EXPERT_AGREEMENT:
            return (
                f"the routers choose {self.expert_agreement:.1%} of the checkpoint's experts, at least "
                f"{MIN_EXPERT_AGREEMENT:.0%} are required"
            )
        return None

    def figures(self) -> dict[str, Any]:
        """JSON values, as `fold_report.json` has them: what the fields say, and

        max_abs_difference, mean_abs_difference, relative, kl_mean, kl_max, top1_agreement: those of `export`
        fold_relative: of `fold`, None where nothing is folded
        bound: what `relative` may be
        passed
        """
        flat = asdict(self.export)
        flat = {f"{name}_difference" if name.endswith("_abs") else name: value for name, value in flat.items()}
        return (
            asdict(self)
            | flat
            | {
                "fold_relative": None if self.fold is None else self.fold.relative,
                "bound": self.bound,
                "passed": self.passed,
            }
        )

    def describe(self) -> str:
        """The figures in a few lines."""
        lines = [
            f"{'logits':<28}{'largest':>10}{'of scale':>10}{'mean KL':>10}{'max KL':>10}{'top 1':>8}",
            _row("export from checkpoint", self.export),
        ]
        if self.fold is not None:
            lines += [_row("  fold error", self.fold), _row("  storage error", self.storage)]
        if self.cast is not None:
            lines.append(_row(f"{self.dtype} cast, unfolded", self.cast))
        lines.append(f"scale {self.scale:.3g}; {self.num_tokens:,} positions; allowed {self.bound:.1e} of scale")
        for name, errors in (("export", self.attention.export), ("fold, float64", self.attention.fold)):
            if errors is not None:
                layer, error = _worst(errors)
                lines.append(f"attention, {name}: at most {error:.2e}, in layer {layer}")
        lines.append(
            f"weights: at most {self.largest_rounding:.3f} times what rounding makes ({self.largest_rounding_tensor})"
        )
        if self.checkpoint_loss is not None and self.export_loss is not None:
            lines.append(
                f"loss on text ({self.text}): checkpoint {self.checkpoint_loss:.6f}, export {self.export_loss:.6f}"
            )
        if self.expert_agreement is not None:
            lines.append(f"experts that both choose: {self.expert_agreement:.2%}")
        if self.passed:
            lines.append("passed: all bounds hold")
        return "\n".join(lines)


def _worst(errors: tuple[float, ...]) -> tuple[int, float]:
    """The layer with the largest error, and the error; one that is no number is the largest."""
    layer = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
    return layer, errors[layer]


def _row(name: str, difference: Difference) -> str:
    return (
        f"{name:<28}{difference.max_abs:>10.2e}{difference.relative:>10.2e}{difference.kl_mean:>10.2e}"
        f"{difference.kl_max:>10.2e}{difference.top1_agreement:>8.2%}"
    )
