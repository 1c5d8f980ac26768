"""The built-in corpus."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vha_paddle.data import corpus
from vha_paddle.data.corpus import builtin_documents
from vha_paddle.errors import UserError


@pytest.fixture(scope="module")
def builtin() -> list[str]:
    return list(builtin_documents())


def test_builtin_corpus_is_megabytes_of_mostly_ascii_words(builtin: list[str]) -> None:
    text = "\n".join(builtin)
    assert len(builtin) > 300
    assert 1.5e6 < len(text.encode()) < 4e6
    assert sum(character.isascii() for character in text) > 0.999 * len(text)
    assert sum(character.isalpha() or character.isspace() for character in text) > 0.8 * len(text)


def test_builtin_corpus_has_the_reference_and_the_docstrings(builtin: list[str]) -> None:
    assert any(document.startswith('The "assert" statement\n*****') for document in builtin)
    assert any(json.__doc__.strip().splitlines()[0] in document for document in builtin)


def test_builtin_corpus_is_the_same_each_time_and_imports_nothing_it_reads(builtin: list[str]) -> None:
    sys.modules.pop("turtle", None)
    again = list(builtin_documents())
    assert again == builtin
    assert any("Turtle graphics is a popular way" in document for document in again)
    assert "turtle" not in sys.modules


def test_builtin_corpus_repeats_no_long_paragraph(builtin: list[str]) -> None:
    paragraphs = [part.strip() for document in builtin for part in document.split("\n\n")]
    long = [part for part in paragraphs if len(part) >= 80]
    assert len(long) > 5000
    assert len(set(long)) == len(long)


def test_module_document_is_its_prose_in_source_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''"""First the docstring of the module."""
class A:
    """Then the docstring of the class."""
    def method(self):
        """Short."""
        async def inner():
            """Then what is defined inside of it.

            >   indented   <
            """
if True:
    def late():
        """Last the function under a condition."""
    def table():
        """1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |"""
    def other_script():
        """Текст на другом языке не нужен."""
'''
    for name in ("b.py", "a/c.py", "a/test/d.py", "idlelib/e.py", "site-packages/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source.replace("First", name), "utf-8")
    (tmp_path / "empty.py").write_text("x = 1")
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    rest = """ the docstring of the module.

Then the docstring of the class.

Then what is defined inside of it.

>   indented   <

Last the function under a condition."""
    assert list(corpus._module_documents()) == ["a/c.py" + rest, "b.py" + rest]


def test_interpreter_without_sources_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="needs the standard library's .py files"):
        list(builtin_documents())
