"""The measures of VHA's maps by their definitions, entry by entry. Imports numpy alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def frobenius(matrix: np.ndarray) -> float:
    return math.sqrt(sum(float(value) ** 2 for value in matrix.ravel()))


def effective_rank(matrix: np.ndarray) -> float:
    """exp of the entropy of the singular values over their sum, from the eigenvalues of the Gram matrix."""
    values = np.sqrt(np.clip(np.linalg.eigvalsh(matrix.T @ matrix), 0, None))
    kept = [value for value in values if value > 1e-7 * values.max()]  # the Gram matrix's round-off is below
    return math.exp(-sum(value / sum(kept) * math.log(value / sum(kept)) for value in kept))


def divergence(premix_KHH: np.ndarray) -> float:
    K, H = premix_KHH.shape[:2]
    pairs = [frobenius(premix_KHH[g] - premix_KHH[h]) ** 2 for g in range(K) for h in range(g)]
    departures = [frobenius(matrix - np.eye(H)) ** 2 for matrix in premix_KHH]
    return (sum(pairs) / len(pairs)) / (sum(departures) / K)


def layer_figures(premix_KHH: np.ndarray, a_NR: np.ndarray, b_NR: np.ndarray) -> dict[str, Any]:
    """Every measure of one layer."""
    H, N = premix_KHH.shape[-1], len(a_NR)
    added = sum(np.outer(b_NR[:, r], a_NR[:, r]) for r in range(a_NR.shape[1]))
    mixing = np.eye(N) + added
    squares = {(n, m): mixing[n, m] ** 2 for n in range(N) for m in range(N)}
    return {
        "premix_distance": [frobenius(matrix - np.eye(H)) for matrix in premix_KHH],
        "premix_norm": [frobenius(matrix) for matrix in premix_KHH],
        "premix_rank": [effective_rank(matrix - np.eye(H)) for matrix in premix_KHH],
        "premix_divergence": divergence(premix_KHH),
        "postmix_distance": frobenius(added),
        "postmix_sigma_max": math.sqrt(np.linalg.eigvalsh(added.T @ added).max()),
        "postmix_rank": effective_rank(added),
        "postmix_off_diagonal": sum(value for (n, m), value in squares.items() if n != m) / sum(squares.values()),
    }
