"""Run every benchmark in turn. Close other programs first: ratios survive a noisy machine, targets may not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "ops.py",
    "vha_over_gqa.py",
    "kinds.py",
    "postmix_space.py",
    "peers.py",
    "moe.py",
    "checkpoint.py",
    "loader.py",
    "fold_export.py",
    "prepare_data.py",
    "scaling.py",
)


def main() -> None:
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(HERE / script)], check=True)


if __name__ == "__main__":
    main()
