"""What a model costs, from its numbers alone: parameters, FLOPs, cache. Memory and communication: `vha_paddle.plan`.

Everything is computed from the table of tensors (`vha_paddle/tensors.py`), layer by layer, so every attention kind,
hybrid model and mixture of experts is counted by the same lines. docs/calculators.md has the conventions.
"""

from vha_paddle.counts.cache import cache_bytes, kv_cache_bytes, kv_cache_values
from vha_paddle.counts.dtypes import BYTES, Dtype
from vha_paddle.counts.flops import (
    TRAINING_OVER_FORWARD,
    FlopRule,
    attention_flops_by_part,
    forward_flops,
    forward_flops_by_part,
    training_flops,
)
from vha_paddle.counts.folding import folded, folded_attention, what_stays
from vha_paddle.counts.heads import HeadsPerRank, heads_per_rank
from vha_paddle.counts.parameters import (
    LayerParameters,
    Parameters,
    active_parameters,
    attention_parameters,
    parameters,
)
from vha_paddle.counts.reading import weights_read
from vha_paddle.counts.summary import render, summary

__all__ = [
    "BYTES",
    "TRAINING_OVER_FORWARD",
    "Dtype",
    "FlopRule",
    "HeadsPerRank",
    "LayerParameters",
    "Parameters",
    "active_parameters",
    "attention_flops_by_part",
    "attention_parameters",
    "cache_bytes",
    "folded",
    "folded_attention",
    "forward_flops",
    "forward_flops_by_part",
    "heads_per_rank",
    "kv_cache_bytes",
    "kv_cache_values",
    "parameters",
    "render",
    "summary",
    "training_flops",
    "weights_read",
    "what_stays",
]
