"""What a model costs, from its numbers alone: cache, parameters, FLOPs, decoding, the fold; and the paper's claims."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vha_paddle.config import Recipe, load_recipe
from vha_paddle.counts import FlopRule, claims, compare, table5, topics
from vha_paddle.counts.flags import FLAGS, described, tokens_of, value_of
from vha_paddle.counts.shapes import OTHER_BASELINE, SHAPES, TABLE5_INTERMEDIATE, counting_recipe, title
from vha_paddle.errors import UserError, run_tool
from vha_paddle.plan import decode
from vha_paddle.plan.gpus import GPUS, gpu_named

TEXT = """
topics (docs/calculators.md says what each counts):
  cache    KV-cache bytes per token of context and for a whole sequence, as served
  params   parameters by tensor, in total, of one rank, of one token, and as served after the fold
  flops    FLOPs per token: a forward pass by part; training and folded prefill under each rule of counting
  decode   bytes and FLOPs of a decoder step, and the most tokens per second that a GPU can give
  fold     which of VHA's maps fold, and what the served model costs beside the trained one
  table5   the paper's FLOP table beside ours
  claims   each claim made of VHA that arithmetic can check, beside what it gives

The model of a topic is a recipe, a named shape, or described by flags; flags also change a named shape.

examples:
  python tools/calculate.py cache recipes/quickstart.yaml
  python tools/calculate.py params recipes/quickstart.yaml parallel.tensor=4
  python tools/calculate.py cache --shape 1.7B --attention gqa 16-2 mla vha --sequence-length 32768
  python tools/calculate.py params --shape 30B-A3B --attention vha --expert 8
  python tools/calculate.py flops --shape 1.7B --attention vha --no-lm-head --intermediate-size 5504
  python tools/calculate.py flops --shape 1.7B --attention vha --folded --causal
  python tools/calculate.py decode --shape 1.7B --attention gqa-8 vha mla --batch 64 --context 32K --gpu h200
  python tools/calculate.py fold --shape 1.7B --attention vha --output-gate after_postmix
  python tools/calculate.py cache --kind mla --hidden 2048 --layers 28 --heads 16 --intermediate-size 6144
  python tools/calculate.py flops --kind vha --hidden 1024 --layers 12 --heads 8 --kv-heads 2 --head-dim 64 \\
      --postmix-rank 2 --intermediate-size 3072 --vocab 32000 --tied true --window 512 --full-every 4
  python tools/calculate.py table5 --lm-head --causal
  python tools/calculate.py claims --only differs
  python tools/calculate.py claims --json

