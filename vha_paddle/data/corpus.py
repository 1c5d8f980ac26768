"""The built-in corpus: prose that every CPython ships, as documents in an order that depends on nothing else."""

from __future__ import annotations

import ast
import itertools
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from vha_paddle.errors import UserError

# Folders of the standard library whose docstrings are not prose for a reader: tests, generated code pages, an
# editor's menus, grammar machinery, third-party packages.
_SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
    }
)
_SHORTEST_DOCSTRING = 20  # characters; below it there is a label, not a sentence
_LOWEST_LETTER_SHARE = 0.6  # of letters and spaces; below it there is a table, a usage string or ASCII art
_LOWEST_ASCII_SHARE = 0.97  # below it there are samples of other scripts
_REPEATED_PARAGRAPH = 80  # characters; shorter repeats ("For example:") are how English works


def builtin_source() -> str:
    """Name the built-in corpus and the interpreter it was read from: another CPython ships other text."""
    return "builtin: documentation of CPython " + ".".join(map(str, sys.version_info[:3]))


def builtin_documents() -> Iterator[str]:
    """Yield English prose from the running CPython: about 2 MB in 500 documents, under the PSF licence.

    First the chapters of the language reference that `help()` shows (`pydoc_data.topics`), by name; then one
    document for each standard-library module, by path: its module, class and function docstrings in source
    order. The modules are parsed, never imported. A long paragraph that was yielded before is left out,
    because the reference repeats whole sections under several names and a held-out document must not be
    found in training.

    Raises:
        UserError: this interpreter carries no standard-library sources.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    chapters = (topics[name] for name in sorted(topics))
    for text in itertools.chain(chapters, _module_documents()):
        document = _without_repeats(text, seen)
        if document:
            yield document


def _without_repeats(text: str, seen: set[str]) -> str:
    """Drop the long paragraphs of `text` that are in `seen`, and add the others to it."""
    kept = []
    for paragraph in text.strip("\n").split("\n\n"):
        key = paragraph.strip()
        if len(key) >= _REPEATED_PARAGRAPH:
            if key in seen:
                continue
            seen.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _module_documents() -> Iterator[str]:
    """One document for each standard-library module that has prose: its docstrings, blank lines between."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    if not modules:
        raise UserError(
            f"the built-in corpus needs the standard library's .py files and {root} has none; "
            "use a CPython with sources, or give text files"
        )
    for path in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold escapes that newer parsers warn about
            tree = ast.parse(path.read_bytes())
        docstrings = [text for text in _docstrings(tree) if _is_prose(text)]
        if docstrings:
            yield "\n\n".join(docstrings)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of `node` and of everything defined inside it, in source order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstrings(child)


def _is_prose(text: str) -> bool:
    """Whether most of `text` is words of ASCII letters."""
    if len(text) < _SHORTEST_DOCSTRING:
        return False
    wordlike = sum(character.isalpha() or character.isspace() for character in text)
    ascii_only = sum(character.isascii() for character in text)
    return wordlike >= _LOWEST_LETTER_SHARE * len(text) and ascii_only >= _LOWEST_ASCII_SHARE * len(text)
