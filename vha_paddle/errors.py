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


def run_tool(main: Callable[[], None]) -> None:
    """Run a command-line entry point; a `UserError` or `RunError` becomes one line on stderr and its exit code."""
    try:
        main()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our stdout (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
