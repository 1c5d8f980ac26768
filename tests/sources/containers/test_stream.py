"""Nothing in a pickle is executed, believed or allocated from before it has been compared with the file."""

from __future__ import annotations

import builtins
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sources.containers.fixtures import sample, write_pdparams
from vha_paddle.errors import UserError
from vha_paddle.sources.containers import open_distcp, open_pdparams
from vha_paddle.sources.containers import stream as stream_module
from vha_paddle.sources.containers.disk import DiskFile
from vha_paddle.sources.containers.stream import read_pickle

ROOT = Path(__file__).resolve().parents[3]
START = b"\x80\x04"


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def read(tmp_path: Path, raw: bytes) -> Any:
    path = tmp_path / "file"
    path.write_bytes(raw)
    return read_pickle(DiskFile(path))


def refused(tmp_path: Path, raw: bytes, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        read(tmp_path, raw)
    assert "nothing was executed" in str(error.value) and "\n" not in str(error.value)


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (builtins.eval, "(__builtin__|builtins).eval"),
        (builtins.getattr, "(__builtin__|builtins).getattr"),
        (np.load, "numpy.load"),
        (np.frombuffer, "numpy.frombuffer"),
        (np.core.multiarray.array, "numpy.array"),
        (subprocess.Popen, "(commands|subprocess).Popen"),
        (tuple, "(__builtin__|builtins).tuple"),
    ],
)
def test_a_call_of_anything_else_is_refused_by_name(tmp_path: Path, function: Any, name: str, protocol: int) -> None:
    mark = tmp_path / "executed"
    raw = pickle.dumps({"w": sample(3), "x": Calls(function, f"touch {mark}")}, protocol)
    refused(tmp_path, raw, f"refers to {name}, which is no part of weights")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy.testing._private.utils", "runstring"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("numpy", "ndarray.tofile"),
        ("numpy", "core.multiarray._reconstruct"),
        ("numpy ", "dtype"),
        ("builtins", "bytes.fromhex"),
        ("_codecs", "decode"),
        ("collections", "namedtuple"),
        ("paddle.distributed.flex_checkpoint.dcp.metadata", "replace"),
        ("paddle", "load"),
        ("os", "system\nRemedy: run it"),
    ],
)
def test_a_name_is_compared_exactly(tmp_path: Path, module: str, name: str) -> None:
    refused(tmp_path, START + text(module) + text(name) + b"\x93.", "refers to")
    if "\n" not in name:
        refused(tmp_path, START + b"c" + f"{module}\n{name}\n".encode() + b".", "refers to")


def test_a_name_from_the_memo_is_the_same_name(tmp_path: Path) -> None:
    raw = START + b"]" + text("os") + b"\x94a" + text("system") + b"\x94ah\x00h\x01\x93."
    refused(tmp_path, raw, "refers to os.system")


def test_a_name_that_is_computed_is_no_name(tmp_path: Path) -> None:
    encode = text("_codecs") + text("encode") + b"\x93"
    raw = START + encode + text("os") + text("latin1") + b"\x86R" + text("system") + b"\x93."
    refused(tmp_path, raw, "a name that is no text")


@pytest.mark.parametrize(
    "opcode",
    [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"P0\n", b"Q", b"i" b"os\nsystem\n", b"o", b"\x92",
     b"I1\n", b"L1L\n", b"S'a'\n", b"F1\n", b"V1\n", b"\x8b\x01\x00\x00\x00\x01", b"\x8f", b"\x90", b"\x91", b"2",
     b"0", b"1", b"g0\n", b"p0\n", b"l", b"d", b"\x96" + bytes(8), b"\x97", b"\x98", b"\xff"],
    ids=lambda opcode: opcode.hex(),
)  # fmt: skip
def test_an_instruction_that_no_writer_of_weights_emits_is_refused(tmp_path: Path, opcode: bytes) -> None:
    refused(tmp_path, START + b"(" + opcode + b".", "an instruction")


ARRAY = b"".join(
    [text("numpy.core.multiarray"), text("_reconstruct"), b"\x93", text("numpy"), text("ndarray"), b"\x93",
     b"K\x00\x85C\x01b\x87R"]
)  # fmt: skip
FLOAT32 = text("numpy") + text("dtype") + b"\x93" + text("f4") + b"\x89\x88\x87R"
DTYPE_STATE = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def array_with(state: bytes) -> bytes:
    return START + ARRAY + state + b"b."


