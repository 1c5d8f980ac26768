"""safetensors files: what is written is what the library reads, and a header is not believed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from vha_paddle.errors import UserError
from vha_paddle.tensor_file import DTYPES, FileRecord, read_tensors, write_tensors

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "double": np.full((1, 1), 2.5),
    "flags": np.array([True, False, True]),
}


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> FileRecord:
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_tensors(path, specs, arrays.values(), metadata or {})


def write_raw(path: Path, header: Any, num_bytes: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def test_a_written_file_reads_back_bit_equal(tmp_path: Path) -> None:
    write(tmp_path / "file", ARRAYS)
    file = read_tensors(tmp_path / "file")
    assert list(file) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert file.array(name).dtype == array.dtype and file.array(name).tobytes() == array.tobytes()


def test_the_safetensors_library_reads_tensors_and_metadata(tmp_path: Path) -> None:
    write(tmp_path / "file", ARRAYS, {"key": "a \u2713"})
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.metadata() == {"key": "a \u2713"}
        assert np.array_equal(file.get_tensor("matrix"), ARRAYS["matrix"])


def test_size_and_digest_are_those_of_the_file(tmp_path: Path) -> None:
    large = {"large": np.arange(11_000_000, dtype=np.float32)}  # several chunks
    for arrays in (ARRAYS, large, {}):
        record = write(tmp_path / "file", arrays)
        content = (tmp_path / "file").read_bytes()
        assert record == FileRecord(len(content), hashlib.sha256(content).hexdigest())


def test_a_digest_slower_than_the_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self) -> None:
            self.real = sha256()

        def update(self, chunk: memoryview) -> None:
            time.sleep(0.05)
            self.real.update(chunk)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    sha256 = hashlib.sha256
    with monkeypatch.context() as patch:
        patch.setattr("vha_paddle.tensor_file.hashlib.sha256", Slow)
        record = write(tmp_path / "file", ARRAYS)
    assert record.sha256 == sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_a_disk_that_takes_a_part_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some = os.write
    monkeypatch.setattr("vha_paddle.tensor_file.os.write", lambda file, data: write_some(file, data[:7]))
    record = write(tmp_path / "file", ARRAYS)
    assert record.sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


@pytest.mark.parametrize("chunk_bytes", [1, 20, 64, 1 << 20])
def test_a_part_that_is_not_contiguous_is_written_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """In chunks of a row, of two rows with some bytes to spare, and in one."""
    matrix = np.arange(35, dtype=np.float32).reshape(7, 5)
    monkeypatch.setattr("vha_paddle.tensor_file._CHUNK_BYTES", chunk_bytes)
    arrays = {
        "transposed": matrix.T,
        "every other": matrix[:, ::2],
        "3 axes": matrix.reshape(7, 5, 1).T,
        "none": matrix[:0].T,
    }
    record = write(tmp_path / "file", arrays)
    file = read_tensors(tmp_path / "file")
    assert all(np.array_equal(file.array(name), array) for name, array in arrays.items())
    assert record.sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_an_array_that_was_not_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="matrix: float32"):
        write_tensors(tmp_path / "file", {"matrix": (DTYPES["F32"], (4, 3))}, [ARRAYS["matrix"]], {})


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "header is not JSON"),
        (b"\xff\xfe{}", "header is not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "header is not JSON"),
        (b"[" * 100_000, "header is not JSON"),
        (b'{"x": 1, "x": 2}', "header is not JSON"),
        ([1], "header is not an object"),
        ({"__metadata__": 3, "x": entry()}, "__metadata__ is not an object of strings"),
        ({"__metadata__": {"a": 1}, "x": entry()}, "__metadata__ is not an object of strings"),
        ({"x": 5}, "tensor x is invalid"),
        ({"x": entry(dtype="F31")}, "tensor x is invalid"),
        ({"x": entry(dtype=[])}, "tensor x is invalid"),
        ({"x": entry(shape=[2.0])}, "tensor x is invalid"),
        ({"x": entry(shape=[True, 2])}, "tensor x is invalid"),
        ({"x": entry(shape=[-1, -2])}, "tensor x is invalid"),
        ({"x": entry(shape=[3])}, "tensor x is invalid"),
        ({"x": entry(shape=[2**62])}, "tensor x is invalid"),
        ({"x": entry(shape=[1] * 33 + [2])}, "tensor x is invalid"),
        ({"x": entry(), "y": entry(shape=[0, 2**63], offsets=[8, 8])}, "tensor y is invalid"),
        ({"x": entry(offsets=[0, 16], shape=[4])}, "tensor x is invalid"),
        ({"x": entry(offsets=[8, 0])}, "tensor x is invalid"),
        ({"x": entry(offsets=[0])}, "tensor x is invalid"),
        ({"x": entry(), "y": entry()}, "overlap or leave a gap"),
        ({"x": entry(shape=[1], offsets=[4, 8])}, "overlap or leave a gap"),
        ({"x": entry(shape=[1], offsets=[0, 4])}, "do not fill the file"),
        ({}, "do not fill the file"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_tensors(write_raw(tmp_path / "file", header))


@pytest.mark.parametrize("content", [b"", b"1234567", (2**63).to_bytes(8, "little"), b"\x09" + bytes(7) + b"{}"])
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        read_tensors(tmp_path / "file")


def test_a_tensor_is_read_without_mapping_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", ARRAYS)
    file = read_tensors(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr("vha_paddle.tensor_file.np.memmap", None)
        for name, array in ARRAYS.items():
            read = file.read(name)
            assert read.dtype == array.dtype and read.tobytes() == array.tobytes()


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", ARRAYS)
    file = read_tensors(tmp_path / "file")
    with open(tmp_path / "file", "rb+") as raw:
        raw.truncate(file.entries["double"].offset + 3)
    assert file.read("matrix").tobytes() == ARRAYS["matrix"].tobytes()
    with pytest.raises(UserError, match="has become shorter while it was read"):
        file.read("double")


def test_room_is_taken_before_the_first_array_is_asked_for(tmp_path: Path) -> None:
    sizes = []

    def arrays() -> Iterator[np.ndarray]:
        sizes.append((tmp_path / "file").stat().st_size)
        yield np.zeros(1000, np.float32)

    record = write_tensors(tmp_path / "file", {"x": (DTYPES["F32"], (1000,))}, arrays(), {}, reserve=True)
    assert sizes == [record.bytes] == [(tmp_path / "file").stat().st_size]
