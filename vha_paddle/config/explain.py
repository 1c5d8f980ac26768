"""What is wrong with the values of a recipe, in one line: dotted key, value, rule, remedy."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from vha_paddle.config.schema import Recipe

_NAMES_OF_GROUPED = ("mha", "mqa", "gqa")  # one kind, told apart by its head counts
_FORMS = ("prefix", "sets")  # tags of data.train and data.validation
_EXPONENTS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}


def explain(error: ValidationError, values: dict[str, Any]) -> str:
    """One line for the first fault of a recipe's `values`."""
    fault = error.errors(include_url=False)[0]
    path = _without_tags(fault["loc"], values)
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_place_of(path, values)}"
    if fault["type"] == "missing":
        present = _lookup(path[:-1], values)
        unknown = [name for name in map(str, present) if name not in _keys_at(path[:-1], values)]
        near = difflib.get_close_matches(path[-1], unknown, n=1)
        hint = f"; {near[0]!r} is there: is it a slip?" if near else "; add it"
        return f"{key}: required key is missing{hint}"
    if fault["type"] == "union_tag_not_found":
        return f"{key}.kind: required key is missing; use {fault['ctx']['discriminator']} as in the recipes"
    if fault["type"] == "union_tag_invalid":
        tag, expected = fault["ctx"]["tag"], fault["ctx"]["expected_tags"]
        names = [name.strip(" '") for name in expected.split(",")]
        is_grouped = str(tag).lower() in _NAMES_OF_GROUPED and "grouped" in names
        remedy = (
            "use grouped, whose head counts tell MHA, MQA and GQA apart" if is_grouped else _suggest(str(tag), names)
        )
        return f"{key}.kind={tag}: must be one of {', '.join(names)}; {remedy}"
    value = fault["input"]
    shown = "a section" if isinstance(value, dict) else repr(value)
    rule = fault["msg"].replace("Input should be", "must be").replace("Input", "it")
    return f"{key}={shown}: {rule}; {_correction(fault, key)}"


def _correction(fault: Any, key: str) -> str:
    """The remedy for a value of the wrong type or outside its bounds."""
    value = fault["input"]
    if fault["type"] == "literal_error" and isinstance(value, str):
        near = _near(value, re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
        if near is not None:
            return f"did you mean {near}?"
    count = re.fullmatch(r"([0-9.]+) ?([kmbgt])", value.lower()) if isinstance(value, str) else None
    if count is not None and key.endswith("_tokens"):
        return f"write {count[1]}e{_EXPONENTS[count[2]]}"
    return "correct the value"


def _place_of(path: Sequence[str], values: dict[str, Any]) -> str:
    """Where a key that is unknown at `path` belongs, or what else is known there."""
    *sections, key = path
    siblings = _keys_at(sections, values)
    others = [section for section in _sections_at(sections, values) if key in section.model_fields]
    kinds = [kind for section in others for kind in _literals(section)]
    if kinds:
        return f"it belongs to kind {' and '.join(kinds)}; remove it, or change {'.'.join([*sections, 'kind'])}"
    elsewhere = [known for known in _known_paths(Recipe, values) if known.rpartition(".")[2] == key]
    if elsewhere and _near(key, siblings) is None:
        return f"did you mean {' or '.join(elsewhere)}?"
    return _suggest(key, siblings)


def _known_paths(section: type[BaseModel], values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that the schema knows, within the sections that are there."""
    for key, field in section.model_fields.items():
        yield f"{prefix}{key}"
        here = values.get(key)
        types = _section_types(field.annotation)
        if types and (isinstance(here, dict) or not field.is_required()):
            yield from _known_paths(_of_kind(types, here), here if isinstance(here, dict) else {}, f"{prefix}{key}.")


def _without_tags(location: Sequence[int | str], values: dict[str, Any]) -> list[str]:
    """pydantic puts a union's tag into the path (`attention.vha.head_dim`, `data.train.sets.0.weight`); users never
    wrote it there."""
    path: list[str] = []
    here: Any = values
    for position, part in enumerate(location):
        is_kind = isinstance(here, dict) and part == here.get("kind") and part not in here
        if is_kind and position < len(location) - 1:
            continue
        if part in _FORMS and path[:1] == ["data"] and not (isinstance(here, dict) and part in here):
            continue
        path.append(str(part))
        here = _item(here, str(part))
    return path


def _item(here: Any, part: str) -> Any:
    """What a section, or a list of them, has at a part of a path; None if nothing."""
    if isinstance(here, list) and part.isdecimal():
        return here[int(part)]
    return here.get(part) if isinstance(here, dict) else None


def _lookup(path: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    here: Any = values
    for part in path:
        here = _item(here, part)
    return here if isinstance(here, dict) else {}


def _keys_at(path: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Keys the schema knows in the section at `path`, for the kind that is written there."""
    return list(_of_kind(_sections_at(path, values), _lookup(path, values)).model_fields)


def _sections_at(path: Sequence[str], values: dict[str, Any]) -> list[type[BaseModel]]:
    """What the section at `path` may be: one type, or one for each kind."""
    found: list[type[BaseModel]] = [Recipe]
    for position, part in enumerate(path):
        if part.isdecimal():  # one of a list, whose sections are found already
            continue
        section = _of_kind(found, _lookup(path[:position], values))
        found = _section_types(section.model_fields[part].annotation)
    return found


def _of_kind(types: Sequence[type[BaseModel]], here: Any) -> type[BaseModel]:
    """The one of `types` that has the kind which is written in a section; the first where none is."""
    kind = here.get("kind") if isinstance(here, dict) else None
    return next(
        (section for section in types if "kind" in section.model_fields and kind in _literals(section)), types[0]
    )


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for member in typing.get_args(annotation) for section in _section_types(member)]


def _literals(section: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(section.model_fields["kind"].annotation)


def _near(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that is most like a word, whatever the case of its letters."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def _suggest(word: str, known: Sequence[str]) -> str:
    near = _near(word, known)
    return f"did you mean {near}?" if near is not None else f"known here: {', '.join(known)}"
