"""Curves of runs as SVG. Imported only where a page is written: matplotlib takes a second to load."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from vha_paddle.run_report.compare import Group, smoothed
from vha_paddle.run_report.read import Run

_SALT = "vha_paddle"  # of the ids in an SVG, which are random otherwise: the same runs give the same bytes
_TINY = 1e-12
_FEW = 30  # points that are marked


@dataclass(frozen=True)
class Plot:
    """One figure of the page."""

    key: str
    """Of the records."""
    title: str
    unit: str
    x: str = "tokens"
    """Or `FLOPs`."""
    smooth: bool = False
    logarithmic: bool = False


PLOTS = (
    Plot("loss", "Training loss over tokens", "nats per token", smooth=True),
    Plot("loss", "Training loss over FLOPs", "nats per token", x="FLOPs", smooth=True),
    Plot("val_loss", "Validation loss over tokens", "nats per token"),
    Plot("val_loss", "Validation loss over FLOPs", "nats per token", x="FLOPs"),
    Plot("lr", "Learning rate", ""),
    Plot("grad_norm", "Gradient norm before clipping", "", logarithmic=True),
    Plot("tokens_per_second", "Speed", "tokens per second", smooth=True),
    Plot("moe.worst_load", "Busiest expert over the mean", ""),
)


def figures(groups: Sequence[Group], window: float) -> Iterator[tuple[Plot, str]]:
    """Every plot that a run has data for, and its SVG."""
    for plot in PLOTS:
        if any(plot.key in run.curves for group in groups for run in group.runs):
            yield plot, _svg(plot, groups, window)


def _svg(plot: Plot, groups: Sequence[Group], window: float) -> str:
    with matplotlib.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        ax = figure.subplots()
        for number, group in enumerate(groups):
            for seed, run in enumerate(group.runs):
                if plot.key in run.curves:
                    _draw(ax, plot, run, f"C{number % 10}", group.name if seed == 0 else None, window)
        ax.set(title=plot.title, xlabel=plot.x, ylabel=plot.unit)
        if plot.logarithmic:
            ax.set_yscale("log")
        ax.xaxis.set_major_formatter(EngFormatter())
        ax.grid(alpha=0.25)
        ax.legend()
        _leave_out_the_start(ax, plot, groups)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _draw(ax: Axes, plot: Plot, run: Run, colour: str, label: str | None, window: float) -> None:
    """One run; where the values jump, they stand faint behind their mean."""
    scale = run.flops_per_token if plot.x == "FLOPs" else 1
    tokens, values = run.curves[plot.key]
    if plot.smooth:
        ax.plot(tokens * scale, values, color=colour, alpha=0.2, linewidth=0.6)
        tokens, values = smoothed((tokens, values), window)
    if plot.logarithmic:
        values = values.clip(_TINY)
    marker = "o" if len(values) <= _FEW else None
    ax.plot(tokens * scale, values, color=colour, label=label, marker=marker, markersize=3, linewidth=1.3)


def _leave_out_the_start(ax: Axes, plot: Plot, groups: Sequence[Group]) -> None:
    """Losses begin near log(vocabulary), far above all that is of interest: the axis shows the last nine tenths."""
    if plot.unit != "nats per token":
        return
    later = [
        float(value)
        for group in groups
        for run in group.runs
        if plot.key in run.curves
        for token, value in zip(*run.curves[plot.key], strict=True)
        if token >= run.tokens / 10
    ]
    margin = 0.05 * (max(later) - min(later)) or 0.1
    ax.set_ylim(min(later) - margin, max(later) + margin)
