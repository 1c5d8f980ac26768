"""Ranks that must agree: on going on, and, when debugging, on the bits of what they all hold."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import paddle

from vha_paddle.errors import RunError, UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.parallel.ownership import with_weight
from vha_paddle.parallel.placement import info_of

Part = tuple[str, int, int]
"""Canonical name, tensor rank of the part (0 where it is whole), expert rank (0 where it is no expert's)."""


@contextlib.contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """A user's error that one rank meets is raised on all: none is left waiting, and the main rank can tell it."""
    fault = None
    try:
        yield
    except UserError as error:
        fault = str(error)
    faults = [fault for fault in mesh.objects(fault) if fault is not None]
    if faults:
        raise UserError(faults[0])


def check_agreement(parameters: Sequence[paddle.Tensor], mesh: Mesh) -> None:
    """Compare every parameter over all ranks that should hold the same; every rank calls it, and all raise together.

    Raises:
        RunError: naming the first parameter, in the order of the model, that differs, and two ranks that disagree.
    """
    digests: dict[Part, str] = {}
    for parameter in with_weight(parameters, mesh):
        info = info_of(parameter)
        part = (
            info.name,
            mesh.tensor_rank if info.placement.axis is not None else 0,
            mesh.expert_rank if info.is_expert else 0,
        )
        digests[part] = hashlib.blake2b(parameter.numpy().tobytes(), digest_size=16).hexdigest()
    first: dict[Part, tuple[int, str]] = {}
    for rank, theirs in enumerate(mesh.objects(digests)):
        for part, digest in theirs.items():
            other, expected = first.setdefault(part, (rank, digest))
            if digest != expected:
                raise RunError(
                    f"parameter {part[0]} differs between ranks {other} and {rank}, which should hold the same values; "
                    "a gradient was not summed over them, or a rank computes wrongly"
                )
