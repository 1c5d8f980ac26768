"""Run a script or module as a process that is killed when its parent ends: `python tied.py SCRIPT|MODULE ARGUMENTS...`

A launcher run so ends with the test, and a rank with its launcher, which gives each rank a session of its own, where
no signal to the launcher's group reaches it.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
