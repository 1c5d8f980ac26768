"""Memory of an export, as the system counts it: mapped pages of files too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_EXPERTS, SMALL_VHA, small_recipe, small_tokenizer, write_checkpoint
from vha_paddle.names import expected_tensors

ROOT = Path(__file__).resolve().parents[2]

# Exports a small checkpoint, then a large one; prints by how many bytes the peak has grown.
PROGRAM = """
import re, sys
from pathlib import Path
from vha_paddle.export import ahead
from vha_paddle.export.fold_export import export_checkpoint

def peak():  # of this program; ru_maxrss would have that of the process which started it too
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024

ahead._AHEAD_BYTES = ahead._NEXT_BYTES = 4 << 20
small, large, out, dtype = *map(Path, sys.argv[1:4]), sys.argv[4]
export_checkpoint(small, out / "small", dtype)
before = peak()
export_checkpoint(large, out / "large", dtype)
print(peak() - before)
"""
DENSE = {"hidden_size": 256, "intermediate_size": 2048}
MIXTURE = {"hidden_size": 256, "intermediate_size": None, "experts": SMALL_EXPERTS | {"moe_intermediate_size": 512}}


@pytest.mark.parametrize(
    ("keys", "dtype", "num_files"),
    [(DENSE, "float32", 1), (DENSE, "bfloat16", 2), (MIXTURE, "float32", 1)],
    ids=["dense", "dense, bfloat16, two files", "mixture"],
)
def test_memory_does_not_grow_with_the_number_of_layers(
    keys: dict[str, Any], dtype: str, num_files: int, tmp_path: Path
) -> None:
    paths, sizes = [], []
    for layers in (1, 18):
        recipe = small_recipe(SMALL_VHA, num_hidden_layers=layers, **keys)
        weights = {name: np.ones(shape, np.float32) for name, shape in expected_tensors(recipe.model).items()}
        paths.append(write_checkpoint(tmp_path / str(layers), recipe, weights, small_tokenizer(), num_files))
        sizes.append(sum(array.nbytes for array in weights.values()))
    command = [sys.executable, "-c", PROGRAM, *map(str, paths), str(tmp_path / "out"), dtype]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grown = int(result.stdout)
    assert grown < (sizes[1] - sizes[0]) / 4, f"{grown:,} bytes for weights of {sizes[1]:,}"
