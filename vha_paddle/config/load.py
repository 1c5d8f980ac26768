"""From a YAML file and command-line overrides to a checked `Recipe`, or one clear error."""

from __future__ import annotations

import difflib
import io
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from vha_paddle.config.check import check
from vha_paddle.config.schema import Recipe
from vha_paddle.errors import UserError

MAX_RECIPE_BYTES = 1 << 20  # a recipe is a page of text; this stops a wrong file from being parsed


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read `path`, apply `section.key=value` overrides, validate every key and every rule.

    Raises:
        UserError: the file cannot be read, is not a recipe, or breaks a rule.
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
    for override in overrides:
        _apply(values, override)
    return recipe_from_dict(values, source=str(path))


def recipe_from_dict(values: dict[str, Any], source: str) -> Recipe:
    """Validate plain values. `source` names where they came from in errors.

    Raises:
        UserError: an unknown key, a wrong type, or a broken rule.
    """
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error, values)}") from None
    try:
        check(recipe)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return recipe


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A recipe with `section.key=value` overrides applied, checked again.

    Raises:
        UserError: as `load_recipe`.
    """
    values = recipe.model_dump(mode="json", exclude_none=True)
    for override in overrides:
        _apply(values, override)
    return recipe_from_dict(values, source=recipe.run.name)


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
        return YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = str(error.problem).split(" with value")[0]
        raise UserError(f"{source}: {problem}{where}: a key may stand once; remove one") from None
    except (YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: not valid YAML: {reason}") from None


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


def _explain(error: ValidationError, values: dict[str, Any]) -> str:
    """One line for the first fault: dotted key, value, rule, remedy."""
    fault = error.errors(include_url=False)[0]
    path = _without_tags(fault["loc"], values)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        siblings = _keys_at(path[:-1], values)
        return f"{key}: unknown key; {_suggest(path[-1], siblings)}"
    if fault["type"] == "missing":
        present = _lookup(path[:-1], values)
        unknown = [name for name in present if name not in _keys_at(path[:-1], values)] if present else []
        near = difflib.get_close_matches(path[-1], unknown, n=1)
        hint = f"; {near[0]!r} is there: is it a slip?" if near else "; add it"
        return f"{key}: required key is missing{hint}"
    if fault["type"] == "union_tag_not_found":
        return f"{key}.kind: required key is missing; use {fault['ctx']['discriminator']} as in the recipes"
    if fault["type"] == "union_tag_invalid":
        tag, expected = fault["ctx"]["tag"], fault["ctx"]["expected_tags"]
        names = [name.strip(" '") for name in expected.split(",")]
        return f"{key}.kind={tag}: must be one of {', '.join(names)}; {_suggest(tag, names)}"
    value = fault["input"]
    shown = "a section" if isinstance(value, dict) else repr(value)
    rule = fault["msg"].replace("Input should be", "must be").replace("Input", "it")
    return f"{key}={shown}: {rule}; correct the value"


def _without_tags(location: Sequence[int | str], values: dict[str, Any]) -> list[str]:
    """pydantic puts a union's tag into the path (`attention.vha.head_dim`); users never wrote it there."""
    path: list[str] = []
    here: Any = values
    for position, part in enumerate(location):
        is_tag = isinstance(here, dict) and part == here.get("kind") and part not in here
        if is_tag and position < len(location) - 1:
            continue
        path.append(str(part))
        here = here.get(part) if isinstance(here, dict) else None
    return path


def _lookup(path: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    here: Any = values
    for part in path:
        here = here.get(part, {}) if isinstance(here, dict) else {}
    return here if isinstance(here, dict) else {}


def _keys_at(path: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Keys the schema knows in the section at `path`, for the kind that is written there."""
    section: type[BaseModel] = Recipe
    here: Any = values
    for part in path:
        here = here.get(part) if isinstance(here, dict) else None
        candidates = _section_types(section.model_fields[part].annotation)
        kind = here.get("kind") if isinstance(here, dict) else None
        matching = [c for c in candidates if "kind" in c.model_fields and kind in _literals(c)]
        section = (matching or candidates)[0]
    return list(section.model_fields)


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for member in typing.get_args(annotation) for section in _section_types(member)]


def _literals(section: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(section.model_fields["kind"].annotation)


def _suggest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
