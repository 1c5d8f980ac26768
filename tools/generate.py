#!/usr/bin/env python
"""Write text with an exported model, token by token, on a cache that holds its K key/value heads."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout without installing

from vha_paddle.errors import run_tool
from vha_paddle.host import prepare_process
from vha_paddle.sampling import Sampling

MAX_NEW_TOKENS = 100

EPILOG = """\
examples:
  a checkpoint is exported first:  python tools/fold_export.py runs/quickstart exported/quickstart
  then it writes:                  python tools/generate.py exported/quickstart --prompt "Once upon a time"
  always the likeliest token:      python tools/generate.py exported/quickstart --prompt "A" --temperature 0
  from nothing, another text:      python tools/generate.py exported/quickstart --seed 7

The prompt is printed, then the text as it comes, until the model's end token or --max-new-tokens. One seed
gives one text on the same machine. A higher temperature is more surprising; --top-k and, after it, --top-p
leave out unlikely tokens.
With --json one object is printed at the end: "text" (without the prompt), "tokens" (ids), "stopped" ("end" or
"length"), and "kv_cache": all bytes of the cache, and for the layers of each form the key/value heads, the positions
kept (the last ones, where a sliding window is shorter than the text) and the bytes per position.
exit codes: 0 done, 1 the model's logits are not finite, 2 wrong input.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="what tools/fold_export.py made")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue; default: none")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"default: {MAX_NEW_TOKENS}, or as many as fit into the model's max_position_embeddings after the prompt",
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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    prepare_process()
    from vha_paddle.generate import ExportedModel, TextStream, generate
    from vha_paddle.host import set_compute_threads

    set_compute_threads()
    model = ExportedModel.load(arguments.model)
    prompt = model.encode(arguments.prompt)
    max_new_tokens = arguments.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(
            1, min(MAX_NEW_TOKENS, model.max_positions - len(prompt))
        )  # a full prompt is refused below
    decoder = model.decoder(len(prompt), max_new_tokens)

    def show(text: str) -> str:
        if not arguments.json:
            print(text, end="", flush=True)
        return text

    show(arguments.prompt)
    stream, tokens, text = TextStream(model.tokenizer), [], ""
    for token in generate(decoder, prompt, max_new_tokens, sampling, model.end_id):
        tokens.append(token)
        text += show(stream.push(token))
    text += show(stream.finish())
    show("\n")
    if arguments.json:
        found = {
            "prompt": arguments.prompt,
            "prompt_tokens": prompt,
            "text": text,
            "tokens": tokens,
            "stopped": "end" if tokens[-1] == model.end_id else "length",
            "sampling": asdict(sampling),
            "kv_cache": decoder.cache_figures(),
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    run_tool(main)
