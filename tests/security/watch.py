"""What a reader did while it read: Python's own record of code that was run and of files that were opened."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_RUNS_CODE = ("exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
_CHANGES_FILES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
_CONNECTS = ("socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "pickle.find_class", "marshal.loads")
_watching: list[tuple[Path, list[str]]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    folder, seen = _watching[-1]
    if event in _RUNS_CODE or event in _CHANGES_FILES or event in _CONNECTS:
        seen.append(f"{event} {arguments!r:.200}")
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not Path(path).is_relative_to(folder) and not path.startswith("/proc/self/"):
            seen.append(f"open {path}")


for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le"):
    codecs.lookup(encoding)  # json guesses one by a file's first bytes; each is a module of its own

sys.addaudithook(_hook)  # stays for good, and looks at nothing outside of `watched`


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Gives the list that everything is added to which a reader of `folder` must not do: run or load code, change or
    open a file outside, connect."""
    seen: list[str] = []
    _watching.append((folder.resolve(), seen))
    try:
        yield seen
    finally:
        _watching.pop()