def long(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


@pytest.mark.parametrize(
    "state",
    [
        b"N",
        b"}",
        b"K\x01",
        b"(K\x01K\x02\x85" + FLOAT32 + DTYPE_STATE + b"\x89t",
        b"(K\x02K\x02\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01K\x02" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01K\x03\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01K\x02\x85" + text("f4") + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01K\x02\x85" + FLOAT32 + DTYPE_STATE + b"NC\x08" + bytes(8) + b"t",
        b"(K\x01K\x02\x85" + FLOAT32 + DTYPE_STATE + b"\x89" + text("12345678") + b"t",
        b"(K\x01" + long(-2) + b"\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01" + long(2**62) + b"\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t",
        b"(K\x01K\x00" + long(2**62) + b"\x86" + FLOAT32 + DTYPE_STATE + b"\x89C\x00t",
        b"(K\x01(" + b"K\x01" * 40 + b"t" + FLOAT32 + DTYPE_STATE + b"\x89C\x04" + bytes(4) + b"t",
        b"(K\x01\x88\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x04" + bytes(4) + b"t",
    ],
)
def test_an_odd_state_of_an_array_is_refused(tmp_path: Path, state: bytes) -> None:
    refused(tmp_path, array_with(state), "truncated or damaged")


def test_the_array_of_these_tests_is_read(tmp_path: Path) -> None:
    state = b"(K\x01K\x02\x85" + FLOAT32 + DTYPE_STATE + b"\x89C\x08" + bytes(8) + b"t"
    assert read(tmp_path, array_with(state)).shape == (2,)
    refused(tmp_path, START + ARRAY + state + b"b" + state + b"b.", "a state of what takes none")


@pytest.mark.parametrize(
    "body",
    [
        text("numpy") + text("dtype") + b"\x93" + text("O") + b"\x89\x88\x87R",
        text("numpy") + text("dtype") + b"\x93" + text("V8") + b"\x89\x88\x87R",
        FLOAT32 + DTYPE_STATE.replace(b"<", b">"),
        FLOAT32 + b"(K\x04" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}tb",
        ARRAY.replace(b"ndarray", b"dtype\x93C\x00"),
        text("numpy") + text("ndarray") + b"\x93)R",
        text("numpy") + text("ndarray") + b"\x93)\x81",
        text("numpy") + text("dtype") + b"\x93)R",
        text("numpy.core.multiarray") + text("_reconstruct") + b"\x93NR",
        text("_codecs") + text("encode") + b"\x93" + text("a") + text("utf-8") + b"\x86R",
        text("_codecs") + text("encode") + b"\x93" + text("\u20ac") + text("latin1") + b"\x86R",
        text("_codecs") + text("encode") + b"\x93)" + text("latin1") + b"\x86R",
        text("builtins") + text("bytes") + b"\x93K\x05\x85R",
        text("numpy.core.multiarray") + text("scalar") + b"\x93" + FLOAT32 + DTYPE_STATE + b"C\x02ab\x86R",
        text("collections") + text("OrderedDict") + b"\x93(]]e\x85R",
        text("paddle.distributed.checkpoint.metadata") + text("Metadata") + b"\x93)\x81}" + text("__class__") + b"Nsb",
        text("paddle.distributed.checkpoint.metadata") + text("Metadata") + b"\x93)\x81}]Nsb",
        text("paddle.distributed.checkpoint.metadata") + text("Metadata") + b"\x93K\x01\x85\x81",
        text("paddle.distributed.checkpoint.metadata") + text("Metadata") + b"\x93)R",
        b"}N\x85b",
        b"]}b",
        b"K\x05}b",
        b")K\x01a",
        b"]K\x01K\x01s",
        b"}(K\x01u",
        b"(K\x01",
        b"(\x85",
        b"N(\x85t\x86",
        b"K\x01\x86",
        b"a",
        b"t",
        b"u",
        b"\x93",
        b"R",
        b"\x94",
        b"h\x00",
        b"Nq\x01",
        b"Nr\xff\xff\xff\xff",
        b"j\xff\xff\xff\xff",
        b"\x8a\x09" + bytes(9),
        b"\x8c\x02\xc3\x28",
        b"c" + b"a" * 5000,
        b"NN",
    ],
    ids=lambda body: body[-24:].hex(),
)
def test_a_stream_that_is_not_what_its_writers_emit_is_refused(tmp_path: Path, body: bytes) -> None:
    refused(tmp_path, START + body + b".", "truncated or damaged|refers to")


