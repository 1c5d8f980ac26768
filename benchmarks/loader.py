"""What a run's data cost: tokens a second that one process reads of a blend, and their share of a training step.

The stream is read as a rank reads it: its rows of a batch of 4,096-token samples out of three sets, shuffled, as int64
inputs and labels. The files lie in the page cache. The share is that of the phase `data` in metrics.jsonl of a short
run of a small model, whose steps leave the reader less time than those of a large one.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from vha_paddle.host import prepare_process, set_compute_threads  # noqa: E402

prepare_process()
import numpy as np  # noqa: E402
from harness import report  # noqa: E402

from vha_paddle.config import load_recipe  # noqa: E402
from vha_paddle.config.load import with_overrides  # noqa: E402
from vha_paddle.data.indexed import IndexedTokens, write_indexed  # noqa: E402
from vha_paddle.data.loader import Part, TokenBatches  # noqa: E402
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece  # noqa: E402
from vha_paddle.data.shuffle import shuffled  # noqa: E402
from vha_paddle.parallel.mesh import Mesh  # noqa: E402
from vha_paddle.train.data import RunData  # noqa: E402
from vha_paddle.train.trainer import Trainer  # noqa: E402

VOCAB, DOCUMENT = 2048, 1 << 16
SEQUENCE, ROWS = 4096, 64  # of one step: 262,144 tokens
WEIGHTS = {"web": 7, "code": 2, "books": 1}
SAMPLES_OF_500B = 122_000_000  # of 4,096 tokens
STEPS = 60


def write_set(prefix: Path, tokens: int, digest: str, eod_id: int) -> None:
    rng = np.random.default_rng(len(prefix.name))
    documents = (rng.integers(4, 300, DOCUMENT - 1) for _ in range(tokens // DOCUMENT))
    write_indexed(prefix, documents, VOCAB, eod_id=eod_id, tokenizer_sha256=digest, source="random tokens")


def reading(folder: Path, rounds: int) -> float:
    """Median tokens a second."""
    parts = [Part(IndexedTokens(folder / name, vocab_size=VOCAB), weight) for name, weight in WEIGHTS.items()]
    batches = TokenBatches(parts, SEQUENCE, 8 * ROWS, seed=0, vocab_size=VOCAB)
    rates = []
    for step in range(rounds + 2):
        start = time.perf_counter()
        tokens_BS, _ = batches.batch(step, ROWS, 2 * ROWS)
        rates.append(tokens_BS.size / (time.perf_counter() - start))
    return statistics.median(rates[2:])


def share_of_a_step(folder: Path) -> float:
    """Seconds of the phase `data` over those of whole steps, the first of them left out."""
    sets = ", ".join(f"{{prefix: {folder / name}, weight: {weight}}}" for name, weight in WEIGHTS.items())
    overrides = [
        f"run.output={folder / 'run'}",
        f"data.train=[{sets}]",
        "data.validation=null",
        "logging.eval_interval=null",
        f"data.tokenizer={folder / 'tokenizer.model'}",
        f"schedule.total_tokens={STEPS * 1024}",
        "schedule.warmup_tokens=0",
        "parallel.tensor=1",
        f"logging.interval={STEPS}",
    ]
    recipe = with_overrides(load_recipe(HERE.parent / "recipes/quickstart.yaml"), overrides)
    set_compute_threads()
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines][1:]
    training = ("data", "forward", "backward", "gradients", "optimizer")
    return statistics.median(one["data"] / sum(one[phase] for phase in training) for one in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1 << 26, help="of each of the three sets")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tokenizer = train_sentencepiece(
            ["the head reads every key and value of the group"] * 3, 290, folder / "tokenizer.model"
        )
        for name in WEIGHTS:
            write_set(folder / name, arguments.tokens, tokenizer.digest, tokenizer.eos_id)
        rate = reading(folder, arguments.rounds)
        share = share_of_a_step(folder)
    start = time.perf_counter()
    shuffled(np.arange(512), SAMPLES_OF_500B, 0, 0, 0)
    print(f"order of 512 samples out of {SAMPLES_OF_500B:,}: {1e3 * (time.perf_counter() - start):.2f} ms")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory with 3 sets of {arguments.tokens:,} tokens: {peak:,.0f} MB")
    report("loader_tokens_per_second", rate / 1e6, 5.0, "million tokens/s", True)
    report("loader_share_of_a_step", share, 0.01, "ratio", False)


if __name__ == "__main__":
    main()
