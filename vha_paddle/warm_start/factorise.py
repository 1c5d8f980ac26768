"""The algebra of a warm start: grouped-query weights to virtual heads. Numpy only.

A grouped layer has N query heads on K' key/value heads. Its virtual head counterpart has N virtual heads on K, K a
divisor of K', made of P = N / K physical ones.

Key/value heads. Head g is the mean of its run of K'/K neighbours, of W_K and of W_V. RoPE turns all of them alike, so
it commutes with the mean; QK-norm does not, and stays behind it with the gain it has.

Query heads. Source head j becomes virtual head n = j = g*P + i, because the heads that read the pooled key/value head
g are then the ones that read its members. With S[g,i] the source's block `[D, H]`, wanted are W_Q[i] and Premix T[g]
with W_Q[i] T[g] near S[g,i]. All physical heads share T, so this is one factorisation: stack the blocks as S with a
row for each (i, d) and a column for each (g, h), `[P*D, K*H]`; then S ~ W T with H columns in the middle. On inputs x
with second moment C = E[x^T x] the mean squared error of the queries is |C^(1/2) (S - W T)|^2, which Eckart and Young
minimise: T is the H leading eigenvectors, as rows, of the `[K*H, K*H]` matrix sum_i S_i^T C S_i, and W = S T^T. Without
data C is the identity. A bias is a row of W_Q for an input that is always 1, and takes part in all of this.

What is left open. W T = (W Z^-1) (Z T) for every invertible Z. Decay pulls each T[g] to the identity, so T should be
near it; but Z must not make some directions of W_Q tiny and Premix large there, as the inverse of the mean of T would.
So Z is a number times an orthogonal matrix, and of those the one that brings the T[g] closest to the identity
(orthogonal Procrustes, by the singular vectors of sum_g T[g]). Where all groups agree, T[g] = I exactly.

Postmix. M = I + E, E = B A^T of rank R, shall take the heads' outputs y to what the source's attention gave before
W_O's bias, out:

    minimise |out - sum_n (y_n + sum_m E[n, m] y_m) W_O[n]|^2  over the tokens, W_O kept

This is quadratic in E. Its minimum of full rank, truncated, is the start of alternating least squares in A and B, each
of which can only lower the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 50  # of alternating least squares, at most
_GAIN = 1e-6  # a round that gains less of the error is the last
_RIDGE = 1e-9  # of a mean diagonal, added to it: what the tokens never showed still has one best answer
_ZERO = 1e-6  # singular values of E below this, beside the identity's 1, are round-off


def pool_heads(weight_DX: np.ndarray, head_dim: int, num_heads: int) -> np.ndarray:
    """The mean of each run of neighbouring heads: `[D, K'*H]` to `[D, K*H]`."""
    hidden_size = len(weight_DX)
    heads_DKGH = weight_DX.reshape(hidden_size, num_heads, -1, head_dim)
    return heads_DKGH.mean(axis=2).reshape(hidden_size, num_heads * head_dim)


@dataclass(frozen=True)
class QueryFactors:
    """W_Q and Premix whose products are near the source's query heads."""

    q_proj_DX: np.ndarray
    """`[D, P*H]`; with a bias `[D + 1, P*H]`."""
    premix_KHH: np.ndarray
    error: float
    """Share of the queries' mean square that is lost; of the weights' without data."""


def factor_queries(q_proj_DX: np.ndarray, num_groups: int, head_dim: int, moment_DD: np.ndarray | None) -> QueryFactors:
    """The best physical heads and Premix for the source's W_Q.

    Args:
        q_proj_DX: `[D, N*H]`, heads in the source's order; with a bias `[D + 1, N*H]`.
        num_groups: K.
        moment_DD: mean of x^T x over the inputs of the layer; None weighs all directions alike.
    """
    hidden_size, K, H = len(q_proj_DX), num_groups, head_dim
    blocks_PDX = q_proj_DX.reshape(hidden_size, K, -1, H).transpose(2, 0, 1, 3).reshape(-1, hidden_size, K * H)
    weighed_PDX = blocks_PDX if moment_DD is None else _with_ridge(moment_DD) @ blocks_PDX
    gram_XX = np.einsum("pdx,pdy->xy", blocks_PDX, weighed_PDX, optimize=True)
    values, vectors = np.linalg.eigh(gram_XX)  # smallest first
    basis_XH = vectors[:, ::-1][:, :H]
    mixing_KHH = basis_XH.T.reshape(H, K, H).transpose(1, 0, 2)
    scale, rotation = _closest_to_identity(mixing_KHH)
    physical_PDH = blocks_PDX @ basis_XH @ rotation.T / scale
    return QueryFactors(
        q_proj_DX=physical_PDH.transpose(1, 0, 2).reshape(hidden_size, -1),
        premix_KHH=scale * rotation @ mixing_KHH,
        error=float(max(0.0, values[: (K - 1) * H].sum()) / values.sum()),
    )


def _closest_to_identity(mixing_KHH: np.ndarray) -> tuple[float, np.ndarray]:
    """The number c and the orthogonal matrix U that minimise the sum over groups of |c U T[g] - I|^2."""
    left, values, right = np.linalg.svd(mixing_KHH.sum(axis=0))
    return float(values.sum() / np.square(mixing_KHH).sum()), right.T @ left.T


