"""The values that a pickle of Paddle's may hold, as plain data, and the only names it may refer to.

A pickle describes an object by the name of a function and the arguments to call it with. Here a name is looked up in
`GLOBALS`, exactly, and stands for one of the functions below, which check their arguments and return data of ours.
Nothing is imported and nothing of numpy's or Paddle's is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vha_paddle.tensor_file import MAX_AXES, MAX_TENSOR_BYTES


class DamagedPickle(Exception):
    """The stream is not what numpy and Paddle write; the message says in which way."""


@dataclass(frozen=True)
class Span:
    """A long string that was not read: where it lies in the file."""

    offset: int
    length: int
    """In bytes of the file."""
    is_text: bool
    """UTF-8. Protocol 2 has no bytes: it writes the text that Latin-1 encodes into them."""


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as the list of its items: keys are compared only when they are known to be names."""


class PickledArray:
    """A numpy array: its description, and where its values are. Empty until its state has been seen."""

    __slots__ = ("dtype", "shape", "is_fortran", "data")

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    data: bytes | Span


class Record:
    """An object of one of the classes of Paddle's checkpoint metadata: its class and its fields."""

    __slots__ = ("kind", "fields")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}


@dataclass(frozen=True)
class Global:
    """A name that a pickle may refer to."""

    name: str


RECONSTRUCT, NDARRAY, DTYPE, SCALAR, ENCODE, BYTES, ORDERED_DICT = (
    Global(name) for name in ("_reconstruct", "ndarray", "dtype", "scalar", "encode", "bytes", "OrderedDict")
)
FIELDS = {
    "Metadata": {"state_dict_metadata", "storage_metadata", "flat_mapping"},
    "LocalTensorMetadata": {
        "global_offset", "local_shape", "dtype", "global_shape", "is_flattened", "flattened_range"
    },
    "LocalTensorIndex": {
        "tensor_key", "global_offset", "is_flattened", "flattened_range", "replica_id", "local_shape"
    },
}  # fmt: skip
"""The fields of each metadata class in Paddle 3.3; older ones have fewer."""

GLOBALS: dict[tuple[str, str], Global] = {
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): SCALAR,
    ("numpy._core.multiarray", "scalar"): SCALAR,
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): DTYPE,
    ("_codecs", "encode"): ENCODE,
    ("__builtin__", "bytes"): BYTES,  # b"" in protocol 2
    ("builtins", "bytes"): BYTES,
    ("collections", "OrderedDict"): ORDERED_DICT,
} | {
    (module, kind): Global(kind)
    for module in ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
    for kind in FIELDS
}

_DTYPES = {code: np.dtype(code) for code in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "b1")}
_DTYPE_STATES = [(3, order, None, None, None, -1, -1, 0) for order in "<|"]


def call(function: Any, arguments: Any) -> Any:
    """What `function(*arguments)` describes.

    Raises:
        DamagedPickle: it is not a function that may be called, or has other arguments than its writer gives it.
    """
    if not isinstance(function, Global) or function.name not in _CALLS or not isinstance(arguments, tuple):
        raise DamagedPickle("a call of what is not a function")
    return _CALLS[function.name](*_checked(function, arguments))


def _checked(function: Global, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) not in _COUNTS[function.name]:
        raise DamagedPickle(f"{len(arguments)} arguments of {function.name}")
    return arguments


def _new_array(kind: Any, shape: Any, code: Any) -> PickledArray:
    # numpy gives these to every array; what the array is follows in its state
    if kind is not NDARRAY or not is_ints(shape) or tuple(shape) != (0,) or not isinstance(code, bytes):
        raise DamagedPickle("an array of another class than numpy.ndarray")
    return PickledArray()


def _dtype(code: Any, align: Any, copy: Any) -> np.dtype[Any]:
    if not isinstance(code, str) or code not in _DTYPES:
        raise DamagedPickle("an array of a dtype that no tensor has")
    return _DTYPES[code]


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise DamagedPickle("a numpy scalar that is none")
    return np.frombuffer(data, dtype)[0].item()


