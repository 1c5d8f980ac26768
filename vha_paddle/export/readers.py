"""What programs that load a stock directory make of it, where that is not what the model is."""

from __future__ import annotations

from vha_paddle.config import GroupedAttention, LatentAttention
from vha_paddle.export import fp8
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.stock import OURS, Target

NO_TOKENIZER = "the checkpoint has no tokenizer, nor has the export; --tokenizer PATH gives it one"
_OURS = (
    "the directory is of our own class: tools/evaluate.py, tools/generate.py, tools/analyze_maps.py and "
    "tools/fold_export.py read it; transformers, vLLM and llama.cpp refuse it"
)
_WINDOWS = (
    "its sliding layers need a reader that obeys layer_types: transformers does, and vLLM with "
    "model_impl=\"transformers\"; vLLM's own Qwen3 refuses the directory, and llama.cpp's converter passes over the "
    "windows without a word: what it makes of this directory is another model"
)
_UNNORMALISED = (
    "llama.cpp divides the chosen experts' probabilities by their sum, which this model does not (norm_topk_prob): "
    "what it makes of this directory is another model"
)
_BIASES = (
    "vLLM's own Qwen3 and Qwen3-MoE leave the bias of o_proj out without a word, and compute another model where it is "
    'not zero; with model_impl="transformers" vLLM is right; llama.cpp converts the directory and cannot load the '
    "result"
)
_TWO_EMBEDDINGS = (
    "the embedding is stored a second time as output projection (tie_word_embeddings is false): vLLM's DeepSeek "
    "classes tie nothing"
)
_CPU_ROPE = (
    "vLLM on a CPU turns DeepSeek's rotary channels wrongly with its own kernel (0.32); "
    'compilation_config={"custom_ops": ["none"]} computes what the model is'
)
_FP8 = (
    "FP8 weights need a GPU that multiplies them (compute capability 8.9 and up); transformers 5 makes bfloat16 of "
    "them elsewhere, transformers 4 refuses"
)
_SMALL_BLOCKS = "some FP8 matrices have fewer rows than a block, and vLLM refuses them where it joins them with others"


def reader_notes(target: Target, dtype: ExportDtype) -> list[str]:
    """A line for each program, or several, that does not take the directory as it is."""
    if target.stock == OURS:
        return [_OURS]
    model, (attention,) = target.model, target.model.attentions
    notes = []
    if model.sliding_window is not None:
        notes.append(_WINDOWS)
    if isinstance(attention, GroupedAttention):
        if attention.attention_bias and attention.qk_norm:
            notes.append(_BIASES)
        if model.experts is not None and not model.experts.norm_topk_prob:
            notes.append(_UNNORMALISED)
    if isinstance(attention, LatentAttention):
        notes += [_CPU_ROPE, *([_TWO_EMBEDDINGS] if target.naming.head_is_written else [])]
    if dtype == "fp8":
        notes.append(_FP8)
        quantised = fp8.quantised_tensors(target.tensors)
        if any(target.tensors[name][0] % fp8.BLOCK for name in quantised):
            notes.append(_SMALL_BLOCKS)
    return notes