@dataclass
class OutputMoments:
    """Sums over tokens that the fit of Postmix needs; fixed in size, however many tokens there are."""

    heads_XX: np.ndarray
    """Sum of y^T y, `[N*H, N*H]`."""
    misses_NN: np.ndarray
    """[n, m]: sum of (out - sum_n y_n W_O[n]) . (y_m W_O[n])."""
    missed: float = 0.0
    """Sum of |out - sum_n y_n W_O[n]|^2."""
    total: float = 0.0
    """Sum of |out|^2."""

    @classmethod
    def empty(cls, num_heads: int, head_dim: int) -> OutputMoments:
        return cls(np.zeros((num_heads * head_dim,) * 2), np.zeros((num_heads, num_heads)))

    def add(self, y_TNH: np.ndarray, out_TD: np.ndarray, o_proj_XD: np.ndarray) -> None:
        """Take in tokens: the heads' outputs without Postmix, and what the source's attention gave."""
        y_TX = y_TNH.reshape(len(y_TNH), -1)
        residual_TD = out_TD - y_TX @ o_proj_XD
        back_TNH = (residual_TD @ o_proj_XD.T).reshape(y_TNH.shape)
        self.heads_XX += y_TX.T @ y_TX
        self.misses_NN += np.einsum("tnh,tmh->nm", back_TNH, y_TNH, optimize=True)
        self.missed += float(np.square(residual_TD).sum())
        self.total += float(np.square(out_TD).sum())


@dataclass(frozen=True)
class PostmixFactors:
    a_NR: np.ndarray
    b_NR: np.ndarray
    error_before: float
    """Share of the mean square of the source's attention output that is missed without Postmix."""
    error: float
    """And with it."""


def fit_postmix(moments: OutputMoments, o_proj_XD: np.ndarray, rank: int, initial_a_NR: np.ndarray) -> PostmixFactors:
    """Postmix of rank R that takes the heads' outputs closest to what the source's attention gave.

    Args:
        initial_a_NR: A of a fresh model. A direction that the fit does not need keeps it, with B zero: A and B both
            zero would have no gradient, ever.
    """
    num_heads = len(moments.misses_NN)
    quadratic = _quadratic_form(moments.heads_XX, o_proj_XD, num_heads)
    full_NN = np.linalg.solve(quadratic, moments.misses_NN.reshape(-1)).reshape(num_heads, num_heads)
    a_NR = np.linalg.svd(full_NN)[2][:rank].T  # more than N columns there are not
    mixing_NN, gained = np.zeros_like(full_NN), 0.0
    for _ in range(_ROUNDS):
        before = gained
        # only the space that a factor spans matters to the next one, and orthonormal columns keep that well-posed
        b_NR = np.linalg.qr(_best_factor(quadratic, moments.misses_NN, a_NR, transposed=False))[0]
        a_NR = _best_factor(quadratic, moments.misses_NN, b_NR, transposed=True)
        mixing_NN, a_NR = b_NR @ a_NR.T, np.linalg.qr(a_NR)[0]
        vector = mixing_NN.reshape(-1)
        gained = float(2 * vector @ moments.misses_NN.reshape(-1) - vector @ quadratic @ vector)
        if gained - before <= _GAIN * moments.missed:
            break
    error = max(0.0, moments.missed - gained) / moments.total
    a_NR, b_NR = _balanced(mixing_NN, rank, initial_a_NR)
    return PostmixFactors(a_NR, b_NR, moments.missed / moments.total, error)


def _quadratic_form(heads_XX: np.ndarray, o_proj_XD: np.ndarray, num_heads: int) -> np.ndarray:
    """Sum over tokens of (y_m W_O[n]) . (y_m' W_O[n']), `[N*N, N*N]` over the pairs (n, m), with its ridge."""

    def pairs(matrix_XX: np.ndarray) -> np.ndarray:
        """`[N*H, N*H]` to a row for each pair of heads, a column for each pair of channels."""
        head_dim = len(matrix_XX) // num_heads
        by_head = matrix_XX.reshape(num_heads, head_dim, num_heads, head_dim)
        return by_head.transpose(0, 2, 1, 3).reshape(num_heads**2, head_dim**2)

    product = pairs(o_proj_XD @ o_proj_XD.T) @ pairs(heads_XX).T  # rows (n, n'), columns (m, m')
    by_head = product.reshape((num_heads,) * 4).transpose(0, 2, 1, 3)
    return _with_ridge(by_head.reshape(num_heads**2, num_heads**2))


def _with_ridge(square: np.ndarray) -> np.ndarray:
    return square + _RIDGE * np.trace(square) / len(square) * np.eye(len(square))


def _best_factor(quadratic: np.ndarray, misses_NN: np.ndarray, other_NR: np.ndarray, transposed: bool) -> np.ndarray:
    """The factor of E that lowers the error most when the other one is kept: B for a given A, or A for a given B."""
    num_heads, rank = other_NR.shape
    form = quadratic.reshape((num_heads,) * 4)
    if transposed:
        form, misses_NN = form.transpose(1, 0, 3, 2), misses_NN.T
    matrix = np.einsum("nmkl,mr,ls->nrks", form, other_NR, other_NR, optimize=True)
    vector = misses_NN @ other_NR
    return np.linalg.solve(matrix.reshape(num_heads * rank, -1), vector.reshape(-1)).reshape(num_heads, rank)


def _balanced(mixing_NN: np.ndarray, rank: int, initial_a_NR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B of equal size with B A^T = E; directions without use start as in a fresh model."""
    left, values, right = np.linalg.svd(mixing_NN)
    a_NR, b_NR = initial_a_NR.astype(np.float64), np.zeros((len(mixing_NN), rank))
    used = int((values[:rank] > _ZERO).sum())
    roots = np.sqrt(values[:used])
    a_NR[:, :used], b_NR[:, :used] = right[:used].T * roots, left[:, :used] * roots
    return a_NR, b_NR
