"""VHA's maps measured on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from vha_paddle.checkpoint.save import host_array
from vha_paddle.maps import Figures, map_of, postmix_figures, premix_figures, record_of
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import answered_for
from vha_paddle.parallel.placement import Placement, Seat, info_of

Part = tuple[int, str, Placement, Seat, np.ndarray]
"""Layer and short name of a Postmix factor, and of what a rank holds of it the place and the values."""


def measure_maps(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> dict[str, list[Any]] | None:
    """One record of all layers' maps (see `vha_paddle.maps`), on the main rank; every rank takes part.

    A Premix is whole where it lies and is measured there, so that its numbers travel and not its values. Of Postmix
    the tensor ranks hold parts: N * R values in all, which travel.
    """
    layers: dict[int, Figures] = {}
    parts: list[Part] = []
    for parameter in answered_for(parameters, mesh):
        info = info_of(parameter)
        found = map_of(info.name)
        if found is None:
            continue
        layer, name = found
        values = host_array(parameter).astype(np.float64)
        if name == PREMIX:
            layers[layer] = premix_figures(values)
        else:
            parts.append((layer, name, info.placement, mesh.seat, values))
    gathered = mesh.objects((layers, parts))
    if not mesh.is_main:
        return None
    for theirs, _ in gathered:
        layers |= theirs
    factors = _assembled([part for _, theirs in gathered for part in theirs])
    for layer, pair in factors.items():
        layers[layer] = layers.get(layer, {}) | postmix_figures(pair[POSTMIX_A], pair[POSTMIX_B])
    return record_of(layers)


def _assembled(parts: Sequence[Part]) -> dict[int, dict[str, np.ndarray]]:
    """Layer to its two factors, whole."""
    factors: dict[int, dict[str, np.ndarray]] = {}
    for layer, name, placement, seat, values in parts:
        whole = factors.setdefault(layer, {}).setdefault(name, np.empty(placement.shape))
        placement.write_slice(whole, values, seat)
    return factors
