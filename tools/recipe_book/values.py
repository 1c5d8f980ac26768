"""A recipe's values, each with its origin, and how they are written as YAML.

Origins: `paper` the write-up states it; `upstream` the public research configs hold it; `derived` it follows by
arithmetic; `assumed` it is unknown, and the comment says why this choice. Nobody may read an assumption as the paper's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

LINE = 120
_INDENT = "  "
_GAP = 2  # spaces between the longest value of a section and its comments

Scalar = int | float | str | bool
Origin = Literal["paper", "upstream", "derived", "assumed"]


@dataclass(frozen=True)
class Value:
    """A value and where it comes from."""

    value: Scalar
    origin: Origin
    why: str = ""

    @property
    def comment(self) -> str:
        return f"{self.origin}: {self.why}" if self.why else self.origin


Section = Mapping[str, "Value | Section"]


def paper(value: Scalar, why: str = "") -> Value:
    return Value(value, "paper", why)


def upstream(value: Scalar, why: str = "") -> Value:
    return Value(value, "upstream", why)


def derived(value: Scalar, how: str) -> Value:
    return Value(value, "derived", how)


def assumed(value: Scalar, why: str) -> Value:
    return Value(value, "assumed", why)


def to_yaml(recipe: Mapping[str, Section]) -> str:
    """The sections as YAML, every value followed by its origin."""
    return "\n".join("\n".join([f"{name}:", *_lines(section, _INDENT), ""]) for name, section in recipe.items())


def plain(section: Section) -> dict[str, object]:
    """The values alone."""
    return {name: entry.value if isinstance(entry, Value) else plain(entry) for name, entry in section.items()}


def origins(section: Section) -> Iterator[Origin]:
    """The origin of each value."""
    for entry in section.values():
        if isinstance(entry, Value):
            yield entry.origin
        else:
            yield from origins(entry)


def scalar(value: Scalar) -> str:
    """A value as people write it: `2e-4`, `1e6`, `true`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value and not 1e-2 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return str(value)


def _lines(section: Section, indent: str) -> Iterator[str]:
    written = {name: f"{indent}{name}: {scalar(e.value)}" for name, e in section.items() if isinstance(e, Value)}
    column = max(map(len, written.values()), default=0) + _GAP
    for name, entry in section.items():
        if isinstance(entry, Value):
            comment = textwrap.wrap(entry.comment, LINE - column - len("# "))
            yield f"{written[name]:<{column}}# {comment[0]}"
            yield from (f"{'':<{column}}# {more}" for more in comment[1:])
        else:
            yield f"{indent}{name}:"
            yield from _lines(entry, indent + _INDENT)
