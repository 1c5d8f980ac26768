"""Two ranks: the main one waits for the other, which has the most memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from vha_paddle.config import Parallel
from vha_paddle.parallel.start import start_mesh
from vha_paddle.train.usage import Usage, peak_memory

LATE = 1.0  # seconds

mesh = start_mesh(Parallel(data=2), 2)
mesh.barrier()
usage = Usage(mesh)
if not mesh.is_main:
    most = np.ones(peak_memory()["resident"] + (64 << 20), np.uint8)
    time.sleep(LATE)
mesh.barrier()
record = usage.record(with_memory=True)
assert usage.record(with_memory=False)["communication_seconds"] < LATE  # that of the collective for memory
peaks = mesh.objects(peak_memory()["resident"])
assert peaks[0] < record["memory"]["resident"] <= peaks[1], (record, peaks)
if mesh.is_main:
    assert record["communication_seconds"] > 0.9 * LATE, record
    (Path(sys.argv[1]) / "done").touch()
mesh.barrier()
