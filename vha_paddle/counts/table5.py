"""The paper's Table 5 beside what this package counts: training GFLOPs per token, S = 4096.

The table's figures follow from an MLP of 5504, without the LM head and with scores over the full square; Qwen3-1.7B's
MLP is 6144 wide, so the table and the recipe do not describe the same model. Both are printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vha_paddle.counts.flops import FlopRule, training_flops
from vha_paddle.counts.shapes import TABLE5_INTERMEDIATE, attention_of, named, vha


@dataclass(frozen=True)
class Row:
    label: str
    printed: float
    """In the paper, GFLOPs."""
    table_width: float
    """Counted with the table's MLP width."""
    real_width: float
    """Counted with the model's own."""


def rows(rule: FlopRule, intermediate_size: int | str = TABLE5_INTERMEDIATE) -> list[Row]:
    """Every figure of the table that is known. `rule` and `intermediate_size` replace the table's own convention.

    Raises:
        UserError: a width that is none.
    """

    def giga(shape: str, attention: dict[str, Any], width: int | str | None) -> float:
        changes = {} if width is None else {"intermediate_size": width}
        return training_flops(named(shape, attention, **changes).model, rule) / 1e9

    def one(label: str, printed: float, attention: dict[str, Any]) -> Row:
        return Row(label, printed, giga("1.7B", attention, intermediate_size), giga("1.7B", attention, None))

    def saving(label: str, printed: float, shape: str, attention: dict[str, Any]) -> Row:
        # the feed-forward is the same on both sides, so its width does not matter
        saved = giga(shape, attention_of(shape, "gqa"), None) - giga(shape, attention, None)
        return Row(label, printed, saved, saved)

    return [
        one("1.7B GQA-8", 10.61, attention_of("1.7B", "gqa")),
        one("1.7B MHA-12", 9.91, attention_of("1.7B", "12-12")),
        one("1.7B VHA, rank 4", 9.78, attention_of("1.7B", "vha")),
        saving("1.7B GQA-8 less MHA-12", 0.70, "1.7B", attention_of("1.7B", "12-12")),
        saving("1.7B GQA-8 less VHA", 0.83, "1.7B", attention_of("1.7B", "vha")),
        saving("4B GQA-8 less VHA, rank 8", 1.86, "4B", attention_of("4B", "vha")),
        saving("4B GQA-8 less VHA, rank 4", 1.86, "4B", vha(32, 2, 4)),
    ]


def render(found: list[Row], intermediate_size: int | str) -> str:
    """The table as text, four decimals."""
    lines = [
        f"{'training GFLOPs per token, S = 4096':<40}{'paper':>10}{f'MLP {intermediate_size}':>12}{'real MLP':>12}"
    ]
    lines += [f"{row.label:<40}{row.printed:>10.2f}{row.table_width:>12.4f}{row.real_width:>12.4f}" for row in found]
    return "\n".join(lines)
