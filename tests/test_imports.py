"""The shape of the code: imports point one way, fleet stays in one folder, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vha_paddle"
FILES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))

# A module may import from its own line and from the lines above it.
ORDER = (
    ("errors", "files", "contiguous"),
    ("tensor_file", "config", "rounding"),
    ("tensors",),
    ("counts", "names"),
    ("plan",),
    ("fold",),
    ("maps",),
    ("ops", "host"),
    ("precision",),
    ("parallel",),
    ("attention",),
    ("model",),
    ("data", "checkpoint"),
    ("sources",),
    ("export", "map_report", "run_report"),
    ("proof",),
    ("evaluate", "sampling", "generate", "import_hf"),
    ("warm_start",),
    ("train",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
WITHOUT_PADDLE = {
    "errors",
    "files",
    "contiguous",
    "config",
    "tensors",
    "counts",
    "names",
    "plan",
    "fold",
    "maps",
    "tensor_file",
    "rounding",
}


def unit(path: Path) -> str:
    """The top-level module or sub-package of `vha_paddle` a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # re-exports by name
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "vha_paddle" and len(parts) > 1 and parts[1] in LEVEL:
            same_unit = unit(path) == parts[1]
            assert same_unit or LEVEL[parts[1]] <= LEVEL[unit(path)], f"{relative(path)} imports {name}"


@pytest.mark.parametrize("path", FILES + TOOLS, ids=relative)
def test_only_parallel_imports_fleet(path: Path) -> None:
    if PACKAGE / "parallel" not in path.parents:
        assert not [name for name in imports(path) if "fleet" in name.split(".")]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_folding_side_needs_no_paddle(path: Path) -> None:
    if unit(path) in WITHOUT_PADDLE:
        assert not [name for name in imports(path) if name.split(".")[0] in ("paddle", "paddlenlp")]


@pytest.mark.parametrize("path", FILES + TOOLS, ids=relative)
def test_runtime_code_imports_no_test_dependency_and_no_unpickler(path: Path) -> None:
    forbidden = {"torch", "transformers", "pickle", "yaml", "dill", "joblib"}
    assert not [name for name in imports(path) if name.split(".")[0] in forbidden]


@pytest.mark.parametrize("path", FILES + TOOLS, ids=relative)
def test_a_file_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def test_every_module_of_the_package_has_its_place_in_the_order() -> None:
    assert {unit(path) for path in FILES} - {"__init__"} <= set(LEVEL)


def test_importing_the_package_loads_neither_paddle_nor_paddlenlp() -> None:
    code = "import sys, vha_paddle; print(sorted({'paddle', 'paddlenlp'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr
