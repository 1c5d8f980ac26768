"""Random initial values that do not depend on the layout: each tensor is drawn whole, from the seed and its name."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Initializer(Protocol):
    """Draws one logical tensor."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]: ...


@dataclass(frozen=True)
class Normal:
    std: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class Constant:
    value: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class IdentityPlusNoise:
    """I + noise * N(0, 1) on the last two axes: the start of Premix."""

    noise: float

    @classmethod
    def scaled(cls, noise: float, head_dim: int) -> IdentityPlusNoise:
        """Noise divided by sqrt(H), so the expected distance ||W - I||_F is noise * sqrt(H)."""
        return cls(noise / math.sqrt(head_dim))

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return Normal(self.noise).draw(generator, shape) + np.eye(shape[-1], dtype=np.float32)


@dataclass(frozen=True)
class Orthogonal:
    """`gain` times a random matrix with orthonormal rows or columns, whichever are fewer, on the last two axes.

    Source: Saxe et al., arXiv 1312.6120. The signs of QR's triangle make the draw uniform (Mezzadri, math-ph/0609050).
    """

    gain: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        *outer, rows, columns = shape
        long, short = max(rows, columns), min(rows, columns)
        q, r = np.linalg.qr(generator.standard_normal((*outer, long, short)))
        q *= self.gain * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
        return q if rows == long else q.swapaxes(-2, -1)


def generator_for(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on the seed and the tensor's name only, not on what was drawn before."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