exit status: 0 done, 2 wrong recipe or arguments.
"""

KINDS = ("grouped", "vha", "mla", "mfa", "gva", "dcmha")

TOPICS_OF = {
    "sequence_length": ("cache", "flops", "decode", "fold"),
    "tensor": ("params",),
    "expert": ("params",),
    "lm_head": ("flops", "fold", "table5"),
    "causal": ("flops", "fold", "table5"),
    "folded": ("flops",),
    "batch": ("decode",),
    "context": ("decode",),
    "gpu": ("decode",),
    "only": ("claims",),
}
"""The topics that a flag means something to; flags that are not listed describe a model."""


def check_used(arguments: argparse.Namespace) -> None:
    """Refuse what the topic would ignore.

    Raises:
        UserError: naming the flag, and the topics that it is for.
    """
    for name, topics_of in TOPICS_OF.items():
        if getattr(arguments, name) is not None and arguments.topic not in topics_of:
            raise UserError(f"--{name.replace('_', '-')}: is for {', '.join(topics_of)}; drop it")
    if arguments.topic not in ("claims", "table5"):
        return
    allowed = ("intermediate_size",) if arguments.topic == "table5" else ()
    of_models = ("recipe", "shape", "attention", "kind", *(flag.replace("-", "_") for flag in FLAGS))
    for name in of_models:
        if name not in allowed and getattr(arguments, name) is not None:
            shown = str(arguments.recipe) if name == "recipe" else f"--{name.replace('_', '-')}"
            raise UserError(f"{shown}: {arguments.topic} is about the paper's own models; drop it")


def recipes(arguments: argparse.Namespace) -> dict[str, Recipe]:
    """The models to count, by the names they are printed under."""
    ways = (arguments.recipe, arguments.shape, arguments.kind)
    if sum(way is not None for way in ways) != 1:
        raise UserError("the model: give one of a recipe, --shape (with --attention), and --kind with its sizes")
    typed = {flag: getattr(arguments, flag.replace("-", "_")) for flag in FLAGS}
    typed = {flag: value_of(value) for flag, value in typed.items() if value is not None}
    if arguments.recipe is not None:
        others = {"attention", "sequence_length", "tensor", "expert"}
        own = [*typed, *(name.replace("_", "-") for name in sorted(others) if getattr(arguments, name) is not None)]
        if own:
            raise UserError(f"--{own[0]}: describes a model of its own; override the recipe's key instead")
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        return {recipe.run.name: recipe}

    def counting(name: str, **how: Any) -> Recipe:
        model = described(typed, **how)
        names = ("sequence_length", "tensor", "expert")
        given = {key: getattr(arguments, key) for key in names if getattr(arguments, key) is not None}
        return counting_recipe(name, model, **given)

    if arguments.kind is not None:
        if arguments.attention is not None:
            raise UserError("--attention: goes with --shape, and --kind names the attention; drop one of the two")
        return {arguments.kind: counting(arguments.kind, kind=arguments.kind)}
    shape = arguments.shape
    names = arguments.attention or ["vha"]
    return {title(shape, name): counting(shape, shape=shape, attention=name) for name in names}


def topic(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """What one model costs."""
    length = recipe.data.sequence_length
    if arguments.topic == "decode":
        context = length if arguments.context is None else arguments.context
        batch = 1 if arguments.batch is None else arguments.batch
        return decode.values(decode.decode(recipe.model, batch, context, gpu_named(arguments.gpu or "h800")))
    rule = FlopRule(
        sequence_length=length,
        lm_head=arguments.lm_head is not False,
        causal=bool(arguments.causal),
        folded=bool(arguments.folded),
    )
    if arguments.topic == "flops":
        return topics.flops(recipe, rule)
    if arguments.topic == "fold":
        return topics.fold(recipe, rule)
    return topics.cache(recipe) if arguments.topic == "cache" else topics.params(recipe)


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=TEXT, formatter_class=raw)
    parser.add_argument("topic", choices=("cache", "params", "flops", "decode", "fold", "table5", "claims"))
    parser.add_argument("recipe", type=Path, nargs="?", help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    model = parser.add_argument_group("a model without a recipe")
    model.add_argument("--shape", choices=tuple(SHAPES), help="a named shape")
    names = "gqa, vha, mla, mfa, gva, dcmha; gqa-2 for 2 KV heads, 16-2 for query-KV heads (default: vha)"
    model.add_argument("--attention", nargs="+", metavar="NAME", help=names)
    model.add_argument("--kind", choices=KINDS, help="or an attention kind, with the sizes below")
    for flag, key in FLAGS.items():
        model.add_argument(f"--{flag}", metavar="VALUE", help=f"model.{key}")
    length = partial(tokens_of, "sequence-length")
    model.add_argument("--sequence-length", type=length, metavar="S", help="tokens, or 32K (default: 4096)")
    model.add_argument("--tensor", type=int, metavar="N", help="ranks that tensor parallelism splits over")
    model.add_argument("--expert", type=int, metavar="N", help="ranks that hold different experts")
    rule = parser.add_argument_group("rules of counting FLOPs")
    switch = argparse.BooleanOptionalAction
    rule.add_argument("--lm-head", action=switch, default=None, help="count the head (default: yes; table5: no)")
    rule.add_argument("--causal", action=switch, default=None, help="count only the scores that the mask keeps")
    folded_help = "prefill with the folded model (default: unfolded)"
    rule.add_argument("--folded", action="store_true", default=None, help=folded_help)
    rule.add_argument(
        "--unfolded", action="store_false", default=None, dest="folded", help="prefill with the trained model"
    )
    step = parser.add_argument_group("decode")
    step.add_argument("--batch", type=int, metavar="B", help="sequences of a step (default: 1)")
    context_help = "of each sequence, or 32K (default: the sequence length)"
    step.add_argument("--context", type=partial(tokens_of, "context"), metavar="TOKENS", help=context_help)
    step.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} (default: h800)")
    only_help = "only claims whose verdict begins with that word"
    parser.add_argument("--only", choices=("agrees", "differs", "quoted", "cannot"), help=only_help)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse()
    check_used(arguments)
    if arguments.topic == "claims":
        only = arguments.only
        print(json.dumps(claims.values(only), indent=2) if arguments.json else claims.render(only))
        return
    if arguments.topic == "table5":
        rule = FlopRule(sequence_length=4096, lm_head=bool(arguments.lm_head), causal=bool(arguments.causal))
        width = TABLE5_INTERMEDIATE if arguments.intermediate_size is None else value_of(arguments.intermediate_size)
        rows = table5.rows(rule, width)
        print(json.dumps([asdict(row) for row in rows], indent=2) if arguments.json else table5.render(rows, width))
        return
    found = {name: topic(arguments, recipe) for name, recipe in recipes(arguments).items()}
    if arguments.json:
        print(json.dumps(found if len(found) > 1 else next(iter(found.values())), indent=2))
        return
    print("\n".join(compare.table(arguments.topic, found)))
    if arguments.shape == "30B-A3B" and title(arguments.shape, "gqa") in found:
        print(OTHER_BASELINE)


if __name__ == "__main__":
    run_tool(main)
