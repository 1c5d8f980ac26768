"""The model card: what the exported model is, where it came from, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vha_paddle import counts
from vha_paddle.config import (
    Attention,
    GroupedAttention,
    LatentAttention,
    Model,
    Recipe,
    VirtualHeadAttention,
    recipe_to_yaml,
)
from vha_paddle.counts import folded, kv_cache_bytes
from vha_paddle.counts.folding import what_stays
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES, SENTENCEPIECE_FILE
from vha_paddle.export.readers import NO_TOKENIZER, reader_notes
from vha_paddle.export.stock import Target
from vha_paddle.export.verify import BOUNDS, BUILT_IN
from vha_paddle.sources.digests import digest_of_list

_COMPARED_KV_HEADS = 8  # the usual grouped-query model

_LLAMA_CPP = "llama.cpp converts it with `convert_hf_to_gguf.py`"
_NO_SPACE = """; run the result with
`--override-kv tokenizer.ggml.add_space_prefix=bool:false`, for that converter does not copy the setting and
llama.cpp would put a space before the prompt"""
_SENTENCEPIECE = """\
No begin token is added; the end token separates documents, as in training. Text that spells a special token
is encoded as text (`split_special_tokens`); append `tokenizer.eos_token_id` by its id where it is wanted."""
_HUGGING_FACE = """\
The tokenizer is the one that the training data were made with. There the end token separates documents, no begin
token is added, and text that spells a special token is text; here it is that token."""
_NO_TOKENIZER = """\
This directory has no tokenizer: give one to `AutoTokenizer`, or export again with `--tokenizer PATH`. vLLM takes one
with `--tokenizer`, llama.cpp's converter wants one here."""

_NO_TOKENIZER_OURS = "This directory has no tokenizer: export again with `--tokenizer PATH` to write text with it."

_LOAD = """## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", torch_dtype="auto")  # dtype="auto" says the same from 4.56 on
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```
"""
_LOAD_MODEL = """## How to load it

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".", torch_dtype="auto")  # dtype="auto" says the same from 4.56 on
```
"""
_LOAD_OURS = """## How to load it

```
python tools/evaluate.py . --data DATA
{generate}python tools/analyze_maps.py .
python tools/fold_export.py . OUT
```
"""
_GENERATE = 'python tools/generate.py . --prompt "Once upon a time"\n'
_FP8 = """## FP8

The matrices of the layers' projections are E4M3, with a float32 scale for each block of 128 x 128 (`NAME_scale_inv`),
rounded to nearest from the fold's own values; a weight is at most 1/16 off, or 2^-10 of its block's scale. Embedding,
output projection, norms, biases and routers are bfloat16. Activations are quantized where the model runs.
transformers needs the package `accelerate` to load it.
"""


def cache_bytes(model: Model) -> dict[str, int]:
    """KV cache in bytes per token per layer, bfloat16: of this model and of others with its query heads.

    Args:
        model: as it was trained, or as it is served: a fold changes nothing here. Of a hybrid its full layers.
    """
    attention = folded(model).attention
    found = {"this_model": kv_cache_bytes(attention, "bfloat16")}
    if not isinstance(attention, GroupedAttention):
        return found
    heads = attention.num_attention_heads
    compared = {f"gqa_{_COMPARED_KV_HEADS}": _COMPARED_KV_HEADS, "mha": heads}
    return found | {
        name: kv_cache_bytes(attention.model_copy(update={"num_key_value_heads": kv_heads}), "bfloat16")
        for name, kv_heads in compared.items()
        if kv_heads <= heads
    }


def model_card(report: Mapping[str, Any], target: Target, trained: Model, recipe: Recipe | None) -> str:
    """README.md from the report of an export.

    Args:
        target: what was written.
        trained: the model of the checkpoint.
        recipe: of checkpoints that a run of this package wrote.
    """
    library = "transformers" if target.is_stock else "vha-paddle"
    title = _title(report)
    shown = recipe if "imported_from" not in report["source"] else None  # that of an import is one to be edited
    sections = [
        f"# {title}\n\n{_summary(report, target)}",
        _how_to_load(report, target),
        _provenance(report, target),
        _fold(report, target, trained),
        *([_FP8] if report["dtype"] == "fp8" else []),
        _verification(report, recipe),
        _cache(report, target.model),
        *([f"## Recipe\n\n```yaml\n{recipe_to_yaml(shown).strip()}\n```\n"] if shown is not None else []),
    ]
    front = f"""---
library_name: {library}
pipeline_tag: text-generation
tags:
- vha-paddle
- {target.stock.model_type}
---
"""
    return "\n".join([front, *sections])


