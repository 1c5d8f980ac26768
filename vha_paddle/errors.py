"""The two ways a command of this project can fail, and the exit code of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what the user gave: one line naming the key or file, the value, the rule, the remedy."""

    exit_code = 2


class RunError(Exception):
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
