"""What two recipes differ in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vha_paddle.config.schema import Recipe


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """Dotted key, value before, value after, of every key whose values differ, in the order of the recipe.

    A key that has no place in one of them, such as one of another attention kind, is None there.
    """
    old, new = dict(_flat(before.model_dump(mode="json"))), dict(_flat(after.model_dump(mode="json")))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