def _encoded(text: Any, encoding: Any) -> bytes | Span:
    if not isinstance(encoding, str) or encoding not in ("latin1", "latin-1"):
        raise DamagedPickle("bytes in an encoding that numpy does not use")
    if isinstance(text, Span) and text.is_text:
        return text
    try:
        return text.encode("latin-1")
    except (AttributeError, UnicodeEncodeError):
        raise DamagedPickle("text that stands for no bytes") from None


_CALLS: dict[str, Callable[..., Any]] = {
    "_reconstruct": _new_array,
    "dtype": _dtype,
    "scalar": _scalar,
    "encode": _encoded,
    "bytes": bytes,
    "OrderedDict": Pairs,
}
_COUNTS = {"_reconstruct": (3,), "dtype": (3,), "scalar": (2,), "encode": (2,), "bytes": (0,), "OrderedDict": (0,)}


def new_object(kind: Any, arguments: Any) -> Record:
    """An object of a metadata class, before its fields are known.

    Raises:
        DamagedPickle: it is of another class.
    """
    if not isinstance(kind, Global) or kind.name not in FIELDS or type(arguments) is not tuple or arguments:
        raise DamagedPickle("an object of a class that has none")
    return Record(kind.name)


def set_state(value: Any, state: Any) -> None:
    """Give an object the state that follows it in the stream, once.

    Raises:
        DamagedPickle: the object takes no state, or not this one.
    """
    if isinstance(value, PickledArray) and not hasattr(value, "data"):
        _set_array(value, state)
    elif isinstance(value, np.dtype):
        if not isinstance(state, tuple) or not any(_same(state, expected) for expected in _DTYPE_STATES):
            raise DamagedPickle("a dtype with fields, metadata or another byte order")
    elif isinstance(value, Record) and not value.fields:
        allowed = FIELDS[value.kind]
        if not isinstance(state, Pairs) or not all(isinstance(key, str) and key in allowed for key, _ in state):
            raise DamagedPickle(f"a {value.kind} with fields that it does not have")
        value.fields = dict(state)
    else:
        raise DamagedPickle("a state of what takes none")


def _same(state: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Equality, of types too: what a stream nests is not compared in depth."""
    return len(state) == len(expected) and all(
        type(a) is type(b) and a == b for a, b in zip(state, expected, strict=True)
    )


def _set_array(array: PickledArray, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        raise DamagedPickle("an array with a state that numpy does not write")
    version, shape, dtype, is_fortran, data = state
    if type(version) is not int or version != 1 or not isinstance(shape, tuple) or not is_ints(shape):
        raise DamagedPickle("an array with a state that numpy does not write")
    if not isinstance(dtype, np.dtype) or not isinstance(is_fortran, bool) or not isinstance(data, bytes | Span):
        raise DamagedPickle("an array with a state that numpy does not write")
    num_bytes = dtype.itemsize * checked_size(shape)
    if isinstance(data, Span) and data.is_text:
        fits = num_bytes <= data.length <= 2 * num_bytes  # UTF-8 of Latin-1: one or two bytes each
    else:
        fits = num_bytes == (data.length if isinstance(data, Span) else len(data))
    if not fits:
        raise DamagedPickle(f"an array of shape {list(shape)} that has another number of bytes")
    array.dtype, array.shape, array.is_fortran, array.data = dtype, shape, is_fortran, data


def is_ints(values: Any) -> bool:
    """Whether this is a tuple or list of integers from zero on."""
    return isinstance(values, tuple | list) and all(type(value) is int and value >= 0 for value in values)


def checked_size(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape.

    Raises:
        DamagedPickle: no array can have it.
    """
    if len(shape) > MAX_AXES or math.prod(n or 1 for n in shape) > MAX_TENSOR_BYTES:
        raise DamagedPickle("a shape that no array can have")
    return math.prod(shape)
