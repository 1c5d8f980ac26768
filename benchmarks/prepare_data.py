"""Tokens per second of tools/prepare_data.py over Megatron-LM's tools/preprocess_data.py; its memory against its input.

Both programs turn one JSONL file into the same .bin and .idx, which is checked, with the same tokenizer and number of
workers. The file is made of the built-in corpus, cut into documents of 500 to 8,000 characters. A small file is
prepared too, and the difference is what counts: importing libraries and starting workers takes each program seconds,
and a real corpus takes hours. A shared machine stretches the time on the clock, so the processor time of all processes
is compared as well.

Megatron-LM is fetched with git into a cache outside the repository, or given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT, median_ratio, report

sys.path.insert(0, str(ROOT))

import tokenizers  # noqa: E402
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

from vha_paddle.data.corpus import builtin_documents  # noqa: E402
from vha_paddle.data.sentencepiece_tokenizer import train_sentencepiece  # noqa: E402

MEGATRON_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
MEGATRON_CACHE = Path.home() / ".cache/vha_paddle" / f"Megatron-LM-{MEGATRON_COMMIT[:8]}"
MEGATRON_TYPES = {"sentencepiece": "SentencePieceTokenizer", "huggingface": "HuggingFaceTokenizer"}
VOCABULARY = 16_384
END = "<|endoftext|>"
# Source: tokenizer.json of Qwen/Qwen3-0.6B-Base.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Usage:
    """Of one run: seconds on the clock, seconds of all its processes, bytes of memory of its largest process."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def write_corpus(path: Path, texts: list[str], num_bytes: int) -> None:
    chooser = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            text = chooser.choice(texts)
            length = chooser.randint(500, 8000)
            start = chooser.randrange(max(1, len(text) - length))
            written += file.write(json.dumps({"text": text[start : start + length]}) + "\n")


def write_huggingface(folder: Path, texts: list[str]) -> Path:
    """A byte-level BPE in the form of Qwen3's."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated", invert=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(texts, trainer)
    fast.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 10**9}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# The system counts the memory of a new process from that of the one that starts it, so a small one starts it here.
STARTER = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]))
"""


def run(arguments: list[object]) -> Usage:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STARTER, sys.executable, *map(str, arguments)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return Usage(time.perf_counter() - start, *json.loads(done.stdout))


def ours(corpus: Path, tokenizer: Path, workers: int, out: Path) -> Usage:
    common = ["--tokenizer", tokenizer, "--workers", workers, "--validation-fraction", 0, "--out", out, "--overwrite"]
    return run([ROOT / "tools/prepare_data.py", corpus, *common])


def theirs(megatron: Path, kind: str, corpus: Path, tokenizer: Path, workers: int, prefix: Path) -> Usage:
    program = [ROOT / "benchmarks/workers/megatron_preprocess.py", megatron]
    common = ["--tokenizer-type", MEGATRON_TYPES[kind], "--tokenizer-model", tokenizer, "--append-eod"]
    return run([*program, "--input", corpus, "--output-prefix", prefix, *common, "--workers", workers])


def check_same(out: Path, prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        mine, other = out / f"train{suffix}", prefix.with_name(f"{prefix.name}_text_document{suffix}")
        if mine.read_bytes() != other.read_bytes():
            raise RuntimeError(f"{mine} and {other} differ: the programs did not do the same work")


def compare(kind: str, tokenizer: Path, megatron: Path, folder: Path, arguments: argparse.Namespace) -> None:
    small, large = folder / "small.jsonl", folder / "large.jsonl"
    out, prefix = folder / "out", folder / "megatron"
    clock: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for number in range(arguments.rounds):
        # small and large of each program are neighbours, and the programs take turns
        mine = [ours(corpus, tokenizer, arguments.workers, out) for corpus in (small, large)]
        other = [theirs(megatron, kind, corpus, tokenizer, arguments.workers, prefix) for corpus in (small, large)]
        check_same(out, prefix)
        for index, (first, second) in enumerate((mine, other)):
            clock[index].append(second.seconds - first.seconds)
            cpu[index].append(second.cpu_seconds - first.cpu_seconds)
        line = ", ".join(
            f"{name} {clock[i][-1]:.1f} s ({cpu[i][-1]:.1f} s cpu)" for i, name in enumerate(("ours", "theirs"))
        )
        print(f"{kind} round {number + 1}/{arguments.rounds}: {line}", file=sys.stderr)
    tokens = ((out / "train.bin").stat().st_size // 2) * (1 - small.stat().st_size / large.stat().st_size)
    rates = [f"{tokens / statistics.median(seconds) / 1e6:.2f}" for seconds in clock]
    print(f"{kind}: {rates[0]} million tokens/s, Megatron-LM's {rates[1]}, {arguments.workers} workers each")
    report(f"prepare_data_{kind}_over_megatron", median_ratio(clock[1], clock[0]), 1.5, "ratio", True)
    report(f"prepare_data_{kind}_cpu_over_megatron", median_ratio(cpu[1], cpu[0]), 1.5, "ratio", True)


def measure_memory(tokenizer: Path, texts: list[str], folder: Path, arguments: argparse.Namespace) -> None:
    peaks = []
    for megabytes in arguments.memory_megabytes:
        write_corpus(folder / "memory.jsonl", texts, megabytes * 1_000_000)
        peaks.append(ours(folder / "memory.jsonl", tokenizer, arguments.workers, folder / "out").peak_bytes)
        print(f"{megabytes:,} MB of input: {peaks[-1]:,} bytes in the largest process", file=sys.stderr)
    report("prepare_data_memory_of_largest_over_smallest_input", peaks[-1] / peaks[0], 1.1, "ratio", False)


def fetched_megatron() -> Path:
    """A checkout in the cache, fetched if it is not there."""
    if not MEGATRON_CACHE.is_dir():
        MEGATRON_CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MEGATRON_CACHE.parent) as folder:
            address = "https://github.com/NVIDIA/Megatron-LM"
            for command in (
                ["init", "-q"],
                ["fetch", "-q", "--depth", "1", address, MEGATRON_COMMIT],
                ["checkout", "-q", "FETCH_HEAD"],
            ):
                if subprocess.run(["git", "-C", folder, *command]).returncode:
                    sys.exit(
                        f"error: {address} cannot be fetched; give a checkout of {MEGATRON_COMMIT} with --megatron"
                    )
            shutil.copytree(folder, MEGATRON_CACHE)
    return MEGATRON_CACHE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs=2, default=(8, 80), help="of the small and the large file")
    parser.add_argument("--memory-megabytes", type=int, nargs="+", default=(20, 80, 320))
    parser.add_argument("--megatron", type=Path, help=f"a checkout of Megatron-LM (default: {MEGATRON_CACHE}, fetched)")
    arguments = parser.parse_args()
    megatron = arguments.megatron or fetched_megatron()
    texts = list(builtin_documents())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, megabytes in zip(("small.jsonl", "large.jsonl"), arguments.megabytes, strict=True):
            write_corpus(folder / file, texts, megabytes * 1_000_000)
        train_sentencepiece(texts, VOCABULARY, folder / "tokenizer.model")
        paths = {"sentencepiece": folder / "tokenizer.model", "huggingface": write_huggingface(folder / "hf", texts)}
        for kind, path in paths.items():
            compare(kind, path, megatron, folder, arguments)
        measure_memory(paths["huggingface"], texts, folder, arguments)


if __name__ == "__main__":
    main()
