#!/usr/bin/env python
"""Write text with a model, token by token, on a cache that holds its K key/value heads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import UserError, run_tool
from vha_paddle.host import prepare_process
from vha_paddle.sampling import Sampling

if TYPE_CHECKING:
    from vha_paddle.generate.batch import Text
    from vha_paddle.generate.model import TextModel

MAX_NEW_TOKENS = 100
BATCH_SIZE = 16

EPILOG = """\
examples:
  an exported directory:        python tools/generate.py exported/quickstart --prompt "Once upon a time"
  a run's newest checkpoint:    python tools/generate.py runs/quickstart --prompt "Once upon a time"
  always the likeliest token:   python tools/generate.py exported/quickstart --prompt "A" --temperature 0
  from nothing, three texts:    python tools/generate.py exported/quickstart --num-samples 3 --seed 7
  many prompts, as JSON:        python tools/generate.py exported/quickstart --prompts-file prompts.jsonl --json

A checkpoint with virtual heads is folded in memory first. What was read, and how large the cache is, is said on
stderr. One text is printed as it comes, after its prompt, until the model's end token or --max-new-tokens; of
several, each is printed when it has ended. One seed gives one text on the same machine, whatever else is written
with it. A higher temperature is more surprising; --top-k and, after it, --top-p leave out unlikely tokens.
With --json one object is printed at the end. "texts", in the order of the prompts: "prompt", "prompt_tokens" (ids),
"sample", "text" (without the prompt), "tokens" (ids), "stopped" ("end" or "length"). "kv_cache", of the first batch:
all bytes, and for the layers of each form the key/value heads, the positions kept (the last ones, where a sliding
window is shorter than the text) and the bytes per position of one text.
exit codes: 0 done, 1 the model's logits are not finite, 2 wrong input.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="what tools/fold_export.py made, a checkpoint, or a run directory"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated; default: none"
    )
    prompts.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help='a prompt a line, or in a .jsonl file {"prompt": "text"}'
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts of each prompt; default: 1")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        metavar="N",
        help="texts that are written at once; default: %(default)s",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default: {MAX_NEW_TOKENS}, or as many as fit into the model's max_position_embeddings after the "
        "longest prompt",
    )
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: greedy; default: %(default)s")
    parser.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens; default: all")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the likeliest tokens with probability P together; default: %(default)s, all",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the texts")
    return parser.parse_args()


class Writer:
    """Prints one text as it comes, or each of several once it has ended."""

    def __init__(self, model: TextModel, prompts: Sequence[str], texts: Sequence[Text], silent: bool) -> None:
        from vha_paddle.generate.text import TextStream

        self._model, self._texts, self._silent = model, texts, silent
        self._streams_directly = len(texts) == 1
        self._streams = [TextStream(model.tokenizer, text.prompt) for text in texts]
        self.found: list[dict[str, Any]] = [
            {"prompt": prompt, "prompt_tokens": list(text.prompt), "sample": text.sample, "text": "", "tokens": []}
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def push(self, number: int, token: int, max_new_tokens: int) -> None:
        """Take in the next token of a text."""
        found = self.found[number]
        if self._streams_directly and not found["tokens"]:
            self._show(found["prompt"])
        found["tokens"].append(token)
        self._write(found, self._streams[number].push(token))
        is_end = token in self._model.end_ids
        if is_end or len(found["tokens"]) == max_new_tokens:
            found["stopped"] = "end" if is_end else "length"
            self._write(found, self._streams[number].finish())
            if self._streams_directly:
                self._show("\n")
            else:
                title = f"--- text {number + 1} of {len(self._texts)} ({found['stopped']})"
                self._show(f"{title}\n{found['prompt']}{found['text']}\n")

    def _write(self, found: dict[str, Any], text: str) -> None:
        found["text"] += text
        if self._streams_directly:
            self._show(text)

    def _show(self, text: str) -> None:
        if not self._silent:
            print(text, end="", flush=True)


def batches(texts: Sequence[Text], size: int) -> Iterator[tuple[int, Sequence[Text]]]:
    """The texts in runs of `size`, each with the number of its first."""
    for first in range(0, len(texts), size):
        yield first, texts[first : first + size]


def main() -> None:
    arguments = parse_arguments()
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    for option in ("num_samples", "batch_size"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be at least 1")
    if sampling.temperature == 0:
        _refuse_draws(arguments)
    prepare_process()
    from vha_paddle.evaluate import assumptions
    from vha_paddle.generate.batch import Text, generate
    from vha_paddle.generate.model import TextModel
    from vha_paddle.generate.prompts import read_prompts
    from vha_paddle.host import set_compute_threads

    set_compute_threads()
    prompts = read_prompts(arguments.prompts_file) if arguments.prompts_file else arguments.prompt or [""]
    model = TextModel.load(arguments.model)
    for line in assumptions(arguments.model):
        print(f"note: {line}", file=sys.stderr)
    samples = range(arguments.num_samples)
    texts = [Text(tokens, sample) for tokens in map(model.encode, prompts) for sample in samples]
    longest = max(len(text.prompt) for text in texts)
    max_new_tokens = arguments.max_new_tokens
    if max_new_tokens is None:  # a full prompt is refused below
        max_new_tokens = max(1, min(MAX_NEW_TOKENS, model.config.max_position_embeddings - longest))
    writer = Writer(model, [prompt for prompt in prompts for _ in samples], texts, arguments.json)
    cache: dict[str, Any] = {}
    for first, batch in batches(texts, arguments.batch_size):
        decoder = model.decoder(longest, max_new_tokens)
        for number, token in generate(decoder, batch, max_new_tokens, sampling, model.end_ids):
            if not cache:
                cache = decoder.cache_figures()
                print(f"{model.origin}; {describe(cache)}", file=sys.stderr, flush=True)
            writer.push(first + number, token, max_new_tokens)
    if arguments.json:
        found = {"texts": writer.found, "sampling": asdict(sampling), "kv_cache": cache}
        print(json.dumps(found, indent=2, ensure_ascii=False))


def _refuse_draws(arguments: argparse.Namespace) -> None:
    """Flags that choose among draws, where none is made."""
    given = {"--top-k": arguments.top_k, "--top-p": arguments.top_p, "--num-samples": arguments.num_samples}
    for (flag, value), unset in zip(given.items(), (None, 1.0, 1), strict=True):
        if value != unset:
            raise UserError(
                f"{flag} {value}: has no effect with --temperature 0, which draws nothing; drop one of them"
            )


def describe(cache: dict[str, Any]) -> str:
    """The size of a cache in one line."""
    layers = ", ".join(
        f"{form['count']} layers x {form['num_key_value_heads']} key/value heads x {form['positions']} positions"
        for form in cache["layers"]
    )
    texts = "text" if cache["texts"] == 1 else "texts"
    return f"cache of {cache['bytes']:,} bytes in {cache['dtype']}: {cache['texts']} {texts} x ({layers})"


if __name__ == "__main__":
    run_tool(main)
