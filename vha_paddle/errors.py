"""The two ways a command of this project can fail, and the exit code of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_LONGEST_LINE = 2_000  # characters; what a hostile file says may be any size


class _OneLine(Exception):
    """An error whose message is printable and on one line, whatever of a file or a name stands in it."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _LONGEST_LINE:
            text = f"{text[: _LONGEST_LINE // 2]} [...] {text[-_LONGEST_LINE // 2 :]}"
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class UserError(_OneLine):
    """A mistake in what the user gave: one line naming the key or file, the value, the rule, the remedy."""

    exit_code = 2


class RunError(_OneLine):
    """The input was valid, the work failed or its result broke a stated bound."""

    exit_code = 1


class Interrupted(Exception):
    """A signal asked for the end: what was done is saved, and the same command continues it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


def run_tool(main: Callable[[], None]) -> None:
    """Run a command-line entry point; a `UserError` or `RunError` becomes one line on stderr and its exit code."""
    try:
        main()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(interruption.exit_code)
    except BrokenPipeError:  # the reader of our stdout (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
