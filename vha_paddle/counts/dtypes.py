"""Bytes of a value."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16"]

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
