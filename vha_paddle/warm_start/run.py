"""A warm start from end to end: read, convert, fit, compare, write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.fresh import write_fresh_checkpoint
from vha_paddle.checkpoint.layout import Checkpoint, open_checkpoint, write_json
from vha_paddle.config import Model, Recipe
from vha_paddle.counts import folded
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.loader import ValidationWindows
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.errors import RunError, UserError
from vha_paddle.evaluate import decoder_with, sequence_means
from vha_paddle.files import atomic_directory
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sources.own import WARM_START_REPORT_FILE
from vha_paddle.warm_start.activations import input_moments, output_moments
from vha_paddle.warm_start.convert import (
    Figures,
    Weights,
    convert,
    folded_layers,
    layers_to_convert,
    read_weights,
    with_postmix,
)

FEWEST_COMPARED = 64
"""Sequences that losses are compared on even where `logging.eval_sequences` is less: fewer show little but noise."""


@dataclass(frozen=True)
class Text:
    """Tokens to fit on, and others, after them, to compare losses on."""

    windows: ValidationWindows
    num_fitted: int
    """Sequences from the start that the fits see."""
    num_compared: int
    """Sequences after those."""
    batch_size: int

    @property
    def fitted_tokens(self) -> int:
        return self.num_fitted * self.windows.sequence_length

    @property
    def compared_tokens(self) -> int:
        return self.num_compared * self.windows.sequence_length

    def to_fit(self) -> Iterator[np.ndarray[Any, Any]]:
        """Tokens, `[B, S]`."""
        return (tokens_BS for tokens_BS, _ in self._batches(0, self.num_fitted))

    def to_compare(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Tokens and labels, `[B, S]` each."""
        return self._batches(self.num_fitted, self.num_fitted + self.num_compared)

    def _batches(self, start: int, stop: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        for first in range(start, stop, self.batch_size):
            yield self.windows.samples(first, min(first + self.batch_size, stop))


def open_text(prefix: Path, recipe: Recipe, tokenizer: Path, num_tokens: int) -> Text:
    """The first `num_tokens` of a dataset to fit on, and sequences after them to compare losses on.

    Those are `logging.eval_sequences`, `FEWEST_COMPARED` at least, or all that are left.

    Raises:
        UserError: there is no such dataset, it was made with another tokenizer, or it is too short.
    """
    length = recipe.data.sequence_length
    digest = load_tokenizer(tokenizer).digest
    indexed = IndexedTokens(prefix, vocab_size=recipe.model.vocab_size, tokenizer_sha256=digest)
    windows = ValidationWindows(indexed, length)
    num_fitted = num_tokens // length
    if not 0 < num_fitted < windows.num_samples - 1:  # of one alone there is no standard error
        raise UserError(
            f"--tokens {num_tokens}: must be one sequence of data.sequence_length={length} at least, and leave two of "
            f"the {windows.num_samples} in {prefix} to compare losses on; change it or give more text"
        )
    num_compared = min(max(recipe.logging.eval_sequences, FEWEST_COMPARED), windows.num_samples - num_fitted)
    return Text(windows, num_fitted, num_compared, recipe.data.micro_batch_size)


def warm_start(source: Path, recipe: Recipe, out: Path, data: Path | None, num_tokens: int) -> dict[str, Any]:
    """Make a checkpoint of `recipe`'s model out of one of a grouped model; `out` appears complete or not at all.

    Args:
        source: a checkpoint, or a run whose newest is taken.
        data: prefix of an indexed dataset. With it the maps are fitted to the source's activations, and losses are
            compared; without, W_Q and Premix are fitted to the weights, and Postmix is the identity.
        num_tokens: of `data`, to fit on.

    Returns:
        What was done and measured: `losses` in nats per token, `differences` of them with their standard errors, and
        figures of each converted layer.

    Raises:
        UserError: the source cannot start the recipe's model, the data do not fit, or `out` exists.
        RunError: `out` cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: exists; name a directory to make")
    checkpoint = open_checkpoint(source)
    before, target = checkpoint.recipe.model, recipe.model
    layers = layers_to_convert(before, target)
    text = open_text(data, recipe, checkpoint.tokenizer_path, num_tokens) if data is not None else None
    given, router = read_weights(checkpoint.model_tensors(), before), _read_router(checkpoint)
    made, figures = convert(given, target, layers, recipe.run.seed, None)
    report: dict[str, Any] = {
        "source": str(checkpoint.path),
        "started_from": f"{checkpoint.recipe.run.name}, checkpoint {checkpoint.path.resolve().name}",
        "out": str(out),
    }
    report |= dict.fromkeys(("data", "losses", "differences"))
    if text is not None:
        model = loaded(before, given, router)
        losses = {"source": _losses(model, text), "warm_start": _losses(loaded(target, made, router), text)}
        made, figures = _fitted(model, given, recipe, layers, text)
        losses["fitted_warm_start"] = _losses(loaded(target, made, router), text)
        losses["random_start"] = _losses(build_decoder(target, Mesh(), recipe.run.seed), text)
        report["data"] = {
            "prefix": str(data),
            "fitted_tokens": text.fitted_tokens,
            "compared_tokens": text.compared_tokens,
            "compared_sequences": text.num_compared,
        }
        report["losses"] = {key: float(of_sequences.mean()) for key, of_sequences in losses.items()}
        report["differences"] = {
            f"fitted_warm_start - {other}": difference(losses["fitted_warm_start"], losses[other])
            for other in ("source", "warm_start", "random_start")
        }
    report["layers"] = [{"layer": layer, **figures[layer]} for layer in layers]
    _write(out, checkpoint, recipe, made, router, report)
    return report


def _fitted(model: Decoder, given: Weights, recipe: Recipe, layers: list[int], text: Text) -> tuple[Weights, Figures]:
    """The maps fitted to the source's activations: first W_Q and Premix, then Postmix to what they leave."""
    target, seed = recipe.model, recipe.run.seed
    made, figures = convert(given, target, layers, seed, input_moments(model, layers, text.to_fit()))
    with_maps = [layer for layer in layers if f"model.layers.{layer}.self_attn.postmix_a" in made]
    if with_maps:
        plain = folded_layers(made, target, with_maps)
        moments = output_moments(model, folded(target), plain, with_maps, text.to_fit())
        made, more = with_postmix(made, target, seed, moments)
        figures = {layer: figures[layer] | more.get(layer, {}) for layer in layers}
    return made, figures


def _read_router(checkpoint: Checkpoint) -> Weights:
    """What the routers of a mixture of experts remember; nothing of other models."""
    tensors = checkpoint.router_tensors()
    return {name: np.array(tensors.array(name)) for name in tensors}


def loaded(config: Model, weights: Weights, router: Weights) -> Decoder:
    """A decoder with these weights and router states, which are all that it has."""
    model = decoder_with(config, weights.items())
    if model.balance is not None:
        model.balance.restore(router)
    return model


def _losses(model: Decoder, text: Text) -> np.ndarray[Any, Any]:
    return sequence_means(model, text.to_compare())


def difference(losses: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> dict[str, float]:
    """Mean difference of two models' losses of the same sequences, and its standard error.

    Pairs: that some sequences are harder than others, for both, is no part of the error.
    """
    each = losses - others
    return {"mean": float(each.mean()), "standard_error": float(each.std(ddof=1) / len(each) ** 0.5)}


def _write(
    out: Path, source: Checkpoint, recipe: Recipe, weights: Weights, router: Weights, report: dict[str, Any]
) -> None:
    specs = {name: (array.dtype, array.shape) for name, array in weights.items()}
    try:
        with atomic_directory(out) as directory:
            write_fresh_checkpoint(directory, recipe, source.tokenizer_path, specs, weights.values(), router)
            write_json(directory / WARM_START_REPORT_FILE, report)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from None


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report, as lines for people."""
    data, losses = report["data"], report["losses"]
    if data is not None:
        yield f"loss in nats per token, on {data['compared_tokens']:,} tokens of {data['prefix']} that no fit has seen:"
        names = {
            "source": "the source",
            "warm_start": "warm start from the weights alone",
            "fitted_warm_start": f"warm start fitted on {data['fitted_tokens']:,} tokens (written)",
            "random_start": "random start of the recipe",
        }
        for key, name in names.items():
            yield f"  {losses[key]:8.4f}  {name}"
        yield from _verdicts(report["differences"], data["compared_sequences"])
        yield ""
    norm = "weights'" if data is None else "queries'"
    yield f"per layer: share of the {norm} mean square that physical heads and Premix lose; |W-I| of each group" + (
        "; of the attention output, before and after Postmix" if data is not None else ""
    )
    for row in report["layers"]:
        parts = [f"  layer {row['layer']}:"]
        if "query_error" in row:
            parts.append(f"{row['query_error']:7.2%}  {' '.join(f'{value:.2f}' for value in row['premix_distance'])}")
        if "output_error" in row:
            parts.append(f"{row['output_error_without_postmix']:7.2%} -> {row['output_error']:.2%}")
        yield "  ".join(parts)
    yield f"wrote {report['out']}; train it with run.start_from={report['out']}"


def _verdicts(differences: dict[str, dict[str, float]], num_sequences: int) -> Iterator[str]:
    """In words what the fitted warm start is beside the others, and whether so many sequences can show it."""
    names = {"source": "the source", "warm_start": "the weights alone", "random_start": "a random start"}
    yield f"the fitted one, standard errors over {num_sequences} sequences:"
    for key, name in names.items():
        mean, error = (differences[f"fitted_warm_start - {key}"][part] for part in ("mean", "standard_error"))
        if abs(mean) <= 2 * error:
            yield f"  {mean:+8.4f} ± {error:.4f}  is as good as {name} within the noise"
        else:
            yield f"  {mean:+8.4f} ± {error:.4f}  is {'worse' if mean > 0 else 'better'} than {name}"
    alone = differences["fitted_warm_start - warm_start"]
    if alone["mean"] > 2 * alone["standard_error"]:
        yield "  the fit did harm: make it without --data, or give more --tokens"
