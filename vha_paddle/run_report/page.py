"""The page: a table and plots in one HTML file that needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vha_paddle.config.differences import differences
from vha_paddle.run_report.compare import Group
from vha_paddle.run_report.figures import Drawing, style_of

_STYLE = """
:root { color-scheme: light; --line: #d8dce2; --soft: #5b6470; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2128; background: #fff; margin: 2rem auto; max-width: 1400px;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { color: var(--soft); max-width: 80ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem; text-align: right; vertical-align: bottom; }
td { white-space: nowrap; } .long { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
th { overflow-wrap: anywhere; min-width: 7rem; }
th:first-child { text-align: left; white-space: nowrap; position: sticky; left: 0; background: #fff; }
td.best { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; list-style: none; margin: 0 0 1rem; padding: .5rem 0;
          position: sticky; top: 0; max-height: 25vh; overflow-y: auto; background: #fff;
          border-bottom: 1px solid var(--line); z-index: 1; }
.legend li { overflow-wrap: anywhere; } .legend svg { vertical-align: middle; margin-right: .4rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1.5rem 1rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; text-align: center; }
@media (max-width: 700px) { th:first-child { white-space: normal; max-width: 9rem; } }
"""

_LOSSES = {
    "loss_end": "training loss, end",
    "val_loss_end": "validation loss, last",
    "loss_equal_tokens": "training loss, equal tokens",
    "val_loss_equal_tokens": "validation loss, equal tokens",
    "loss_equal_flops": "training loss, equal FLOPs",
    "val_loss_equal_flops": "validation loss, equal FLOPs",
}
_USAGE = (
    ("mfu", "MFU, of the measured GEMM, %", 100.0, 1),
    ("peak_memory", "peak memory of a rank, GiB", 2.0**-30, 2),
    ("communication_share", "time in communication, %", 100.0, 1),
)
"""Figure of a group, what the table calls it, what it is multiplied by, and digits."""


def page(compared: dict[str, Any], groups: Sequence[Group], drawings: Iterable[Drawing]) -> str:
    """The HTML of a comparison.

    Args:
        compared: of `compare.comparison`.
        drawings: the figures, in their order.
    """
    figures = "\n".join(map(_figure, drawings))
    title = escape(", ".join(group.name for group in groups))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head>
<body>
<h1>{heading(groups)}</h1>
<p>Losses are in nats per token. Training losses are means over the last {compared["smoothing_tokens"]:,.0f} tokens or
so (exponential); validation losses are not smoothed. Equal tokens: {compared["equal_tokens"]:,}, what the shortest run
has. Equal FLOPs: {compared["equal_flops"]:.3g}, what the cheapest run has. Of several seeds: mean ± standard deviation.
The least of a row is bold; whether it differs from the others, the deviations tell. –: no record on both sides of that
point.</p>
{_schedules(compared["equal_tokens"], groups)}
{_repeated_seeds(groups)}
<h2>Comparison</h2>
<div class="wide">{_table(compared)}</div>
<h2>Curves</h2>
{_legend(groups)}
<div class="plots">
{figures}
</div>
<h2>What the recipes differ in</h2>
<div class="wide">{_differences(groups)}</div>
</body>
</html>
"""


def _schedules(equal_tokens: int, groups: Sequence[Group]) -> str:
    """A warning where the learning rates at equal tokens are at different places of their schedules: a loss falls at
    the end of one, whatever the model."""
    lengths = [group.runs[0].recipe.schedule.total_tokens for group in groups]
    if max(lengths) == min(lengths):
        return ""
    places = ", ".join(
        f"{escape(group.name)} at {equal_tokens / length:.0%}" for group, length in zip(groups, lengths, strict=True)
    )
    return (
        f"<p><strong>The schedules differ in length:</strong> at equal tokens, {places} of its schedule. Losses there "
        "are not comparable, for they fall as a learning rate does.</p>"
    )


def _repeated_seeds(groups: Sequence[Group]) -> str:
    """A warning of deviations that are too small: a run repeated with its seed differs from itself by round-off."""
    seeds = [[run.recipe.run.seed for run in group.runs] for group in groups]
    names = [group.name for group, used in zip(groups, seeds, strict=True) if len(set(used)) < len(used)]
    if not names:
        return ""
    return (
        f"<p><strong>A seed is there more than once</strong> in {escape(', '.join(names))}: its deviations say less "
        "than those of as many seeds.</p>"
    )


def heading(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    return f"{runs} run{'s' * (runs > 1)} of {len(groups)} model{'s' * (len(groups) > 1)}"


def _figure(drawing: Drawing) -> str:
    wide = ' class="wide"' if drawing.wide else ""
    return f"<figure{wide}><figcaption>{escape(drawing.title)}</figcaption>{drawing.svg}</figure>"


def _legend(groups: Sequence[Group]) -> str:
    """What colour and line are whose, for all figures at once: the names may be long and many."""
    dashes = {"solid": "", "dashed": "6 3", "dotted": "2 2", "dashdot": "7 3 2 3"}
    items = []
    for number, group in enumerate(groups):
        colour, line = style_of(number)
        stroke = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dashes[line]}"'
        mark = f'<svg width="32" height="10"><path d="M0 5H32" {stroke}/></svg>'
        items.append(f"<li>{mark}{escape(group.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(compared: dict[str, Any]) -> str:
    """A row per figure, a column per group."""
    groups = compared["groups"]
    rows = [
        _row("", [escape(group["name"]) for group in groups], head=True),
        _row("attention", [group["attention"] for group in groups]),
        _row("parameters", [f"{group['parameters']:,}" for group in groups]),
        _row("parameters that a token uses", [f"{group['active_parameters']:,}" for group in groups]),
        _row("KV cache, values per token", [f"{group['kv_cache_values_per_token']:,}" for group in groups]),
        _row("training FLOPs per token", [f"{group['flops_per_token']:.4g}" for group in groups]),
        _row("seeds", [", ".join(map(str, group["seeds"])) for group in groups]),
        _row("tokens trained", [", ".join(f"{tokens:,}" for tokens in group["tokens"]) for group in groups]),
    ]
    for key, label in _LOSSES.items():
        statistics = [group[key] for group in groups]
        if any(statistics):
            means = [statistic["mean"] for statistic in statistics if statistic]
            best = min(means) if len(means) > 1 else None
            rows.append(
                _row(label, [_shown(each) for each in statistics], bold=[_is(each, best) for each in statistics])
            )
    rows.append(_row("tokens per second", [_shown(group["tokens_per_second"], digits=0) for group in groups]))
    for key, label, scale, digits in _USAGE:
        if any(group[key] for group in groups):
            rows.append(_row(label, [_shown(group[key], digits, scale) for group in groups]))
    return f"<table>{''.join(rows)}</table>"


def _is(statistic: dict[str, Any] | None, best: float | None) -> bool:
    return statistic is not None and statistic["mean"] == best


def _shown(statistic: dict[str, Any] | None, digits: int = 4, scale: float = 1.0) -> str:
    if statistic is None:
        return "–"
    text = f"{statistic['mean'] * scale:,.{digits}f}"
    deviation = statistic["standard_deviation"]
    return text if deviation is None else f"{text} ± {deviation * scale:,.{digits}f}"


def _row(label: str, cells: Sequence[str], head: bool = False, bold: Sequence[bool] = ()) -> str:
    """One row; `label` and `cells` are HTML already."""
    tag = "th" if head else "td"
    marks = [' class="best"' if mark else "" for mark in bold] or [""] * len(cells)
    shown = "".join(f"<{tag}{mark}>{cell}</{tag}>" for cell, mark in zip(cells, marks, strict=True))
    return f'<tr><th scope="row">{label}</th>{shown}</tr>'


def _differences(groups: Sequence[Group]) -> str:
    """Every key in which some group's recipe is unlike the first one's, with the value of each group."""
    first, *others = (group.runs[0].recipe for group in groups)
    by_key: dict[str, dict[int, Any]] = {}
    for number, recipe in enumerate(others, 1):
        for key, before, after in differences(first, recipe):
            if not key.startswith("run."):
                by_key.setdefault(key, {0: before})[number] = after
    if not by_key:
        return "<p>Nothing but name, seed and directory.</p>"
    rows = [_row("", [escape(group.name) for group in groups], head=True)]
    for key, values in by_key.items():
        values_of = (escape(str(values.get(number, values[0]))) for number in range(len(groups)))
        cells = [f'<div class="long">{value}</div>' for value in values_of]
        rows.append(_row(escape(key), cells))
    return f"<table>{''.join(rows)}</table>"
