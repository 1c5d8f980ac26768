"""The fits of a warm start are the best there are: against singular values, least squares, and every small change."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tolerances import FLOAT64, FLOAT64_FOLD, assert_close
from vha_paddle.fold import fold_premix
from vha_paddle.warm_start.factorise import OutputMoments, factor_queries, fit_postmix, pool_heads

D, P, K, H, N, R = 10, 3, 2, 4, 6, 2
RNG = np.random.default_rng(8)
W_Q = RNG.standard_normal((D, N * H))
INPUTS = RNG.standard_normal((40, D)) * np.geomspace(3, 0.1, D)
MOMENT = INPUTS.T @ INPUTS


def stacked(q_proj_DX: np.ndarray) -> np.ndarray:
    """Head n = g*P + i as the block of rows i and columns g."""
    rows = []
    for i in range(P):
        heads = [q_proj_DX[:, (g * P + i) * H : (g * P + i + 1) * H] for g in range(K)]
        rows.append(np.concatenate(heads, axis=1))
    return np.concatenate(rows)


def truncated(matrix: np.ndarray, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


@pytest.mark.parametrize("with_data", [False, True])
def test_the_product_of_physical_heads_and_premix_is_the_nearest_of_its_rank(with_data: bool) -> None:
    factors = factor_queries(W_Q, K, H, MOMENT if with_data else None)
    values, vectors = np.linalg.eigh(MOMENT)
    root = vectors * np.sqrt(values) @ vectors.T if with_data else np.eye(D)
    weighed = np.concatenate([root @ block for block in np.split(stacked(W_Q), P)])
    expected = truncated(weighed, H)
    made = stacked(fold_premix(factors.q_proj_DX, factors.premix_KHH))
    found = np.concatenate([root @ block for block in np.split(made, P)])
    tolerance = 1e-7 if with_data else FLOAT64  # the ridge
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    lost = np.linalg.norm(weighed - expected) ** 2 / np.linalg.norm(weighed) ** 2
    assert factors.error == pytest.approx(lost, rel=1e-6)


def test_data_weigh_the_directions_that_they_have() -> None:
    def error(moment: np.ndarray | None) -> float:
        factors = factor_queries(W_Q, K, H, moment)
        return float(np.linalg.norm(INPUTS @ (fold_premix(factors.q_proj_DX, factors.premix_KHH) - W_Q)))

    assert error(MOMENT) < 0.9 * error(None)


def test_queries_that_are_virtual_heads_already_are_found_exactly() -> None:
    physical, premix = RNG.standard_normal((D, P * H)), np.eye(H) + RNG.standard_normal((K, H, H))
    virtual = fold_premix(physical, premix)
    factors = factor_queries(virtual, K, H, None)
    assert_close(fold_premix(factors.q_proj_DX, factors.premix_KHH), virtual, FLOAT64, "W_Q")
    assert factors.error == pytest.approx(0, abs=1e-12)


def test_groups_that_agree_need_no_premix() -> None:
    physical = RNG.standard_normal((D, P * H))
    factors = factor_queries(np.concatenate([physical] * K, axis=1), K, H, None)
    for matrix in factors.premix_KHH:
        assert_close(matrix, np.eye(H), FLOAT64, "premix")
    assert_close(factors.q_proj_DX, physical, FLOAT64, "W_Q")


def test_no_rotation_and_no_scale_brings_premix_closer_to_the_identity() -> None:
    premix = factor_queries(W_Q, K, H, None).premix_KHH

    def distance(change: np.ndarray) -> float:
        return float(np.square(change @ premix - np.eye(H)).sum())

    for _ in range(200):
        skew = RNG.standard_normal((H, H)) * RNG.choice([0.01, 1.0])
        rotation = np.linalg.qr(np.eye(H) + skew - skew.T)[0]
        assert distance(rotation) >= distance(np.eye(H)) and distance(-rotation) >= distance(np.eye(H))
    for scale in (0.9, 0.99, 1.01, 1.1):
        assert distance(scale * np.eye(H)) > distance(np.eye(H))


def test_physical_heads_are_as_well_conditioned_as_the_sources() -> None:
    """The factor between two products is orthogonal up to a number, so it stretches no direction of W_Q."""
    factors = factor_queries(W_Q, K, H, None)
    physical = factors.q_proj_DX.reshape(D, P, H).transpose(1, 0, 2).reshape(-1, H)
    own = np.linalg.svd(physical, compute_uv=False)
    leading = np.linalg.svd(stacked(W_Q), compute_uv=False)[:H]
    assert_close(own / own[0], leading / leading[0], FLOAT64, "singular values")


def test_pooled_heads_are_means_of_neighbours() -> None:
    weight = RNG.standard_normal((D, 6 * H))
    expected = [weight[:, k * H : (k + 3) * H].reshape(D, 3, H).mean(axis=1) for k in (0, 3)]
    assert_close(pool_heads(weight, H, 2), np.concatenate(expected, axis=1), FLOAT64_FOLD, "pooled")


T = 60
HEADS = RNG.standard_normal((T, N, H))
W_O = RNG.standard_normal((N * H, D))
FRESH_A = 0.01 * RNG.standard_normal((N, R))


def mixed(mixing_NN: np.ndarray) -> np.ndarray:
    """sum_n (M y)_n W_O[n], head by head."""
    out = np.zeros((T, D))
    for n in range(N):
        for m in range(N):
            out += mixing_NN[n, m] * HEADS[:, m] @ W_O[n * H : (n + 1) * H]
    return out


def moments_of(out_TD: np.ndarray) -> OutputMoments:
    moments = OutputMoments.empty(N, H)
    for rows in np.array_split(np.arange(T), 3):
        moments.add(HEADS[rows], out_TD[rows], W_O)
    return moments


def missed(mixing_NN: np.ndarray, out_TD: np.ndarray) -> float:
    return float(np.square(out_TD - mixed(mixing_NN)).sum() / np.square(out_TD).sum())


def test_a_planted_postmix_is_found() -> None:
    planted = RNG.standard_normal((N, R)) @ RNG.standard_normal((R, N))
    factors = fit_postmix(moments_of(mixed(np.eye(N) + planted)), W_O, R, FRESH_A)
    assert np.abs(factors.b_NR @ factors.a_NR.T - planted).max() <= 1e-6 * np.abs(planted).max()
    assert factors.error < 1e-8  # the ridge


def test_postmix_of_full_rank_is_the_least_squares_solution() -> None:
    out = RNG.standard_normal((T, D))
    columns = [(HEADS[:, m] @ W_O[n * H : (n + 1) * H]).ravel() for n in range(N) for m in range(N)]
    solution = np.linalg.lstsq(np.stack(columns, axis=1), (out - mixed(np.eye(N))).ravel(), rcond=None)[0]
    factors = fit_postmix(moments_of(out), W_O, N, np.zeros((N, N)))
    found = factors.b_NR @ factors.a_NR.T
    assert np.abs(found - solution.reshape(N, N)).max() <= 1e-6 * np.abs(solution).max()


def test_a_low_rank_postmix_reports_its_error_and_no_small_change_lowers_it() -> None:
    out = mixed(np.eye(N) + RNG.standard_normal((N, N)))
    moments = moments_of(out)
    factors = fit_postmix(moments, W_O, R, FRESH_A)
    a, b = factors.a_NR, factors.b_NR
    best = missed(np.eye(N) + b @ a.T, out)
    assert factors.error == pytest.approx(best, rel=1e-6)
    assert factors.error_before == pytest.approx(missed(np.eye(N), out), rel=1e-6)
    assert best < factors.error_before
    full = fit_postmix(moments, W_O, N, np.zeros((N, N)))
    left, values, right = np.linalg.svd(full.b_NR @ full.a_NR.T)
    assert best <= missed(np.eye(N) + left[:, :R] * values[:R] @ right[:R], out)
    for _ in range(50):
        near = (b + 1e-2 * RNG.standard_normal(b.shape)) @ (a + 1e-2 * RNG.standard_normal(a.shape)).T
        assert missed(np.eye(N) + near, out) > best


def test_factors_are_balanced() -> None:
    factors = fit_postmix(moments_of(RNG.standard_normal((T, D))), W_O, R, FRESH_A)
    assert_close(factors.a_NR.T @ factors.a_NR, factors.b_NR.T @ factors.b_NR, FLOAT64, "Gram matrices")


def test_where_nothing_is_missed_postmix_starts_as_in_a_fresh_model() -> None:
    """With A and B both zero neither would ever have a gradient."""
    factors = fit_postmix(moments_of(mixed(np.eye(N))), W_O, R, FRESH_A)
    assert np.array_equal(factors.a_NR, FRESH_A)
    assert not factors.b_NR.any()
