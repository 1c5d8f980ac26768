"""Where documents come from: prose that every CPython ships, plain-text files and JSONL files.

A document is one string of English, code or anything else; everything after this module sees only strings.
Every reader yields its documents in an order that depends on nothing but its input.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from vha_paddle.errors import UserError

SUFFIXES = (".txt", ".jsonl")

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


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Resolve what the user named into files: a directory becomes every .txt and .jsonl file below it.

    Files keep the order of `paths`; inside a directory they are sorted by path, because the order in which a
    file system lists them differs between machines. A file that is named twice is read once.

    Raises:
        UserError: a path is missing, a file has another suffix, or a directory has nothing to read.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        for file in _files_below(path) if path.is_dir() else [path]:
            if not file.exists():
                raise UserError(f"input {file} does not exist; name a .txt or .jsonl file, or a directory of them")
            if file.suffix not in SUFFIXES:
                raise UserError(f"input {file} must end in .txt (one document) or .jsonl (one a line)")
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _files_below(folder: Path) -> list[Path]:
    """Every readable kind of file below `folder`, by path."""
    below = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    if not below:
        raise UserError(f"input {folder} has no .txt or .jsonl file below it; name one that has")
    return sorted(below, key=lambda path: path.relative_to(folder).as_posix())


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of one file: a .txt file is one document, a .jsonl file one for each line's `text`.

    Line ends and indentation are kept as they are. Documents of nothing but white space are left out.

    Raises:
        UserError: the file cannot be read or is not UTF-8, or a line is no JSON object with a string `text`.
    """
    reader = _jsonl_documents if path.suffix == ".jsonl" else _text_document
    try:
        for document in reader(path):
            if document.strip():
                yield document
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _text_document(path: Path) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8-sig")


def _jsonl_documents(path: Path) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 at its byte {error.start}; convert the file") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error.msg}); each line must be one object") from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise UserError(f'{where} must be an object with a string under the key "text"')
            text = record["text"]
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"{where} holds half of a surrogate pair; repair its \\u escapes")
            yield text
