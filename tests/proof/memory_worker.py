"""Prove an export after a small one, and print by how many bytes the process grew at most meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

from vha_paddle.host import prepare_process

prepare_process()
from vha_paddle.proof.prove import prove_export  # noqa: E402
from vha_paddle.sources.own import open_own  # noqa: E402


def prove(folder: Path) -> None:
    assert prove_export(open_own(folder / "checkpoint", with_digests=False), folder / "out").passed


def kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


prove(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
before = kilobytes("VmRSS")
prove(Path(sys.argv[2]))
print((kilobytes("VmHWM") - before) * 1024)
