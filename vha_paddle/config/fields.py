"""Field types that the sections of a recipe share, and the section itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integral(value: Any) -> Any:
    """Let token counts be written `50e9`: YAML reads that as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_LIMIT = 2**63  # of a count: beyond it numpy and Paddle have no integer, and a float loses it

Positive = Annotated[int, Field(gt=0, lt=_LIMIT)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[int, Field(ge=0, lt=_LIMIT)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Tokens = Annotated[int, BeforeValidator(_integral), Field(gt=0, lt=_LIMIT)]
TokensOrZero = Annotated[int, BeforeValidator(_integral), Field(ge=0, lt=_LIMIT)]


class Section(BaseModel):
    """Strict (no conversions between types), closed (no unknown keys), immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
