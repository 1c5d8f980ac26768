"""The model card: what the exported model is, where it came from, and how to load it."""

from __future__ import annotations

from typing import Any

from vha_paddle.config import GroupedAttention, Model, Recipe, recipe_to_yaml
from vha_paddle.counts import kv_cache_bytes
from vha_paddle.export.stock import served_attention, stock_class
from vha_paddle.export.verify import BOUNDS

_COMPARED_KV_HEADS = 8  # the usual grouped-query model

_LLAMA_CPP = """llama.cpp converts it with `convert_hf_to_gguf.py`; run the result with
`--override-kv tokenizer.ggml.add_space_prefix=bool:false`, for that converter does not copy the setting and
llama.cpp would put a space before the prompt."""
_WINDOWS = """Its sliding layers need a reader that obeys `layer_types`. vLLM takes the directory with
`model_impl="transformers"`; its own Qwen3 refuses it. llama.cpp's converter passes over the windows without a
word: what it makes of this directory is another model."""
_UNNORMALISED = """llama.cpp divides the chosen experts' probabilities by their sum, which this model does not
(`norm_topk_prob`): what it makes of this directory is another model."""

_LOAD = """## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")  # torch_dtype="auto" before transformers 4.56
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

{other_readers}

No begin token is added; the end token separates documents, as in training. Text that spells a special token
is encoded as text (`split_special_tokens`); append `tokenizer.eos_token_id` by its id where it is wanted.
"""


def cache_bytes(model: Model) -> dict[str, int]:
    """KV cache in bytes per token per layer, bfloat16: of this model and of others with its query heads."""
    attention = served_attention(model)
    heads = attention.num_attention_heads
    compared = {f"gqa_{_COMPARED_KV_HEADS}": _COMPARED_KV_HEADS, "mha": heads}
    return {"this_model": kv_cache_bytes(attention, "bfloat16")} | {
        name: kv_cache_bytes(_with_kv_heads(attention, kv_heads), "bfloat16")
        for name, kv_heads in compared.items()
        if kv_heads <= heads
    }


def model_card(report: dict[str, Any], recipe: Recipe) -> str:
    """README.md from the report of an export."""
    model, source = recipe.model, report["source"]
    stock, attention = stock_class(model, source["run"]), served_attention(model)
    kind = "folded virtual head attention" if report["folded"] else "grouped-query attention"
    sizes = f"{attention.num_attention_heads} query heads on {attention.num_key_value_heads} key/value heads"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- vha-paddle
- {stock.model_type}
---

# {source["run"]}

A decoder of the Qwen3 architecture with {kind}: {sizes}
of width {attention.head_dim}, {model.num_hidden_layers} layers, {report["parameters"]:,} parameters in
{report["dtype"]}.{_layers(model)} It is a stock `{stock.architecture}`: it needs no code of its own.

{_LOAD.format(other_readers=_other_readers(model))}
## Where it came from

| | |
|---|---|
| run | {source["run"]}, checkpoint `{source["checkpoint"]}`, seed {source["seed"]} |
| trained for | {source["step"]:,} optimizer steps, {source["tokens"]:,} tokens |
| trained parameters | {source["parameters"]:,} |
| checkpoint's manifest | sha256 `{source["manifest_sha256"]}` |
| software | trained with vha_paddle {source["vha_paddle"]}, exported with vha_paddle {report["vha_paddle"]} |

{_fold(report)}
{_verification(report)}
{_cache(report, model)}
## Recipe

```yaml
{recipe_to_yaml(recipe).strip()}
```
"""


def _layers(model: Model) -> str:
    """What is not alike in all layers, or not one MLP."""
    sliding, experts = model.sliding_window, model.experts
    text = ""
    if sliding is not None:
        text += (
            f" Of each {sliding.full_every} layers the last sees all, the others the last {sliding.window:,} tokens."
        )
    if experts is not None:
        text += f" Each layer has {experts.num_experts} experts, of which a token uses {experts.num_experts_per_tok}."
    return text


def _other_readers(model: Model) -> str:
    if model.sliding_window is not None:
        return _WINDOWS
    if model.experts is not None and not model.experts.norm_topk_prob:
        return f"vLLM takes the directory as it is. {_UNNORMALISED}"
    return f"vLLM takes the directory as it is. {_LLAMA_CPP}"


def _fold(report: dict[str, Any]) -> str:
    if not report["folded"]:
        return "## Fold\n\nNone: the model was trained as it is here.\n"
    by_maps: dict[tuple[str, ...], int] = {}
    for sources in report["folded"].values():
        maps = tuple(name.rpartition(".")[2] for name in sources[1:])
        by_maps[maps] = by_maps.get(maps, 0) + 1
    premix, postmix = by_maps.get(("premix",), 0), by_maps.get(("postmix_a", "postmix_b"), 0)
    return f"""## Fold

The model was trained with virtual head attention (arXiv 2610.17959). Its two linear maps are folded into the
projections beside them, in float64, rounded once to {report["dtype"]}; the function is the same.

| map | folded into | layers |
|---|---|---|
| Premix | `q_proj` | {premix} |
| Postmix | `o_proj` | {postmix} |
"""


def _verification(report: dict[str, Any]) -> str:
    figures = report["verification"]
    if figures is None:
        return "## Verification\n\nNot run; `--verify` compares the logits with the checkpoint's.\n"
    return f"""## Verification

Logits of these files, computed in float32, against the checkpoint's at {figures["num_tokens"]:,} positions:

| | |
|---|---|
| largest difference | {figures["max_abs_difference"]:.3e} |
| mean difference | {figures["mean_abs_difference"]:.3e} |
| largest logit of the checkpoint | {figures["scale"]:.3e} |
| largest difference / largest logit | {figures["relative"]:.3e}, allowed {figures["bound"]:.1e} |
| positions with the same first choice | {figures["top1_agreement"]:.2%} |
{_before_rounding(figures)}{_experts_agree(figures)}"""


def _before_rounding(figures: dict[str, Any]) -> str:
    relative = figures["fold_relative"]
    if relative is None:
        return ""
    return f"| the same before rounding to these files' dtype | {relative:.3e}, allowed {BOUNDS['float32']:.1e} |\n"


def _experts_agree(figures: dict[str, Any]) -> str:
    share = figures["expert_agreement"]
    if share is None:
        return ""
    return f"""| choices of experts that are the same | {share:.2%} |

The logits are compared with the experts that the checkpoint chose, for a near tie between two experts falls either
way by round-off.
"""


def _cache(report: dict[str, Any], model: Model) -> str:
    sizes = report["kv_cache_bytes_per_token_per_layer"]
    names = {"this_model": "this model" + (", before and after the fold" if report["folded"] else "")}
    names |= {f"gqa_{_COMPARED_KV_HEADS}": f"GQA with {_COMPARED_KV_HEADS} key/value heads"}
    names |= {"mha": "MHA (as many key/value heads as query heads)"}
    rows = "\n".join(f"| {names[name]} | {size:,} |" for name, size in sizes.items())
    table = f"## KV cache\n\n| | bytes per token per layer, bfloat16 |\n|---|---|\n{rows}\n"
    if model.sliding_window is None:
        return table
    return f"{table}\nA sliding layer needs no more than its last {model.sliding_window.window:,} tokens.\n"


def _with_kv_heads(attention: GroupedAttention, num_kv_heads: int) -> GroupedAttention:
    return attention.model_copy(update={"num_key_value_heads": num_kv_heads})