@pytest.mark.parametrize(
    "body",
    [
        b"\x95" + struct.pack("<Q", 2**62),
        b"X" + struct.pack("<I", 2**32 - 1),
        b"\x8d" + struct.pack("<Q", 2**62),
        b"\x8d" + struct.pack("<Q", 2**64 - 1),
        b"B" + struct.pack("<I", 2**32 - 1),
        b"\x8e" + struct.pack("<Q", 2**62),
        b"C\xff",
    ],
    ids=lambda body: body.hex(),
)
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, body: bytes) -> None:
    refused(tmp_path, START + body + b".", "bytes announced where the file has [0-9]+ before")


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\x80\x04", b"PK\x03\x04", b"\x80\x05N.", b"\x80\x01N.", b"N."])
def test_what_is_no_pickle_of_these_protocols_is_refused(tmp_path: Path, raw: bytes) -> None:
    refused(tmp_path, raw, "truncated or damaged")


def test_bytes_behind_the_end_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, pickle.dumps({"a": 1}, 4) + b"x", "something left over")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    write_pdparams(tmp_path / "a", {"w": sample(2, 3), "v": sample(400)})
    raw = (tmp_path / "a").read_bytes()
    for length in range(len(raw)):
        (tmp_path / "a").write_bytes(raw[:length])
        with pytest.raises(UserError, match="truncated or damaged"):
            open_pdparams(tmp_path / "a")


def test_what_the_writers_emit_beside_arrays_is_read(tmp_path: Path) -> None:
    value = {
        "scalars": (np.float32(1.5), np.int64(-7)),
        "ordered": OrderedDict(a=[1, 70_000, 2**40, -(2**31), True, None, 2.5]),
        "long": "n" * 5000,
    }
    for protocol in (2, 3, 4):
        scalars, ordered, long_text = (item for _, item in read(tmp_path, pickle.dumps(value, protocol)))
        assert scalars == (1.5, -7) and ordered == [("a", [1, 70_000, 2**40, -(2**31), True, None, 2.5])]
        assert (long_text.length, long_text.is_text) == (5000, True)


@pytest.mark.parametrize(
    "body",
    [
        b"(" * 200_000 + b"t" * 200_000,
        b"N" + b"\x85" * 300_000,
        b"]\x94" + b"]\x94h\x00a" * 1000 + b"h\x00a" * 1000,
        b")" + b"\x94h\x00\x86" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(1, 200)),  # 2^200 leaves
        b"]\x94h\x00a",  # a list that holds itself
    ],
    ids=["marks", "depth", "lists", "doubling", "cycle"],
)
def test_depth_and_shared_values_cost_no_more_than_the_file(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(START + b"}" + text("w") + body + b"s.")
    with pytest.raises(UserError):
        open_pdparams(path)
    path.write_bytes(START + body + b".")
    with pytest.raises(UserError):
        open_pdparams(path)
    (tmp_path / "0.metadata").write_bytes(START + body + b".")
    with pytest.raises(UserError):
        open_distcp(tmp_path)


def test_instructions_and_bytes_that_are_no_tensors_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = pickle.dumps({f"name{i}": i for i in range(100)}, 4)
    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "MAX_INSTRUCTIONS", 200)
        refused(tmp_path, raw, "more than 200 instructions")
    monkeypatch.setattr(stream_module, "MAX_STREAM_BYTES", 500)
    refused(tmp_path, raw, "more than 500 bytes")
    write_pdparams(tmp_path / "a", {"w": sample(10_000)})
    assert open_pdparams(tmp_path / "a").entries["w"].shape == (10_000,)


def test_a_stream_of_the_largest_kind_is_read_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, which may have a quarter of a gibibyte beside what Python and numpy take."""
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from vha_paddle.sources.containers import open_pdparams
        from vha_paddle.errors import UserError
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for path in sys.argv[1:]:
            try:
                tensors = open_pdparams(Path(path))
                print(list(tensors.entries.values()))
            except UserError as error:
                print(error)
    """)
    large = tmp_path / "large"
    with large.open("wb") as file:  # a tensor of 8 GiB, of which the disk holds nothing
        head = START + b"}" + text("w") + ARRAY + b"(K\x01" + long(2**31) + b"\x85" + FLOAT32 + DTYPE_STATE + b"\x89"
        file.write(head + b"\x8e" + struct.pack("<Q", 2**33))
        file.seek(2**33, 1)
        file.write(b"tbs.")
    many = tmp_path / "many"
    many.write_bytes(START + b"(" + b")" * 3_000_000 + b"t.")
    result = subprocess.run(
        [sys.executable, "-c", program, str(large), str(many)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "shape=(2147483648,)" in first and "not a state dict" in second
