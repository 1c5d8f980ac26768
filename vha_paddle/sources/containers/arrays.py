"""The arrays of a pickled state dict, and their values."""

from __future__ import annotations

import codecs
import math
from typing import Any

import ml_dtypes
import numpy as np

from vha_paddle.errors import UserError
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.records import Pairs, PickledArray, Span
from vha_paddle.sources.containers.stream import read_pickle

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PARAMETER_NAMES = "StructuredToParameterName@@"
"""Entry that paddle.save adds: the names that the tensors had in the process."""

_TEXT_CHUNK_BYTES = 4 << 20


def value_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the values where nothing states it: Paddle has no uint16, its bfloat16 is written as one."""
    return BFLOAT16 if stored == np.uint16 else stored


def read_state_dict(file: DiskFile) -> dict[str, Any]:
    """The entries of a file that paddle.save wrote, without the one it adds: arrays by name, not yet read.

    Raises:
        UserError: the file is damaged, is no state dict, or holds what is not data.
    """
    value = read_pickle(file)
    if not isinstance(value, Pairs) or not all(isinstance(key, str) for key, _ in value):
        raise UserError(f"{file.path}: not a state dict (a dictionary of tensors by name)")
    entries = dict(value)
    if len(entries) != len(value):
        raise UserError(f"{file.path}: a name occurs twice; the file is damaged")
    entries.pop(PARAMETER_NAMES, None)
    return entries


def pickled_array(file: DiskFile, name: str, value: Any) -> PickledArray:
    """`value`, if it is an array.

    Raises:
        UserError: it is something else, or an array without its values.
    """
    if not isinstance(value, PickledArray) or not hasattr(value, "data"):
        raise UserError(f"{file.path}: entry {ascii(name)} is not a tensor; give a file of weights only")
    return value


def read_values(file: DiskFile, array: PickledArray, target: np.ndarray[Any, Any]) -> None:
    """Fill `target`, one axis long, with the values of `array` in C order.

    Raises:
        UserError: the file has changed since it was opened, or its text does not stand for the array's bytes.
    """
    if array.is_fortran and len(array.shape) > 1:
        values = np.empty(math.prod(array.shape), array.dtype)
        _read_bytes(file, array.data, values)
        target[:] = values.reshape(array.shape, order="F").reshape(-1)
    else:
        _read_bytes(file, array.data, target)


def _read_bytes(file: DiskFile, data: bytes | Span, target: np.ndarray[Any, Any]) -> None:
    raw = target.view(np.uint8)
    if isinstance(data, bytes):
        raw[:] = np.frombuffer(data, np.uint8)
    elif data.is_text:
        _read_text(file, data, raw)
    else:
        file.read_into(data.offset, target)


def _read_text(file: DiskFile, span: Span, raw: np.ndarray[Any, Any]) -> None:
    """Decode what protocol 2 makes of bytes: the UTF-8 of the text whose Latin-1 they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        for start in range(0, span.length, _TEXT_CHUNK_BYTES):
            count = min(_TEXT_CHUNK_BYTES, span.length - start)
            chunk = file.read(span.offset + start, count)
            values = decoder.decode(chunk, final=start + count == span.length).encode("latin-1")
            raw[done : done + len(values)] = np.frombuffer(values, np.uint8)
            done += len(values)
        if done != len(raw):
            raise ValueError
    except ValueError:  # not UTF-8, no Latin-1, or more or fewer bytes than the array has
        raise UserError(f"{file.path}: the text at byte {span.offset} is no tensor; copy the file again") from None
