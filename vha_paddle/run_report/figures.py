"""Curves of runs as SVG. Imported only where a page is written: matplotlib takes a second to load.

A group of runs has one colour and line style in all figures, which the page's legend shows (`style_of`).
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from vha_paddle.run_report.compare import Group, smoothed
from vha_paddle.run_report.read import Run
from vha_paddle.tensors import GROUPS

_SALT = "vha_paddle"  # of the ids in an SVG, which are random otherwise: the same runs give the same bytes
_TINY = 1e-12
_FEW = 30  # points that are marked
_LINES = ("solid", "dashed", "dotted", "dashdot")
_LEAST_LABELLED = 0.05  # of a bar
_COLUMNS = 4  # of a panel

PHASES = {
    "data": "#9c755f",
    "forward": "#4e79a7",
    "backward": "#a0cbe8",
    "pipeline": "#4e79a7",
    "gradients": "#f28e2b",
    "optimizer": "#59a14f",
    "evaluation": "#b6992d",
    "maps": "#d4a6c8",
    "checkpoint": "#e15759",
    "log": "#bab0ac",
    "start": "#79706e",
}
"""Phases of training in their order, and their colours."""


@dataclass(frozen=True)
class Plot:
    """One set of axes."""

    key: str
    """Of the records."""
    title: str
    unit: str = ""
    x: str = "tokens"
    """Or `FLOPs`."""
    smooth: bool = False
    logarithmic: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure of the page."""

    title: str
    svg: str
    wide: bool = False
    """Whether it takes the whole width."""


PLOTS = (
    Plot("loss", "Training loss over tokens", "nats per token", smooth=True),
    Plot("loss", "Training loss over FLOPs", "nats per token", x="FLOPs", smooth=True),
    Plot("val_loss", "Validation loss over tokens", "nats per token"),
    Plot("val_loss", "Validation loss over FLOPs", "nats per token", x="FLOPs"),
    Plot("lr", "Learning rate"),
    Plot("grad_norm", "Gradient norm before clipping", logarithmic=True),
    Plot("tokens_per_second", "Speed", "tokens per second", smooth=True),
    Plot("mfu", "Model FLOPs utilisation, of the measured GEMM", smooth=True, percent=True),
    Plot("mfu_of_peak", "Model FLOPs utilisation, of the stated peak", smooth=True, percent=True),
    Plot("memory.resident", "Peak memory, resident", "bytes"),
    Plot("memory.reserved", "Peak memory, taken from the GPU", "bytes"),
    Plot("moe.worst_load", "Busiest expert over the mean"),
)
PANELS = {
    "Gradient norms before clipping, over tokens": tuple(
        Plot(f"grad_norms.{group}", group.replace("_", "-"), smooth=True, logarithmic=True) for group in GROUPS
    ),
    "VHA's maps over tokens, means over layers and groups": (
        Plot("maps.premix_distance", "Premix: |W − I|"),
        Plot("maps.premix_norm", "Premix: |W|"),
        Plot("maps.premix_rank", "Premix: effective rank"),
        Plot("maps.premix_divergence", "Premix: divergence"),
        Plot("maps.postmix_distance", "Postmix: |M − I|"),
        Plot("maps.postmix_sigma_max", "Postmix: largest σ"),
        Plot("maps.postmix_rank", "Postmix: effective rank"),
        Plot("maps.postmix_off_diagonal", "Postmix: off-diagonal", percent=True),
    ),
}


