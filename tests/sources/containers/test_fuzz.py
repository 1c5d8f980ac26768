"""Damaged files: an error of ours or the right data, whatever byte is changed, and no allocation beyond the file."""

from __future__ import annotations

import functools
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources.containers.fixtures import cut, flattened, sample, write_flex_folder, write_merged, write_pdparams
from vha_paddle.errors import UserError
from vha_paddle.sources.containers import open_container

ARRAYS = {
    "model.embed": sample(40, 30, dtype=ml_dtypes.bfloat16),
    "model.w": sample(6, 8, seed=1),
    "model.premix": sample(2, 3, 5, seed=2),
}
ALLOWED_BYTES = 4 << 20

Damage = Callable[[bytes], bytes]


def write_flex(folder: Path) -> None:
    parts = {"model.w": cut(ARRAYS["model.w"], 1, 2), "model.premix": flattened(ARRAYS["model.premix"], [13, 30])}
    write_flex_folder(folder / "model_state", ARRAYS, parts)


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "protocol 2": (lambda folder: write_pdparams(folder / "model_state.pdparams", ARRAYS, 2), "model_state.pdparams"),
    "protocol 3": (lambda folder: write_pdparams(folder / "model_state.pdparams", ARRAYS, 3), "model_state.pdparams"),
    "protocol 4": (lambda folder: write_pdparams(folder / "model_state.pdparams", ARRAYS, 4), "model_state.pdparams"),
    "distcp": (write_flex, "model_state/1_0.distcp"),
    "metadata": (write_flex, "model_state/0.metadata"),
    "safetensors": (lambda folder: write_merged(folder, ARRAYS), "model-00001-of-00001.safetensors"),
    "index": (lambda folder: write_merged(folder, ARRAYS), "model.safetensors.index.json"),
}


@functools.cache
def pristine(form: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    WRITERS[form][0](folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _removed() -> object:
    yield
    for form in WRITERS:
        shutil.rmtree(pristine(form))


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Bytes changed, cut off, left out or put in, where instructions are dense more often than elsewhere."""
    kind = draw(st.sampled_from(["change", "change", "change", "cut", "remove", "insert", "number"]))
    place = draw(st.one_of(st.floats(0, 1), st.floats(0, 0.1), st.floats(0.9, 1)))
    values = draw(st.binary(min_size=1, max_size=8))

    def damage(raw: bytes) -> bytes:
        at = min(int(place * len(raw)), len(raw) - 1)
        if kind == "cut":
            return raw[:at]
        if kind == "remove":
            return raw[:at] + raw[at + len(values) :]
        if kind == "insert":
            return raw[:at] + values + raw[at:]
        if kind == "number":
            values_at = (2 ** (8 * len(values)) - 1 >> values[0] % 8).to_bytes(len(values), "little")
            return raw[:at] + values_at + raw[at + len(values) :]
        return raw[:at] + values[:1] + raw[at + 1 :]

    return damage


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(damage=damages())
def test_a_damaged_file_is_refused_or_read_within_bounds(form: str, damage: Damage) -> None:
    source, name = pristine(form), WRITERS[form][1]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        folder = Path(directory) / "copy"
        shutil.copytree(source, folder)
        path = folder / name
        raw = path.read_bytes()
        path.write_bytes(damage(raw))
        tracemalloc.start()
        try:
            tensors = open_container(folder).weights
            read = {entry: tensors.read(entry) for entry in tensors.entries}
        except UserError as error:
            assert "\n" not in str(error)
        else:
            for entry, values in read.items():
                assert values.shape == tensors.entries[entry].shape
                assert values.dtype == tensors.entries[entry].dtype
                assert isinstance(values, np.ndarray)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < ALLOWED_BYTES
