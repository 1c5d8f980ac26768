"""From nothing to a served model: corpus, training on two CPU ranks, fold, export, proof, a sample of text.

Each stage is a command that you could type; it is printed before it runs. Stages that are done are not repeated:
remove data/quickstart or runs/quickstart to start over.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout without installing

from vha_paddle.config import VirtualHeadAttention, load_recipe
from vha_paddle.counts import kv_cache_bytes
from vha_paddle.errors import RunError, run_tool

RECIPE = "recipes/quickstart.yaml"
DATA = "data/quickstart"
PROMPT = "The statement"
GQA8_HEADS = 8  # the KV heads of the baseline the paper compares with


def command(arguments: list[str], capture: bool = False) -> str:
    """Run one stage with this interpreter; its stdout when captured."""
    shown = shlex.join(["python", *arguments])
    print(f"\n$ {shown}", flush=True)
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE if capture else None
    )
    if result.returncode:
        raise RunError(f"the command above failed with exit code {result.returncode}: {shown}")
    return result.stdout if capture else ""


def evaluate(model: str, sequence_length: int) -> dict[str, Any]:
    arguments = ["tools/evaluate.py", model, "--data", f"{DATA}/validation", "--json"]
    figures: dict[str, Any] = json.loads(command([*arguments, "--sequence-length", str(sequence_length)], capture=True))
    return figures


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recipe = load_recipe(ROOT / RECIPE)
    run, export = recipe.run.output, f"{recipe.run.output}/export"
    if not (ROOT / DATA / "validation.idx").exists():
        size = str(recipe.model.vocab_size)
        command(["tools/prepare_data.py", "--builtin", "--train-tokenizer", size, "--out", DATA])
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(recipe.num_ranks)]
    command([*launcher, "--log_dir", f"{run}/logs", "tools/train.py", RECIPE])
    command(["tools/fold_export.py", run, export, "--verify", "--overwrite"])
    before, after = (evaluate(model, recipe.data.sequence_length) for model in (run, export))
    report = json.loads((ROOT / export / "fold_report.json").read_text(encoding="utf-8"))
    sample = command(
        ["tools/generate.py", export, "--prompt", PROMPT, "--max-new-tokens", "80", "--seed", "1"], capture=True
    )
    print(f"\n{sample.strip()}\n")

    attention = recipe.model.attention
    assert isinstance(attention, VirtualHeadAttention), "the recipe's own kind"
    cache = kv_cache_bytes(attention, "bfloat16")
    gqa8 = cache // attention.num_key_value_heads * GQA8_HEADS
    rows = [
        ("unigram entropy of the validation text", f"{before['unigram_entropy']:.4f} nats/token"),
        ("validation loss before the fold", f"{before['loss']:.4f} nats/token"),
        ("validation loss after it, exported directory", f"{after['loss']:.4f} nats/token"),
        ("largest logit difference", f"{report['verification']['max_abs_difference']:.2e}"),
        ("KV cache before / after the fold", f"{cache} / {cache} bytes per token per layer (bf16)"),
        (f"KV cache of GQA-{GQA8_HEADS} at this head width", f"{gqa8} bytes per token per layer (bf16)"),
        ("metrics of every step", f"{run}/metrics.jsonl"),
        ("checkpoints", f"{run}/checkpoints"),
        ("exported model (stock Qwen3)", export),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    run_tool(main)