def style_of(number: int) -> tuple[str, str]:
    """Colour and line style of a group; ten colours, then the next style."""
    return to_hex(f"C{number % 10}"), _LINES[number // 10 % len(_LINES)]


def figures(groups: Sequence[Group], window: float) -> Iterator[Drawing]:
    """Every figure that a run has data for."""
    for plot in _with_data(PLOTS, groups):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        ax = figure.subplots()
        _draw(ax, plot, groups, window)
        ax.set(xlabel=plot.x, ylabel=plot.unit.replace("bytes", ""))
        yield Drawing(plot.title, _svg(figure))
    for title, plots in PANELS.items():
        if found := _with_data(plots, groups):
            yield Drawing(title, _panel(found, groups, window), wide=True)
    if any(run.time_shares() for group in groups for run in group.runs):
        yield Drawing("Where the time goes", _bars(groups), wide=True)


def _with_data(plots: Sequence[Plot], groups: Sequence[Group]) -> list[Plot]:
    runs = [run for group in groups for run in group.runs]
    return [plot for plot in plots if any(plot.key in run.curves for run in runs)]


def _panel(plots: Sequence[Plot], groups: Sequence[Group], window: float) -> str:
    """Small axes beside each other."""
    columns = min(_COLUMNS, len(plots))
    rows = -(-len(plots) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, plot in zip(axes, plots, strict=False):
        _draw(ax, plot, groups, window)
        ax.set_title(plot.title, fontsize="medium")
        ax.tick_params(labelsize="small")
        ax.xaxis.set_major_locator(MaxNLocator(4))
    for ax in axes[len(plots) :]:
        ax.set_axis_off()
    return _svg(figure)


def _draw(ax: Axes, plot: Plot, groups: Sequence[Group], window: float) -> None:
    for number, group in enumerate(groups):
        for run in group.runs:
            if plot.key in run.curves:
                _curve(ax, plot, run, number, window)
    if plot.logarithmic:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    if plot.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if plot.unit == "bytes":
        ax.yaxis.set_major_formatter(EngFormatter("B"))
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    ax.xaxis.set_major_formatter(EngFormatter())
    ax.grid(alpha=0.25)
    _leave_out_the_start(ax, plot, groups)


def _curve(ax: Axes, plot: Plot, run: Run, number: int, window: float) -> None:
    """One run; where the values jump, they stand faint behind their mean."""
    colour, line = style_of(number)
    scale = run.flops_per_token if plot.x == "FLOPs" else 1
    tokens, values = run.curves[plot.key]
    if plot.smooth:
        ax.plot(tokens * scale, values, color=colour, alpha=0.2, linewidth=0.6)
        tokens, values = smoothed((tokens, values), window)
    if plot.logarithmic:
        values = values.clip(_TINY)
    marker = "o" if len(values) <= _FEW else None
    ax.plot(tokens * scale, values, color=colour, linestyle=line, marker=marker, markersize=3, linewidth=1.3)


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
    if not later:
        return
    margin = 0.05 * (max(later) - min(later)) or 0.1
    ax.set_ylim(min(later) - margin, max(later) + margin)


def _bars(groups: Sequence[Group]) -> str:
    """A bar per group: the mean over its runs of each phase's share of the time."""
    figure = Figure(figsize=(12.8, 1.3 + 0.5 * len(groups)), layout="constrained")
    ax = figure.subplots()
    shares = [[run.time_shares() for run in group.runs if run.time_shares()] for group in groups]
    names = ["\n".join(textwrap.wrap(group.name, 40)) for group in groups]
    left = np.zeros(len(groups))
    for phase, colour in PHASES.items():
        widths = np.array([np.mean([run.get(phase, 0.0) for run in runs]) if runs else 0.0 for runs in shares])
        if not widths.any():
            continue
        bars = ax.barh(range(len(groups)), widths, left=left, color=colour, label=phase, height=0.7)
        labels = [f"{width:.0%}" if width >= _LEAST_LABELLED else "" for width in widths]
        ax.bar_label(bars, labels, label_type="center", fontsize="small")
        left += widths
    ax.set_yticks(range(len(groups)), names, fontsize="small")
    ax.margins(y=0.2 / len(groups))
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False, fontsize="small")
    return _svg(figure)


def _svg(figure: Figure) -> str:
    with matplotlib.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none"}):
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
