"""What one client answered about one model, beside what the reference did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.serving.clients import Outcome
from tests.tolerances import FLOAT32, relative_error


@dataclass(frozen=True)
class Found:
    """A cell of the table."""

    client: str
    model: str
    expected: Outcome
    outcome: Outcome
    error: str | None = None
    """What the client said, where it refused."""
    difference: float | None = None
    """Largest difference of a log-probability, over the reference's largest."""
    greedy_agreement: int | None = None
    """New tokens until the first that is another one."""
    num_new: int | None = None
    text_agrees: bool | None = None
    """Whether the client's tokenizer gives the reference's ids; None where it was not asked."""

    @property
    def passed(self) -> bool:
        return self.outcome == self.expected and self.text_agrees is not False

    @property
    def cell(self) -> str:
        if self.outcome == "refused":
            return "refused" if self.passed else "REFUSED"
        text = f"{self.difference:.1e} {self.greedy_agreement}/{self.num_new}"
        if self.outcome == "other model":
            text += " other model"
        if self.text_agrees is False:
            text += " other ids of a text"
        return text if self.passed else f"{text} FAILED"


def compare(
    client: str,
    model: str,
    expected: Outcome,
    answer: dict[str, Any],
    reference: dict[str, Any],
    bound: float = FLOAT32,
) -> Found:
    """One answer against the reference's.

    Log-probabilities after a greedy token that differs belong to another text and are not compared.
    """
    if "error" in answer:
        return Found(client, model, expected, "refused", error=answer["error"])
    ours, theirs = answer["greedy"], reference["greedy"]
    agreement = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    difference = relative_error(
        np.array(answer["prompt"] + answer["greedy_logprobs"][:agreement]),
        np.array(reference["prompt"] + reference["greedy_logprobs"][:agreement]),
    )
    is_same = difference <= bound and agreement == len(theirs)
    text_tokens = answer["text_tokens"]
    return Found(
        client,
        model,
        expected,
        "same" if is_same else "other model",
        difference=difference,
        greedy_agreement=agreement,
        num_new=len(theirs),
        text_agrees=None if text_tokens is None else text_tokens == reference["text_tokens"],
    )


def table(found: list[Found]) -> str:
    """Models by clients, in the order in which they were asked."""
    clients, models = (list(dict.fromkeys(names)) for names in zip(*((f.client, f.model) for f in found), strict=True))
    cells = {(each.model, each.client): each.cell for each in found}
    rows = [["", *clients]] + [[model, *(cells.get((model, client), "") for client in clients)] for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
