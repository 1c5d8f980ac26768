"""The README's first command, in a copy of the tree and with few steps: every stage as a user runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEWER_STEPS = {
    "total_tokens: 1024000 ": "total_tokens: 20480 ",
    "warmup_tokens: 51200\n": "warmup_tokens: 2048\n",
    "interval: 250\n": "interval: 10\n",
}


def test_the_quickstart_ends_with_a_served_model_of_the_same_loss(tmp_path: Path) -> None:
    for name in ("vha_paddle", "tools", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    recipe = tmp_path / "recipes/quickstart.yaml"
    text = recipe.read_text(encoding="utf-8")
    for old, new in FEWER_STEPS.items():
        assert old in text
        text = text.replace(old, new)
    recipe.write_text(text, encoding="utf-8")

    result = subprocess.run(
        [sys.executable, "tools/quickstart.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    before, after = re.findall(r"^validation loss .* ([0-9.]+) nats/token$", result.stdout, re.MULTILINE)
    assert before == after
    run = tmp_path / "runs/quickstart"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 20
    assert json.loads((run / "export/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