def _title(report: Mapping[str, Any]) -> str:
    """The run's name, or that of the directory."""
    source = report["source"]
    return str(next((source[key] for key in ("run", "directory") if key in source), report["kind"]))


def _summary(report: Mapping[str, Any], target: Target) -> str:
    model = target.model
    dtype = "FP8 (E4M3 in blocks) and bfloat16" if report["dtype"] == "fp8" else report["dtype"]
    text = (
        f"A decoder with {_kind(report, target)}: {_sizes(model.attention)},\n{model.num_hidden_layers} layers, "
        f"{report['parameters']:,} parameters in\n{dtype}.{_layers(model)} "
    )
    if target.is_stock:
        return f"{text}It is a stock `{target.stock.architecture}`: it needs no code of its own.\n"
    return f"{text}It is NO stock model: `{target.stock.architecture}` is a class of vha_paddle's own.\n"


def _kind(report: Mapping[str, Any], target: Target) -> str:
    attention = target.model.attention
    if isinstance(attention, GroupedAttention):
        return "folded virtual head attention" if report["folded"] else "grouped-query attention"
    if isinstance(attention, LatentAttention):
        return "multi-head latent attention"
    if isinstance(attention, VirtualHeadAttention):
        return "virtual head attention, folded in part" if report["folded"] else "virtual head attention, not folded"
    return f"attention of kind {attention.kind}"


def _sizes(attention: Attention) -> str:
    if isinstance(attention, GroupedAttention | VirtualHeadAttention):
        heads = f"{attention.num_attention_heads} query heads on {attention.num_key_value_heads} key/value heads"
        return f"{heads}\nof width {attention.head_dim}"
    if isinstance(attention, LatentAttention):
        return f"{attention.num_attention_heads} heads on a latent of {attention.kv_lora_rank}"
    return f"{attention.num_attention_heads} heads"


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


def _how_to_load(report: Mapping[str, Any], target: Target) -> str:
    has_tokenizer = any(name in report["files"] for name in IDENTIFYING_FILES)
    if target.is_stock:
        code = _LOAD if has_tokenizer else _LOAD_MODEL
    else:
        code = _LOAD_OURS.format(generate=_GENERATE if has_tokenizer else "")
    parts = [code]
    if has_tokenizer or reader_notes(target, report["dtype"]):
        parts.append(f"{_other_readers(report, target)}\n")
    if not has_tokenizer:
        parts.append(f"{_NO_TOKENIZER if target.is_stock else _NO_TOKENIZER_OURS}\n")
    elif target.is_stock:
        parts.append(f"{_SENTENCEPIECE if SENTENCEPIECE_FILE in report['files'] else _HUGGING_FACE}\n")
    return "\n".join(parts)


def _other_readers(report: Mapping[str, Any], target: Target) -> str:
    notes = [f"- {note[0].upper()}{note[1:]}." for note in reader_notes(target, report["dtype"])]
    if notes:
        return "\n".join(["What other programs make of it:", "", *notes])
    space = _NO_SPACE if SENTENCEPIECE_FILE in report["files"] else ""
    return f"vLLM takes the directory as it is. {_LLAMA_CPP}{space}."


def _provenance(report: Mapping[str, Any], target: Target) -> str:
    """Where the model came from: nothing of it is a path of the machine that it was exported on."""
    source = {key: value for key, value in report["source"].items() if value is not None}
    rows = {"checkpoint": report["kind"]}
    imported, started_from = source.pop("imported_from", None), source.pop("started_from", None)
    if imported is not None:
        source = {key: value for key, value in source.items() if key not in _OF_TRAINING}
        rows["imported from"] = (
            f"{imported['directory']} ({imported['architecture']}), the list of its files' digests has sha256 "
            f"`{imported['files_sha256']}`"
        )
    if {"run", "checkpoint", "seed"} <= source.keys():
        run, checkpoint, seed = (source.pop(key) for key in ("run", "checkpoint", "seed"))
        rows["run"] = f"{run}, checkpoint `{checkpoint}`, seed {seed}"
    if started_from is not None:
        rows["started from"] = started_from
    if {"step", "tokens"} <= source.keys():
        rows["trained for"] = f"{source.pop('step'):,} optimizer steps, {source.pop('tokens'):,} tokens"
    exported = f"exported with vha_paddle {report['vha_paddle']}"
    version = source.pop("vha_paddle", None)
    if "masters" in source:
        rows["weights"] = "from float32 masters" if source.pop("masters") else "as stored: there are no float32 masters"
    for key, value in source.items():
        if key in _ONLY_REPORTED:
            continue
        rows[_LABELS.get(key, key.replace("_", " "))] = _shown(key, value)
    if report["source_files"]:
        digest = digest_of_list(report["source_files"])
        rows["files read"] = f"{len(report['source_files'])}, the list of their digests has sha256 `{digest}`"
    made = "trained" if imported is None else "imported"
    rows["software"] = exported if version is None else f"{made} with vha_paddle {version}, {exported}"
    table = "\n".join(f"| {label} | {value} |" for label, value in rows.items())
    return f"## Where it came from\n\n| | |\n|---|---|\n{table}\n{_assumed(report, target)}"


