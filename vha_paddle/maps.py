"""How far VHA's maps have come from the identity, in numbers. Numpy only.

Premix W_g, one matrix per key/value group g, and Postmix M = I + B A^T on the head axis; both start near the identity.

    premix_distance      |W_g - I|, Frobenius: the departure that training has learned, and that decay to I limits
    premix_norm          |W_g|: the distance to zero, where decay to zero pulls
    premix_rank          effective rank of W_g - I
    premix_divergence    mean |W_g - W_g'|^2 over the pairs of groups, over the mean |W_g - I|^2: 0 where all groups
                         have the same matrix (then VHA is no more than shared heads), 2 where they are independent
    postmix_distance     |M - I| = |B A^T|: the distance to the identity and to zero factors alike
    postmix_sigma_max    largest singular value of B A^T
    postmix_rank         effective rank of B A^T, at most R
    postmix_off_diagonal share of |M|^2 that lies off the diagonal: what heads take from other heads

The effective rank of a matrix with singular values s is exp(-sum p log p), p = s / sum s (Roy and Vetterli 2007): n for
n equal ones, and 0 here for the zero matrix. A Premix that is not square has a norm only. With SiLU inside Postmix the
figures are still those of B A^T.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vha_paddle.fold import postmix_matrix
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX

Figures = dict[str, Any]
"""Measure to its value: a number, a list with one number per group, or None where it is not defined."""

MEASURES = (
    "premix_distance",
    "premix_norm",
    "premix_rank",
    "premix_divergence",
    "postmix_distance",
    "postmix_sigma_max",
    "postmix_rank",
    "postmix_off_diagonal",
)
MEASURES_OF_GROUPS = ("premix_distance", "premix_norm", "premix_rank")
"""Those with a value for each group of a layer."""

_MAP_NAME = re.compile(rf"model\.layers\.([0-9]+)\.self_attn\.({PREMIX}|{POSTMIX_A}|{POSTMIX_B})")


def map_of(name: str) -> tuple[int, str] | None:
    """Layer and short name of a map by its canonical name; None for other tensors."""
    match = _MAP_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def premix_figures(premix_KXH: npt.ArrayLike) -> Figures:
    """The measures of one layer's Premix, `[K, X, H]`, X the width of a physical head."""
    premix = np.asarray(premix_KXH, np.float64)
    groups, rows, columns = premix.shape
    figures: Figures = {"premix_norm": np.linalg.norm(premix, axis=(1, 2)).tolist()}
    if rows != columns:
        return figures
    departure = premix - np.eye(columns)
    figures["premix_distance"] = np.linalg.norm(departure, axis=(1, 2)).tolist()
    figures["premix_rank"] = [effective_rank(singular_values(matrix)) for matrix in departure]
    mean_square = np.square(departure).sum() / groups
    if groups > 1 and mean_square > 0:
        # over all ordered pairs, sum |W_g - W_g'|^2 = 2 K sum |W_g - mean|^2
        pairs = 2 * np.square(premix - premix.mean(axis=0)).sum() / (groups - 1)
        figures["premix_divergence"] = float(pairs / mean_square)
    return figures


def postmix_figures(a_NR: npt.ArrayLike, b_NR: npt.ArrayLike) -> Figures:
    """The measures of one layer's Postmix from its factors, `[N, R]` each."""
    mixing = postmix_matrix(a_NR, b_NR)
    values = singular_values(mixing - np.eye(len(mixing)))
    off_diagonal = mixing - np.diag(np.diag(mixing))
    return {
        "postmix_distance": float(np.linalg.norm(values)),
        "postmix_sigma_max": float(values[0]),
        "postmix_rank": effective_rank(values),
        "postmix_off_diagonal": float(np.square(off_diagonal).sum() / np.square(mixing).sum()),
    }


def layer_figures(maps: Mapping[str, np.ndarray]) -> Figures:
    """The measures of the maps that one layer has, by their short names."""
    figures: Figures = {}
    if PREMIX in maps:
        figures |= premix_figures(maps[PREMIX])
    if POSTMIX_A in maps:
        figures |= postmix_figures(maps[POSTMIX_A], maps[POSTMIX_B])
    return figures


def singular_values(matrix: np.ndarray) -> np.ndarray:
    """Largest first."""
    return np.linalg.svd(matrix, compute_uv=False)


def effective_rank(singular_values: np.ndarray) -> float:
    """exp of the entropy of the normalised singular values; 0 for the zero matrix."""
    total = singular_values.sum()
    if total == 0:
        return 0.0
    shares = singular_values[singular_values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def record_of(layers: Mapping[int, Figures]) -> dict[str, list[Any]]:
    """What a line of metrics.jsonl holds: under `layer` the layers that have maps, under each measure their values."""
    numbers = sorted(layers)
    found = {measure for figures in layers.values() for measure in figures}
    values = {measure: [layers[number].get(measure) for number in numbers] for measure in MEASURES if measure in found}
    return {"layer": numbers, **values}


def means_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Each measure's mean over layers and groups, and the largest of the distances as `premix_distance_max`."""
    numbers = {measure: list(_numbers(record[measure])) for measure in MEASURES if measure in record}
    means = {measure: sum(values) / len(values) for measure, values in numbers.items() if values}
    if "premix_distance" in means:
        means["premix_distance_max"] = max(numbers["premix_distance"])
    return means


def summary(record: Mapping[str, Any]) -> str:
    """The means in a line."""
    means = means_of(record)
    texts = {
        "premix_distance": "|W-I| {:.3f}",
        "premix_distance_max": "(largest {:.3f})",
        "premix_norm": "|W| {:.3f}",
        "premix_divergence": "divergence {:.3f}",
        "postmix_distance": "|M-I| {:.3f}",
        "postmix_rank": "effective rank {:.2f}",
        "postmix_off_diagonal": "off-diagonal {:.2%}",
    }
    return "maps: " + "  ".join(text.format(means[measure]) for measure, text in texts.items() if measure in means)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif value is not None:
        yield value
