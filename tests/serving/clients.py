"""Which client is asked for which models, in which processes, and what each is known to do with them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.serving.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
OURS = Path(sys.executable)
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
LLAMA = ROOT / ".venv-llama" / "bin" / "python"

Outcome = Literal["same", "refused", "other model"]
"""same: the reference's log-probabilities within the bound, its tokens exactly; refused: an error; other model: it
answers without a word, and something else."""

OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

REFERENCE = "transformers 5"


@dataclass(frozen=True)
class Process:
    """One start of a client."""

    client: str
    """Its column in the table."""
    python: Path
    worker: str
    models: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    expected: Outcome = "same"
    reads: Literal["export", "checkpoint"] = "export"

    def environment(self) -> dict[str, str]:
        """No option of this package; vLLM and Hugging Face's libraries have no other way to be told."""
        environment = os.environ | OFFLINE
        environment.pop("PYTHONPATH", None)
        return environment | ({"PYTHONPATH": str(ROOT)} if self.python == OURS else {})


def _of(*forms: str) -> tuple[str, ...]:
    return tuple(name for name, model in MODELS.items() if model.form in forms)


ALL = tuple(MODELS)
# rounding is no part of what a checkpoint computes
UNROUNDED = tuple(name for name, model in MODELS.items() if model.dtype == "float32")

BY_TRANSFORMERS = {"model_impl": "transformers"}

PROCESSES = (
    Process(REFERENCE, LLAMA, "transformers_tokens.py", ALL),
    Process("transformers 4", OURS, "transformers_tokens.py", ALL),
    Process("checkpoint", OURS, "ours.py", UNROUNDED, {"form": "checkpoint"}, reads="checkpoint"),
    Process("generate", OURS, "ours.py", _of("dense", "experts", "windows", "biases"), {"form": "generate"}),
    Process("vLLM", VLLM, "vllm_tokens.py", _of("dense")),
    Process("vLLM", VLLM, "vllm_tokens.py", _of("experts")),  # after a dense model in its process it fails
    Process("vLLM", VLLM, "vllm_tokens.py", _of("windows"), expected="refused"),
    Process("vLLM", VLLM, "vllm_tokens.py", _of("biases"), expected="other model"),
    Process("vLLM", VLLM, "vllm_tokens.py", _of("latent"), expected="other model"),
    Process("vLLM", VLLM, "vllm_tokens.py", _of("latent experts"), expected="other model"),
    Process("vLLM by transformers", VLLM, "vllm_tokens.py", _of("windows", "biases", "latent"), BY_TRANSFORMERS),
    Process("vLLM by transformers", VLLM, "vllm_tokens.py", _of("latent experts"), BY_TRANSFORMERS),
    Process("llama.cpp", LLAMA, "llama_tokens.py", _of("dense")),
    Process(
        "llama.cpp",
        LLAMA,
        "llama_tokens.py",
        _of("experts", "biases", "latent", "latent experts"),
        expected="refused",
    ),
    Process("llama.cpp by wrapper", LLAMA, "llama_tokens.py", _of("experts"), {"by_wrapper": True}),
    Process("llama.cpp", LLAMA, "llama_tokens.py", _of("windows"), expected="other model"),
)
