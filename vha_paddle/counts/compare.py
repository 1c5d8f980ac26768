"""What one or several models cost, as a table: a row for each figure, a column for each model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vha_paddle.counts.topics import Values

MAIN = {
    "cache": "bfloat16_bytes_per_token",
    "params": "total",
    "flops": "forward",
    "decode": "tokens_per_second_at_most",
}
"""The figure of a topic that models are compared by."""
_RATE = "tokens_per_second"
_MARK = " *"


def table(topic: str, found: Mapping[str, Values]) -> Iterator[str]:
    """Lines of the table; with several models the last row is the main figure over that of the first."""
    first, *others = found
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = {name: [_cell(name, values) for values in found.values()] for name in names}
    main = MAIN.get(topic)
    if others and main is not None:
        ratios = (float(values[main]) / float(found[first][main]) for values in found.values())
        rows[f"{main} over {first}"] = [f"{ratio:.3f} x" for ratio in ratios]
    label_width = max(map(len, rows))
    cells = list(zip(*rows.values(), strict=True))
    widths = [max(len(title), *map(len, column)) for title, column in zip(found, cells, strict=True)]
    yield _line("", label_width, found, widths)
    for name, row in rows.items():
        yield _line(name, label_width, row, widths)
    if any(not _fits(values) for values in found.values()):
        yield f"{_MARK.strip()} weights and caches do not fit one such GPU: a bound of its bandwidth that it cannot run"


def _line(label: str, label_width: int, cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([label.ljust(label_width), *padded])


def _fits(values: Values) -> bool:
    return values.get("fits_one_gpu") is not False


def _cell(name: str, values: Values) -> str:
    value = values.get(name)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    text = f"{value:,.{0 if isinstance(value, int) or value >= 1000 else 4}f}"
    return text + _MARK if name.startswith(_RATE) and not _fits(values) else text