def _assumed(report: Mapping[str, Any], target: Target) -> str:
    """The warnings that are not said elsewhere in the card."""
    told_above = (*reader_notes(target, report["dtype"]), NO_TOKENIZER)
    lines = [f"- {line}." for line in report["warnings"] if line not in told_above]
    return "\n".join(["", "What the export found there and had to assume:", "", *lines, ""]) if lines else ""


_OF_TRAINING = ("run", "checkpoint", "seed", "step", "tokens", "samples", "sequence_length")
"""Of an import these are of the recipe that it is given to be edited."""
_ONLY_REPORTED = ("bytes", "config", "directory")  # the title has the directory's name
_LABELS = {
    "model_type": "its model_type",
    "norm_order": "order of norm and Premix, as stated",
    "gate_order": "order of gate and Postmix, as stated",
    "manifest_sha256": "checkpoint's manifest",
    "config_sha256": "its config.json",
    "report_sha256": "its fold_report.json",
    "parameters": "parameters of the checkpoint",
    "fold": "folded before",
}


def _shown(key: str, value: Any) -> str:
    if key.endswith("sha256"):
        return f"sha256 `{value}`"
    return f"{value:,}" if type(value) is int and key != "seed" else str(value)


def _fold(report: Mapping[str, Any], target: Target, trained: Model) -> str:
    """What was folded, and what was not and why."""
    left = _left(target, trained)
    if not report["folded"]:
        reason = "the model was trained as it is here" if not left else "on request; the maps stand in the files"
        return f"## Fold\n\nNone: {reason}.\n{left}"
    by_maps: dict[tuple[str, ...], int] = {}
    for name, sources in report["folded"].items():
        if name.endswith(".weight"):
            maps = tuple(each.rpartition(".")[2] for each in sources[1:])
            by_maps[maps] = by_maps.get(maps, 0) + 1
    premix, postmix = by_maps.get(("premix",), 0), by_maps.get(("postmix_a", "postmix_b"), 0)
    which = "Its two linear maps are folded" if not left else "What folds of its two maps is folded"
    rounding = "rounded once" if report["dtype"] == "fp8" else f"rounded once to {report['dtype']}"
    return f"""## Fold

The model was trained with virtual head attention (arXiv 2610.17959). {which} into the
projections beside them, in float64, {rounding}; the function is the same.

| map | folded into | layers |
|---|---|---|
| Premix | `q_proj` | {premix} |
| Postmix | `o_proj` | {postmix} |
{left}"""


def _left(target: Target, trained: Model) -> str:
    """The maps that are still there."""
    lines = []
    for where, attention in target.model.attention_sections.items():
        if not isinstance(attention, VirtualHeadAttention):
            continue
        before = trained.attention_sections[where]
        assert isinstance(before, VirtualHeadAttention), "a fold makes no maps"
        stays = what_stays(before)
        for name, value in (("premix", attention.premix), ("postmix", attention.postmix)):
            if value != "none":
                reason = f"does not fold: {stays[name]}" if name in stays else "was not to be folded"
                lines.append(f"- {where}: {name.capitalize()} {reason}.")
    return "\n".join(["", "Left as trained:", "", *lines, ""]) if lines else ""


def _verification(report: Mapping[str, Any], recipe: Recipe | None) -> str:
    figures = report["verification"]
    if figures is None:
        return "## Verification\n\nNot run; `--verify` compares the logits with the checkpoint's.\n"
    rows = [
        ("largest difference", f"{figures['max_abs_difference']:.3e}"),
        ("mean difference", f"{figures['mean_abs_difference']:.3e}"),
        ("largest logit of the checkpoint", f"{figures['scale']:.3e}"),
        ("largest difference / largest logit", f"{figures['relative']:.3e}, allowed {figures['bound']:.1e}"),
        ("KL divergence, mean and largest", f"{figures['kl_mean']:.3e} and {figures['kl_max']:.3e} nats"),
        ("positions with the same first choice", f"{figures['top1_agreement']:.2%}"),
        *_parts(figures),
    ]
    if figures["checkpoint_loss"] is not None:
        losses = f"{figures['checkpoint_loss']:.6f} and {figures['export_loss']:.6f} nats per token"
        rows.append(("loss on the text, of checkpoint and export", losses))
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return f"""## Verification

Logits of these files, computed in float32, against the checkpoint's at {figures["num_tokens"]:,}
positions ({_positions(figures)}):

| | |
|---|---|
{table}
{_experts_agree(figures)}{_ASSUMED_ANYHOW if recipe is None else ""}"""


