"""From a YAML file and command-line overrides to a checked `Recipe`, or one clear error."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

from vha_paddle.config.check import check
from vha_paddle.config.explain import explain
from vha_paddle.config.schema import Recipe
from vha_paddle.errors import UserError

MAX_RECIPE_BYTES = 1 << 18  # a recipe is a page of text; this stops a wrong file from being parsed
_MAX_DEPTH = 32  # of sections and lists in each other
_MAX_CHARACTERS = 2_000  # of a key or a value


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read `path`, apply `section.key=value` overrides, validate every key and every rule.

    Raises:
        UserError: the file cannot be read, is not a recipe, or breaks a rule; an override is named where it, and not
            the file, is what does.
    """
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise UserError(f"{path}: larger than {MAX_RECIPE_BYTES} bytes, so not a recipe; give a YAML file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a recipe ({error}); give a YAML file") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a recipe: the top level must be sections such as `run:` and `model:`")
    return _overridden(values, overrides, source=str(path))


def recipe_from_dict(values: dict[str, Any], source: str) -> Recipe:
    """Validate plain values. `source` names where they came from in errors.

    Raises:
        UserError: an unknown key, a wrong type, or a broken rule.
    """
    try:
        return _checked(values)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _checked(values: dict[str, Any]) -> Recipe:
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, values)) from None
    check(recipe)
    return recipe


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A recipe with `section.key=value` overrides applied, checked again.

    Raises:
        UserError: as `load_recipe`.
    """
    return _overridden(recipe.model_dump(mode="json", exclude_none=True), overrides, source=recipe.run.name)


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out; `load_recipe` reads it back to the same recipe."""
    yaml = YAML()
    yaml.default_flow_style = False
    buffer = io.StringIO()
    yaml.dump(recipe.model_dump(mode="json", exclude_none=True), buffer)
    return buffer.getvalue()


def _parse(text: str, source: str) -> Any:
    # YAML 1.2: `3e-4` is a number, `off` is a word, a repeated key is an error
    try:
        _check_structure(text, source)
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = str(error.problem).split(" with value")[0]
        raise UserError(f"{source}: {problem}{where}: a key may stand once; remove one") from None
    except (YAMLError, ValueError, KeyError) as error:  # KeyError: `!!bool` before something else
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: not valid YAML: {reason}") from None


def _check_structure(text: str, source: str) -> None:
    """Refuse, before any value is made, what a few lines of text can make endless."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise UserError(f"{source}: sections lie more than {_MAX_DEPTH} deep in each other; write a flat recipe")
        if isinstance(event, ScalarEvent) and len(event.value) > _MAX_CHARACTERS:
            line = event.start_mark.line + 1
            raise UserError(
                f"{source}: the value at line {line} has more than {_MAX_CHARACTERS} characters; shorten it"
            )
        if isinstance(event, AliasEvent):
            raise UserError(
                f"{source}: alias *{event.anchor} at line {event.start_mark.line + 1}: a recipe says each value where "
                "it stands; write it out"
            )


def _overridden(values: dict[str, Any], overrides: Sequence[str], source: str) -> Recipe:
    changed = copy.deepcopy(values)
    for override in overrides:
        _apply(changed, override)
    try:
        return _checked(changed)
    except UserError as error:
        at_fault = source if _has_fault(values, str(error)) else _at_fault(str(error), overrides)
        raise UserError(f"{at_fault}: {error}") from None


def _has_fault(values: dict[str, Any], message: str) -> bool:
    try:
        _checked(values)
    except UserError as error:
        return str(error) == message
    return False


def _at_fault(message: str, overrides: Sequence[str]) -> str:
    """The override whose key a message begins with, the last of them; all where it begins with another."""
    key = re.split(r"[=:]", message)[0]
    given = {override: override.partition("=")[0] for override in overrides}
    named = [override for override, path in given.items() if f"{key}.".startswith(f"{path}.")]
    named = named[-1:] or [override for override, path in given.items() if path.startswith(f"{key}.")][-1:]
    return " ".join(f"override {override!r}" for override in named or overrides)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"override {override!r}: must be section.key=value, for example optim.lr=3e-4")
    *sections, last = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section")
    target[last] = _parse(text, f"override {override!r}")
