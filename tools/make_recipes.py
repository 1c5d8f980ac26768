"""Write recipes/*.yaml, the table in recipes/README.md and docs/recipes.md, or check that they are up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout without installing

from tools.recipe_book.pages import files
from vha_paddle.errors import RunError, run_tool
from vha_paddle.files import atomic_write

EPILOG = """\
The values and their origins stand in tools/recipe_book/. recipes/quickstart.yaml is written by hand.
exit codes: 0 done, 1 --check found a difference
"""


def stale(root: Path) -> list[str]:
    """Files below `root` that differ from what would be written, and recipes that no cell makes."""
    wanted = files(root)
    different = [
        name for name, text in wanted.items() if not (root / name).is_file() or (root / name).read_text("utf-8") != text
    ]
    found = {f"recipes/{path.name}" for path in (root / "recipes").glob("*.yaml")}
    return different + sorted(found - set(wanted) - {"recipes/quickstart.yaml"})


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    arguments = parser.parse_args()
    if arguments.check:
        differing = stale(ROOT)
        if differing:
            raise RunError(f"{', '.join(differing)}: not as tools/recipe_book says; run python tools/make_recipes.py")
        return
    for name, text in files(ROOT).items():
        with atomic_write(ROOT / name) as file:
            file.write(text.encode())


if __name__ == "__main__":
    run_tool(main)
