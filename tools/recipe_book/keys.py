"""The tables of docs/recipes.md: every key of a recipe, from the docstrings of its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vha_paddle.config import Recipe

_NULL = {"type": "null"}


def tables() -> str:
    """A heading and a table for every section."""
    schema = Recipe.model_json_schema()
    return "\n".join(
        part for name, prop in schema["properties"].items() for part in _sections(name, prop, schema["$defs"])
    )


def _sections(path: str, prop: dict[str, Any], defs: dict[str, Any]) -> Iterator[str]:
    """A heading and a table for each section that may stand at `path`, then those inside it."""
    members = [defs[name] for name in _references(prop)]
    for member in members:
        kind = member["properties"].get("kind", {}).get("const")
        heading = f"## {path}" if kind is None else f"## {path}, kind: {kind}"
        yield f"{heading}\n"
        if "description" in member:
            yield f"{_one_line(member['description'])}\n"
        yield "| key | value | default | |\n|---|---|---|---|\n" + "\n".join(_rows(member)) + "\n"
    for member in members:
        for name, inner in member["properties"].items():
            # an attention inside another section has the keys of model.attention
            if _references(inner) and (name != "attention" or path == "model"):
                yield from _sections(f"{path}.{name}", inner, defs)


def _rows(member: dict[str, Any]) -> Iterator[str]:
    required = member.get("required", [])
    for name, prop in member["properties"].items():
        if "const" in prop and name == "kind":
            continue
        default = "required" if name in required else f"`{_default(prop)}`"
        yield f"| `{name}` | {_values(prop)} | {default} | {_one_line(prop.get('description', ''))} |"


def _default(prop: dict[str, Any]) -> str:
    return _shown(prop.get("default"))


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def _references(prop: dict[str, Any]) -> list[str]:
    """Names of the sections that a key may hold."""
    options = _options(prop) + ([prop["items"]] if "items" in prop else [])
    found = [name for option in options for name in _references(option)]
    return [prop["$ref"].rsplit("/", 1)[1]] if "$ref" in prop else found


def _options(prop: dict[str, Any]) -> list[dict[str, Any]]:
    return prop.get("oneOf", prop.get("anyOf", []))


def _values(prop: dict[str, Any]) -> str:
    if "$ref" in prop:
        return "section"
    if "items" in prop:
        return f"list of {_values(prop['items'])}s"
    if "patternProperties" in prop:
        return " or ".join(f"{_values(value)}s by name" for value in prop["patternProperties"].values())
    if _options(prop):
        kinds = list(dict.fromkeys(_values(option) for option in _options(prop) if option != _NULL))
        may_be_null = _NULL in _options(prop) and kinds != ["section"]
        return " or ".join(kinds + ["`null`"] * may_be_null)
    if "enum" in prop or "const" in prop:
        return ", ".join(f"`{_shown(value)}`" for value in prop.get("enum", [prop.get("const")]))
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {prop[name]:.15g}" for name, sign in signs.items() if name in prop and prop[name] < 2**53]
    return " ".join([prop["type"], ", ".join(bounds)]).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
