"""What may be wrong with a file: bytes changed or lost anywhere, and JSON that says what is not so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[bytes], bytes]

LIES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**32 - 1, 2**62, 2**64, 10**9, 10**400, 1.5, 1e300, float("nan"), float("inf")),
    *("", "x", "\ud800", "a\nb", "a\0b", "\x1b[31m", "..", "../x", "/etc/passwd", "9" * 5000),
    *([], [[]], [1], {}, {"a": [1]}, {"rope_theta": [1]}, [None] * 3, {"": ""}),
)
_WORDS = (b"null", b"-1", b"1e400", b"[]", b"{}", b'"x"', b"9" * 30, b"[[", b"*a", b"&a ", b"!!python/name:os.system ")


@st.composite
def bytes_damaged(draw: st.DrawFn) -> Damage:
    """Bytes changed, cut off, left out, or put in; the beginning of a file, where its sizes are, more often."""
    kind = draw(st.sampled_from(["change", "cut", "remove", "insert", "number", "word"]))
    place = draw(st.one_of(st.floats(0, 1), st.floats(0, 0.1)))
    values = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\xff" * 7 + b"\x7f"])))
    word = draw(st.sampled_from(_WORDS))

    def damage(raw: bytes) -> bytes:
        at = min(int(place * len(raw)), len(raw) - 1)
        put, left_out = {
            "change": (values[:1], 1),
            "cut": (b"", len(raw)),
            "remove": (b"", len(values)),
            "insert": (values, 0),
            "number": (values, len(values)),
            "word": (word, 2),
        }[kind]
        return raw[:at] + put + raw[at + left_out :]

    return damage


@st.composite
def values_forged(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One place of a JSON value taken out, or another value in it, or another key for it."""
    near_the_top = draw(st.booleans())
    number, lie = draw(st.integers(0, 10_000)), draw(st.sampled_from(LIES))
    kind = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))

    def forge(value: Any) -> Any:
        paths = [path for path in _paths(value) if len(path) <= 3 or not near_the_top]
        *above, last = paths[number % len(paths)]
        parent = value
        for key in above:
            parent = parent[key]
        if kind == "replace":
            parent[last] = lie
        else:
            taken = parent.pop(last)
            if kind == "rename" and isinstance(parent, dict):
                parent[str(lie)] = taken
        return value

    return forge


@st.composite
def json_forged(draw: st.DrawFn) -> Damage:
    """A JSON file, or lines of them, with a forged value."""
    forge = draw(values_forged())
    return lambda raw: json.dumps(forge(json.loads(raw))).encode() + b"\n"


@st.composite
def header_forged(draw: st.DrawFn) -> Damage:
    """A safetensors file with a forged header, or a forged list of parts in it, and the length that belongs to it."""
    forge, in_parts = draw(values_forged()), draw(st.booleans())

    def damage(raw: bytes) -> bytes:
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        metadata = header["__metadata__"]
        if in_parts and "parts" in metadata:
            metadata["parts"] = json.dumps(forge(json.loads(metadata["parts"])))
        else:
            header = forge(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + raw[start:]

    return damage


def damages(file: str) -> st.SearchStrategy[Damage]:
    """For a file of this name."""
    if file.endswith((".json", ".jsonl")):
        return st.one_of(json_forged(), json_forged(), bytes_damaged())
    return st.one_of(header_forged(), bytes_damaged()) if file.endswith(".safetensors") else bytes_damaged()


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*above, key)
        yield from _paths(item, (*above, key))
