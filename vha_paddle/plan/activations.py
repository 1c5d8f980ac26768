"""What a microbatch leaves behind for its backward pass: bytes of one layer and of the model's end, by term.

An estimate of a GPU: attention runs in a flash attention kernel, which keeps one float32 per query and no scores;
everything else keeps what the operations of `ops`, `attention` and `model` keep on a GPU. Terms are named as in
docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from vha_paddle.config import Recipe, VirtualHeadAttention
from vha_paddle.counts import BYTES, heads_per_rank

STATISTIC = 4
"""Bytes of the float32 that a norm keeps per row, and flash attention per query."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a microbatch on one rank."""

    tokens: int
    """Tokens T inside the tensor region: B * S / c."""
    outer_tokens: int
    """Tokens outside it: T, or T / t where the sequence is cut."""
    width: int
    """Bytes of a value."""

    @classmethod
    def of(cls, recipe: Recipe) -> Sizes:
        parallel = recipe.parallel
        tokens = recipe.data.micro_batch_size * recipe.data.sequence_length // parallel.context
        outer = tokens // parallel.tensor if parallel.sequence else tokens
        return cls(tokens, outer, BYTES[recipe.precision.compute])


def layer_terms(recipe: Recipe) -> dict[str, int]:
    """Bytes that one layer keeps for one microbatch when nothing is recomputed."""
    model, parallel, sizes = recipe.model, recipe.parallel, Sizes.of(recipe)
    attention, width, tokens = model.attention, sizes.width, sizes.tokens
    heads = heads_per_rank(attention, parallel.tensor)
    vector = tokens * attention.head_dim * width  # of one head
    outer = sizes.outer_tokens * model.hidden_size * width
    normed_heads = heads.query + heads.key_value
    terms = {
        "inputs of the two norms": 2 * (outer + sizes.outer_tokens * STATISTIC),
        "inputs of q, k, v and of gate, up": 2 * tokens * model.hidden_size * width,
        "heads into QK-norm": normed_heads * (vector + tokens * STATISTIC),
        "heads inside RoPE": 2 * normed_heads * vector,
        "queries into attention": heads.query * vector,
        "keys and values into attention": 2 * heads.key_value * vector * parallel.context,
        "output of attention": heads.query * (vector + tokens * STATISTIC),
        "gate, up and their product": 3 * tokens * (model.intermediate_size // parallel.tensor) * width,
    }
    if parallel.context > 1:
        terms["output of attention, its pieces joined"] = heads.query * vector
    if isinstance(attention, VirtualHeadAttention):
        terms["heads into Premix"] = heads.projected * vector
        if attention.postmix_space == "activation":
            terms["Postmix: z and its output"] = (attention.postmix_rank + heads.query) * vector
        else:
            rows = (attention.postmix_rank + heads.query) * attention.head_dim
            terms["Postmix: C and the mixed W_O"] = rows * model.hidden_size * width
    return terms


def layer_kept(recipe: Recipe) -> int:
    """Bytes that one layer keeps for one microbatch from its forward to its backward pass."""
    terms, mode = layer_terms(recipe), recipe.memory.recompute
    if mode == "none":
        return sum(terms.values())
    sizes = Sizes.of(recipe)
    if mode == "full":
        return sizes.outer_tokens * recipe.model.hidden_size * sizes.width
    return sum(terms.values()) - sum(terms[name] for name in _inside_attention(terms)) + _around_attention(recipe)


def layer_recomputed(recipe: Recipe) -> int:
    """Bytes that come back for the one layer whose backward pass runs: beside what it kept."""
    terms, mode = layer_terms(recipe), recipe.memory.recompute
    if mode == "none":
        return 0
    if mode == "full":
        return sum(terms.values())
    return sum(terms[name] for name in _inside_attention(terms))


def _inside_attention(terms: dict[str, int]) -> list[str]:
    """What `selective` recomputes: everything between the projections, made from the outputs of q, k and v."""
    outside = ("inputs of", "gate, up", "Postmix: C")
    return [name for name in terms if not name.startswith(outside)]


def _around_attention(recipe: Recipe) -> int:
    """What `selective` keeps in their place: the outputs of q, k and v, and the input of o_proj."""
    heads = heads_per_rank(recipe.model.attention, recipe.parallel.tensor)
    sizes = Sizes.of(recipe)
    vectors = heads.projected + 2 * heads.key_value + heads.query
    return vectors * sizes.tokens * recipe.model.attention.head_dim * sizes.width


def end_kept(recipe: Recipe) -> int:
    """Bytes that the final norm, the head and the loss keep for one microbatch."""
    sizes, hidden = Sizes.of(recipe), recipe.model.hidden_size
    norm = sizes.outer_tokens * (hidden * sizes.width + STATISTIC)
    return norm + sizes.tokens * hidden * sizes.width + 4 * _logits(recipe)  # the loss keeps a float32 softmax


def end_working(recipe: Recipe) -> int:
    """Bytes beside `end_kept` while the loss is computed: the logits, and their float32 copy where they are not."""
    width = BYTES[recipe.precision.compute]
    return _logits(recipe) * (width if width == 4 else width + 4)


def _logits(recipe: Recipe) -> int:
    return Sizes.of(recipe).tokens * (recipe.model.vocab_size // recipe.parallel.tensor)


def boundary(recipe: Recipe) -> int:
    """Bytes of the residual stream of one microbatch: what a pipeline stage hands to the next."""
    sizes = Sizes.of(recipe)
    return sizes.outer_tokens * recipe.model.hidden_size * sizes.width
