"""Figures of VHA's maps as PNG files. The one module that imports matplotlib; it draws into memory, on no display."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vha_paddle.files import atomic_write
from vha_paddle.map_report.read import MapReport
from vha_paddle.maps import means_of, singular_values
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX

MOST_HEATMAPS = 6
_DPI = 150
_MARGIN = 0.08  # of an axis, kept free around its points, so that no marker is cut
_HISTORY = {
    "premix_distance": "|W - I|, mean over layers and groups",
    "premix_divergence": "divergence of the groups (2: independent)",
    "postmix_distance": "|M - I|, mean over layers",
    "postmix_off_diagonal": "off-diagonal share of |M|²",
}


def write_figures(report: MapReport, out: Path) -> list[Path]:
    """Draw what the report has data for into `out`, replacing figures of the same names; returns their paths."""
    drawings: dict[str, tuple[Callable[[MapReport], Figure], bool]] = {
        "premix_distance.png": (_distances, "premix_distance" in report.record),
        "postmix_matrix.png": (_heatmaps, any(POSTMIX_A in maps for maps in report.maps.values())),
        "singular_values.png": (_singular_values, any(_has_spectrum(maps) for maps in report.maps.values())),
        "history.png": (_history, len(report.history) > 1),
    }
    written = []
    for name, (draw, has_data) in drawings.items():
        if has_data:
            with atomic_write(out / name) as file:
                FigureCanvasAgg(draw(report)).print_png(file)
            written.append(out / name)
    return written


def _distances(report: MapReport) -> Figure:
    """|W_g - I| of each layer, a line for each group."""
    figure, axes = _panels(1)
    layers, rows = report.record["layer"], report.record["premix_distance"]
    for group in range(max(len(row) for row in rows if row is not None)):
        values = [row[group] if row is not None and group < len(row) else np.nan for row in rows]
        axes[0].plot(layers, values, marker="o", label=f"group {group}")
    axes[0].set(title=f"Premix, step {report.step:,}", xlabel="layer", ylabel="|W - I| (Frobenius)")
    figure.legend(loc="outside right upper")
    return figure


def _heatmaps(report: MapReport) -> Figure:
    """M - I of up to six layers, spread from the first to the last, in one colour scale around zero.

    Beside the identity's 1 the departure would be invisible, so the identity is left out.
    """
    with_postmix = [layer for layer, maps in sorted(report.maps.items()) if POSTMIX_A in maps]
    count = min(MOST_HEATMAPS, len(with_postmix))
    chosen = [with_postmix[round(place)] for place in np.linspace(0, len(with_postmix) - 1, count)]
    departures = [report.maps[layer][POSTMIX_B] @ report.maps[layer][POSTMIX_A].T for layer in chosen]
    largest = max(float(np.abs(matrix).max()) for matrix in departures)
    scale = CenteredNorm(halfrange=largest or 1.0)  # B is zero before the first step
    figure, axes = _panels(count)
    for ax, layer, matrix in zip(axes, chosen, departures, strict=True):
        ax.imshow(matrix, cmap="RdBu_r", norm=scale)
        ax.set(title=f"M - I of layer {layer}", xlabel="head that is read", ylabel="head that takes")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(f"Postmix, step {report.step:,}: at most {largest:.3g}, beside the identity's 1")
    figure.colorbar(axes[0].images[0], ax=axes, label="M - I = B Aᵀ")
    return figure


def _singular_values(report: MapReport) -> Figure:
    """The singular values of W_g - I, and of B A^T: how many directions the maps use; later layers are darker."""
    layers = sorted(report.maps.items())
    premix = [[singular_values(matrix) for matrix in _departures(maps)] for _, maps in layers]
    postmix = [[_postmix_values(maps)] if POSTMIX_A in maps else [] for _, maps in layers]
    drawn = {"Premix: W - I, each layer and group": premix, "Postmix: B Aᵀ, each layer": postmix}
    drawn = {title: by_layer for title, by_layer in drawn.items() if any(by_layer)}
    figure, axes = _panels(len(drawn))
    for ax, (title, by_layer) in zip(axes, drawn.items(), strict=True):
        for order, spectra in enumerate(by_layer):
            shade = str(0.75 * (1 - order / max(1, len(by_layer) - 1)))
            for values in spectra:
                ax.plot(np.arange(1, len(values) + 1), values, color=shade, marker=".", linewidth=0.8)
        ax.set(title=title, xlabel="index (later layers darker)", ylabel="singular value")
    return figure


def _departures(maps: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """W_g - I of each group, where there is an identity."""
    for matrix in maps.get(PREMIX, []):
        if matrix.shape[0] == matrix.shape[1]:
            yield matrix - np.eye(len(matrix))


def _has_spectrum(maps: dict[str, np.ndarray]) -> bool:
    return POSTMIX_A in maps or any(True for _ in _departures(maps))


def _postmix_values(maps: dict[str, np.ndarray]) -> np.ndarray:
    """Of B A^T, as many as its rank can be."""
    return singular_values(maps[POSTMIX_B] @ maps[POSTMIX_A].T)[: maps[POSTMIX_A].shape[1]]


def _history(report: MapReport) -> Figure:
    """The means over the steps of the run."""
    means = [(step, means_of(record)) for step, record in report.history]
    shown = [measure for measure in _HISTORY if any(measure in figures for _, figures in means)]
    figure, axes = _panels(len(shown))
    for ax, measure in zip(axes, shown, strict=True):
        points = [(step, figures[measure]) for step, figures in means if measure in figures]
        ax.plot(*zip(*points, strict=True), marker=".")
        ax.set(title=_HISTORY[measure], xlabel="step")
    figure.suptitle(f"from the first record, step {means[0][0]:,}, to the last, step {means[-1][0]:,}")
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Axes in rows of at most three, two where that leaves no gap; their x counts layers, heads, indices or steps."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    for ax in axes[:count]:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.margins(_MARGIN)
    return figure, axes[:count]
