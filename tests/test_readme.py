"""The Python of README.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vha_paddle import SelfAttentionVHA

ROOT = Path(__file__).resolve().parents[1]


def test_the_snippets_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
    assert names["y_BSD"].shape == [1, 512, 2048]
    assert names["logits_BSV"].shape == [1, 32, names["recipe"].model.vocab_size]
    assert isinstance(names["decoder"].layers[0].self_attn, SelfAttentionVHA)
