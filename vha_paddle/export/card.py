"""The model card: what the exported model is, where it came from, and how to load it."""

from __future__ import annotations

from typing import Any

from vha_paddle.config import Attention, GroupedAttention, Recipe, recipe_to_yaml
from vha_paddle.counts import kv_cache_bytes

_COMPARED_KV_HEADS = 8  # the usual grouped-query model

_LOAD = """## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")  # torch_dtype="auto" before transformers 4.56
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

vLLM takes the directory as it is. llama.cpp converts it with `convert_hf_to_gguf.py`; run the result with
`--override-kv tokenizer.ggml.add_space_prefix=bool:false`, for that converter does not copy the setting and
llama.cpp would put a space before the prompt.

No begin token is added; the end token separates documents, as in training. Text that spells a special token
is encoded as text (`split_special_tokens`); append `tokenizer.eos_token_id` by its id where it is wanted.
"""


def cache_bytes(attention: Attention) -> dict[str, int]:
    """KV cache in bytes per token per layer, bfloat16: of this model and of others with its query heads."""
    heads = attention.num_attention_heads
    compared = {f"gqa_{_COMPARED_KV_HEADS}": _COMPARED_KV_HEADS, "mha": heads}
    return {"this_model": kv_cache_bytes(attention, "bfloat16")} | {
        name: kv_cache_bytes(_grouped(attention, kv_heads), "bfloat16")
        for name, kv_heads in compared.items()
        if kv_heads <= heads
    }


def model_card(report: dict[str, Any], recipe: Recipe) -> str:
    """README.md from the report of an export."""
    attention, source = recipe.model.attention, report["source"]
    kind = "folded virtual head attention" if report["folded"] else "grouped-query attention"
    sizes = f"{attention.num_attention_heads} query heads on {attention.num_key_value_heads} key/value heads"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- vha-paddle
- qwen3
---

# {source["run"]}

A decoder of the Qwen3 architecture with {kind}: {sizes}
of width {attention.head_dim}, {recipe.model.num_hidden_layers} layers, {report["parameters"]:,} parameters in
{report["dtype"]}. It is a stock `Qwen3ForCausalLM`: it needs no code of its own.

{_LOAD}
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
{_cache(report)}
## Recipe

```yaml
{recipe_to_yaml(recipe).strip()}
```
"""


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
"""


def _cache(report: dict[str, Any]) -> str:
    sizes = report["kv_cache_bytes_per_token_per_layer"]
    names = {"this_model": "this model" + (", before and after the fold" if report["folded"] else "")}
    names |= {f"gqa_{_COMPARED_KV_HEADS}": f"GQA with {_COMPARED_KV_HEADS} key/value heads"}
    names |= {"mha": "MHA (as many key/value heads as query heads)"}
    rows = "\n".join(f"| {names[name]} | {size:,} |" for name, size in sizes.items())
    return f"## KV cache\n\n| | bytes per token per layer, bfloat16 |\n|---|---|\n{rows}\n"


def _grouped(attention: Attention, num_kv_heads: int) -> GroupedAttention:
    return GroupedAttention(
        kind="grouped",
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=attention.head_dim,
    )
