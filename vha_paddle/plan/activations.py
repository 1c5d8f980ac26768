"""What a microbatch leaves behind for its backward pass: bytes of one layer and of the model's end.

An estimate of a GPU; the terms of a layer are in `terms.py`.
"""

from __future__ import annotations

from vha_paddle.config import Attention, Recipe
from vha_paddle.counts import BYTES
from vha_paddle.plan.terms import STATISTIC, Sizes, attention_terms, mlp_terms, stream_terms


def layer_terms(recipe: Recipe, attention: Attention | None = None) -> dict[str, int]:
    """Bytes that one layer keeps for one microbatch when nothing is recomputed, by term.

    Layers may differ in their attention; left out, it is that of the layers that see the whole sequence.
    """
    model, sizes = recipe.model, Sizes.of(recipe)
    terms = attention_terms(attention or model.attention, model, sizes)
    return stream_terms(model, sizes) | terms.core | terms.outside | mlp_terms(model, sizes)


def layer_kept(recipe: Recipe, attention: Attention | None = None) -> int:
    """Bytes that one layer keeps for one microbatch from its forward to its backward pass."""
    mode, sizes = recipe.memory.recompute, Sizes.of(recipe)
    if mode == "full":
        return sizes.outer_tokens * recipe.model.hidden_size * sizes.width
    whole = sum(layer_terms(recipe, attention).values())
    if mode == "none":
        return whole
    terms = attention_terms(attention or recipe.model.attention, recipe.model, sizes)
    return whole - sum(terms.core.values()) + terms.ends


def layer_recomputed(recipe: Recipe, attention: Attention | None = None) -> int:
    """Bytes that come back for the one layer whose backward pass runs: beside what it kept."""
    mode = recipe.memory.recompute
    if mode == "none":
        return 0
    if mode == "full":
        return sum(layer_terms(recipe, attention).values())
    return sum(attention_terms(attention or recipe.model.attention, recipe.model, Sizes.of(recipe)).core.values())


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