_ASSUMED_ANYHOW = """
This shows that the fold changes nothing. It does not show that the configuration, and an order of norm and Premix that
was stated, are those of the training: checkpoint and export were run with the same.
"""


def _positions(figures: Mapping[str, Any]) -> str:
    num_text = figures["num_text_tokens"]
    num_random = figures["num_tokens"] - num_text
    text = "built-in text" if figures["text"] == BUILT_IN else f"text, {figures['text']}"
    parts = [f"{num_text:,} of {text}"] if num_text else []
    return ", ".join([*parts, *([f"{num_random:,} random ids"] if num_random else [])])


def _parts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Fold error and storage error apart, the cost of the dtype alone, and the attention of the layers."""
    rows = []
    if figures["fold_relative"] is not None:
        allowed = f"allowed {BOUNDS['float32']:.1e}"
        rows.append(("of it by the fold, before rounding", f"{figures['fold_relative']:.3e}, {allowed}"))
        rows.append(("of it by storage", f"{figures['storage']['relative']:.3e}"))
    if figures["cast"] is not None:
        rows.append(("the checkpoint's weights in the same dtype, unfolded", f"{figures['cast']['relative']:.3e}"))
    rows.append(("attention of a layer, largest difference", f"{max(figures['attention']['export']):.3e}"))
    if figures["attention"]["fold"] is not None:
        rows.append(("the same of the fold, in float64", f"{max(figures['attention']['fold']):.3e}"))
    if figures["expert_agreement"] is not None:
        rows.append(("choices of experts that are the same", f"{figures['expert_agreement']:.2%}"))
    return rows


def _experts_agree(figures: Mapping[str, Any]) -> str:
    if figures["expert_agreement"] is None:
        return ""
    return """
The logits are compared with the experts that the checkpoint chose, for a near tie between two experts falls either
way by round-off.
"""


def _cache(report: Mapping[str, Any], model: Model) -> str:
    sizes = report["kv_cache_bytes_per_token_per_layer"]
    names = {"this_model": "this model" + (", before and after the fold" if report["folded"] else "")}
    names |= {f"gqa_{_COMPARED_KV_HEADS}": f"GQA with {_COMPARED_KV_HEADS} key/value heads"}
    names |= {"mha": "MHA (as many key/value heads as query heads)"}
    rows = "\n".join(f"| {names[name]} | {size:,} |" for name, size in sizes.items())
    length = model.max_position_embeddings
    whole = counts.cache_bytes(model, length, "bfloat16")
    return f"""## KV cache

| | bytes per token per layer, bfloat16 |
|---|---|
{rows}

{_arithmetic(model.attention)}
A sequence of {length:,} tokens, the longest, takes {whole:,} bytes in all {model.num_hidden_layers} layers.
{_of_windows(model)}{_trained_length(report["source"], length)}"""


def _trained_length(source: Mapping[str, Any], longest: int) -> str:
    """A warning where the model has positions that training never reached."""
    trained = source.get("sequence_length")
    if trained is None or trained >= longest or "imported_from" in source:
        return ""
    return f"\nTrained on sequences of {trained:,} tokens: positions beyond were never seen.\n"


def _arithmetic(attention: Attention) -> str:
    size = kv_cache_bytes(attention, "bfloat16")
    if isinstance(attention, GroupedAttention | VirtualHeadAttention):
        heads, width = attention.num_key_value_heads, attention.head_dim
        return f"Keys and values: 2 x {heads} heads x {width} channels x 2 bytes = {size:,}."
    if isinstance(attention, LatentAttention):
        return (
            f"The latent and the rotary key: ({attention.kv_lora_rank} + {attention.qk_rope_head_dim}) channels x 2 "
            f"bytes = {size:,}, in a reader that caches them so."
        )
    return f"What a layer keeps of a token: {size:,} bytes."


def _of_windows(model: Model) -> str:
    if model.sliding_window is None:
        return ""
    return f"A sliding layer needs no more than its last {model.sliding_window.window:,} tokens.\n"
