"""State dicts: layouts of arrays, the text that protocol 2 makes of bytes, tensors that were cut, names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sources.containers.fixtures import sample, write_pdparams
from vha_paddle.errors import UserError
from vha_paddle.sources.containers import arrays as arrays_module
from vha_paddle.sources.containers import open_pdparams

FLAT = sample(20)


def refused(path: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        open_pdparams(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 4), (30, 40), (5, 6, 7)])
def test_an_array_in_column_order_comes_in_row_order(tmp_path: Path, protocol: int, shape: tuple[int, ...]) -> None:
    array = sample(*shape)
    write_pdparams(tmp_path / "a", {"w": np.asfortranarray(array)}, protocol)
    values = open_pdparams(tmp_path / "a").read("w")
    assert values.flags.c_contiguous and values.tobytes() == array.tobytes()


def test_text_that_stands_for_bytes_is_decoded_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_module, "_TEXT_CHUNK_BYTES", 7)
    array = np.random.default_rng(0).integers(0, 256, 1500).astype(np.uint8)
    write_pdparams(tmp_path / "a", {"w": array}, 2)
    assert open_pdparams(tmp_path / "a").read("w").tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("old", "new"),
    [("\xff\x01", "\u0100\x01"), ("\xff\x01", "\x7f\x01\x02"), ("\x01\x02", "\xff")],
    ids=["no latin", "too many", "too few"],
)
def test_text_that_stands_for_other_bytes_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """Of the same length in the file, so that only its decoding shows it."""
    array = np.tile(np.frombuffer(b"\xff\x01\x02\x03", np.uint8), 500)
    write_pdparams(tmp_path / "a", {"w": array}, 2)
    raw = (tmp_path / "a").read_bytes()
    assert len(old.encode()) == len(new.encode())
    (tmp_path / "a").write_bytes(raw.replace(old.encode(), new.encode(), 300))
    tensors = open_pdparams(tmp_path / "a")
    with pytest.raises(UserError, match="the text at byte [0-9]+ is no tensor"):
        tensors.read("w")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    write_pdparams(tmp_path / "a", {"w1": FLAT, "w2": FLAT})
    raw = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(raw.replace(b"\x02w2", b"\x02w1"))
    refused(tmp_path / "a", "a name occurs twice")


@pytest.mark.parametrize("value", [[1], {"w": 1}, {1: FLAT}, {"w": [FLAT]}, {"w": {"v": FLAT}}, {"w": "x" * 5000}])
def test_what_is_no_state_dict_is_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps(value, 4))
    refused(tmp_path / "a", "not a state dict|is not a tensor")


PARTS = {"big@@.0": FLAT[:12], "big@@.1": FLAT[12:]}


@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        ({"OriginShape": (3, 7), "slices": list(PARTS)}, PARTS),
        ({"OriginShape": (4, 5), "slices": ["big@@.0"]}, PARTS),
        ({"OriginShape": (4, 5), "slices": [*PARTS, "big@@.2"]}, PARTS),
        ({"OriginShape": (4, 5), "slices": ["big@@.0", "big@@.0"]}, PARTS),
        ({"OriginShape": (4, 5), "slices": []}, PARTS),
        ({"OriginShape": (2**40, 2**40), "slices": list(PARTS)}, PARTS),
        ({"OriginShape": (-4, -5), "slices": list(PARTS)}, PARTS),
        ({"OriginShape": None, "slices": list(PARTS)}, PARTS),
        ({"OriginShape": (4, 5), "slices": [1, 2]}, PARTS),
        ({"OriginShape": (4, 5)}, PARTS),
        (None, PARTS),
        ({"OriginShape": (4, 5), "slices": list(PARTS)}, PARTS | {"big": FLAT}),
        ({"OriginShape": (4, 5), "slices": list(PARTS)}, PARTS | {"big@@.1": FLAT[12:].astype(np.float64)}),
        ({"OriginShape": (4, 5), "slices": list(PARTS)}, PARTS | {"big@@.1": FLAT[12:].reshape(2, 4)}),
        ({"OriginShape": (4, 5), "slices": ["absent"]}, {}),
    ],
)
def test_a_cut_that_does_not_fit_its_slices_is_refused(tmp_path: Path, cut: Any, parts: Any) -> None:
    write_pdparams(tmp_path / "a", {"w": FLAT}, 3, **parts, **{"UnpackBigParamInfor@@": {"big": cut}})
    refused(tmp_path / "a", "entry UnpackBigParamInfor@@ does not describe")


def test_a_table_of_cuts_that_is_none_is_refused(tmp_path: Path) -> None:
    write_pdparams(tmp_path / "a", {"w": FLAT}, 3, **{"UnpackBigParamInfor@@": [1]})
    refused(tmp_path / "a", "entry UnpackBigParamInfor@@ does not describe")
