"""The proof holds two layers and the tensors at the ends, however many layers there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import SMALL_MIXTURE, SMALL_VHA
from tests.proof.exports import make
from vha_paddle.config import Model
from vha_paddle.tensors import EMBEDDING, layer_tensors, model_tensors

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = SMALL_VHA | {"head_dim": 64}
DENSE: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 2560, "num_hidden_layers": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 320}
MIXTURE: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 16} | SMALL_MIXTURE | {"experts": EXPERTS}
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 20_000}
SLACK = 48 << 20  # activations, pieces of logits, what allocators keep: alike for models of any size


def allowed(model: Model) -> int:
    """What vha_paddle/proof/prove.py says that it needs, beside SLACK."""
    specs = layer_tensors(model, 0)
    attention = sum(spec.size for spec in specs if ".self_attn." in spec.name)
    layer = 2 * 4 * sum(spec.size for spec in specs) + 3 * 8 * attention + 4 * max(spec.size for spec in specs)
    ends = 2 * 4 * next(spec.size for spec in model_tensors(model) if spec.name == EMBEDDING)
    return max(layer, ends)


@pytest.mark.parametrize(
    ("sizes", "times"), [(DENSE, 2), (MIXTURE, 2), (WIDE, 0)], ids=["dense", "mixture", "vocabulary"]
)
def test_the_memory_of_a_proof_is_that_of_two_layers_or_of_the_ends(
    sizes: dict[str, Any], times: float, tmp_path: Path
) -> None:
    make(tmp_path / "small", SMALL_VHA)
    made = make(tmp_path / "large", ATTENTION, **sizes)
    model = made.recipe.model
    command = [sys.executable, "-m", "tests.proof.memory_worker", str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    grown, whole = int(result.stdout.splitlines()[-1]), 4 * sum(spec.size for spec in model_tensors(model))
    assert grown <= allowed(model) + SLACK, f"{grown / 1e6:.0f} MB, allowed {(allowed(model) + SLACK) / 1e6:.0f} MB"
    assert whole > times * (allowed(model) + SLACK), "the model is no larger than what is allowed"
