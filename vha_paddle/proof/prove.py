"""Run the unfolded model and the exported one side by side, layer by layer, and measure how they differ.

What is measured is described in `export/verify.py`. The hidden states of up to four models are carried from layer to
layer. In a layer, one block holds the checkpoint's weights and a second one the fold's, then the files', then those of
the cast; both are dropped before the next layer.

Memory, beside the process itself and what the tokens take, is the larger of

    2 layers in float32, 3 times a layer's attention in float64, and one tensor as it is read
    the embeddings of both models as they are stored; or their output projections
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from vha_paddle.config import Model, VirtualHeadAttention
from vha_paddle.counts import folded, what_stays
from vha_paddle.errors import RunError
from vha_paddle.export.verify import AttentionErrors, Difference, Verification
from vha_paddle.fold import fold_postmix, fold_premix
from vha_paddle.model.block import Block
from vha_paddle.names import POSTMIX_A, POSTMIX_B, PREMIX, expected_tensors
from vha_paddle.ops.norm import rms_norm
from vha_paddle.proof.exported import Exported, open_exported
from vha_paddle.proof.head import NO_LABEL, Distribution, compare
from vha_paddle.proof.layers import (
    Blocks,
    Recorded,
    Steered,
    attended,
    fill,
    in_attention,
    parameters_of,
    run,
    values_of,
)
from vha_paddle.proof.rounding import Array, departure, round_in_place
from vha_paddle.proof.tokens import NUM_TOKENS, Tokens, tokens_to_compare
from vha_paddle.sources.base import Source
from vha_paddle.tensors import EMBEDDING, FINAL_NORM, LM_HEAD

Progress = Callable[[int, int], None]
"""Told the layers that are done, and how many there are."""
Weights = Callable[[str], Array]
"""From canonical name to values."""

CHECKPOINT, FOLD, EXPORT, CAST = "checkpoint", "fold", "export", "cast"

_TRAINING_ONLY = ("premix_init", "premix_init_noise", "postmix_init_std", "postmix_space")
"""Keys of an attention that change no value."""
_SAME = ("rope_theta", "rms_norm_eps", "max_position_embeddings")


def prove_export(
    source: Source,
    exported: Path,
    *,
    text: Path | None = None,
    num_tokens: int = NUM_TOKENS,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Compare an exported directory with the checkpoint it was made from; the caller decides what a fault means.

    Args:
        exported: the directory, with all of its files.
        text: what to compare on, encoded with the checkpoint's tokenizer; None for random ids and, where there is a
            tokenizer, built-in text.
        num_tokens: about how many positions.

    Raises:
        UserError: a directory that cannot be read, or as `tokens_to_compare`.
        RunError: the directory holds another model's tensors, or logits are not finite.
    """
    opened = open_exported(exported)
    tokens = tokens_to_compare(source.model, source.tokenizer, text, num_tokens)
    return _Proof(source, opened, tokens).run(progress)


class _Proof:
    """One comparison: the models' hidden states, and what has been measured."""

    def __init__(self, source: Source, exported: Exported, tokens: Tokens) -> None:
        self.source, self.exported, self.tokens = source, exported, tokens
        served = _served(source.model, exported)
        configs = {CHECKPOINT: source.model, EXPORT: exported.model}
        if served is not source.model:
            configs[FOLD] = served
        if exported.dtype != "float32":
            configs[CAST] = source.model
        self.config_differences = _differences(served, exported)
        self.blocks = {name: Blocks(model, "float32") for name, model in configs.items()}
        self.exact_blocks = {name: Blocks(configs[name], "float64") for name in (CHECKPOINT, FOLD) if name in configs}
        self.routers = _steer(self.blocks)
        self.hidden: dict[str, Array] = {}
        self.errors: dict[str, list[float]] = {name: [] for name in configs}
        self.exact_errors: list[float] = []
        self.largest_rounding, self.largest_rounding_tensor = -1.0, EMBEDDING

    def run(self, progress: Progress) -> Verification:
        """Take all models through all layers."""
        num_layers = self.source.model.num_hidden_layers
        self._embed()
        for layer in range(num_layers):
            self._layer(layer)
            progress(layer + 1, num_layers)
        return self._result(*self._logits())

    def _embed(self) -> None:
        ids_BS = self.tokens.tokens_BS
        table = self.source.weights.read(EMBEDDING)
        rows = table[ids_BS].astype(np.float32)
        self.hidden = {name: rows for name in self.blocks}
        self.hidden[EXPORT] = self._stored(EMBEDDING, table)[ids_BS].astype(np.float32)
        if CAST in self.blocks:
            self.hidden[CAST] = self._cast(EMBEDDING, rows)

    def _layer(self, layer: int) -> None:
        entering_BSD = self.hidden[CHECKPOINT]
        attention: dict[str, Array] = {}

        def read(name: str) -> Array:
            array = self.source.weights.read(name)
            if in_attention(name):
                attention[name] = array
            return array

        block = self._filled(CHECKPOINT, layer, read)
        expected_BSD = attended(block, entering_BSD)
        self.hidden[CHECKPOINT] = run(block, entering_BSD)
        own = {name: values_of(parameter) for name, parameter in parameters_of(block).items()}
        exact = own | attention  # as read, which may be more precise than float32
        if FOLD in self.blocks:
            exact |= self._folded(attention, layer)
            self._exact_attention(layer, attention, exact, entering_BSD)
            self._advance(FOLD, layer, exact.__getitem__, entering_BSD, expected_BSD)
        self._advance(EXPORT, layer, lambda name: self._stored(name, exact[name]), entering_BSD, expected_BSD)
        if CAST in self.blocks:
            self._advance(CAST, layer, lambda name: self._cast(name, own[name]), entering_BSD, expected_BSD)

    def _filled(self, name: str, layer: int, weights: Weights) -> Block:
        block = self.blocks[name].block(layer)
        for parameter_name, parameter in parameters_of(block).items():
            fill(parameter, weights(parameter_name))
        return block

    def _advance(self, name: str, layer: int, weights: Weights, entering_BSD: Array, expected_BSD: Array) -> None:
        """Take a model through a layer, and compare its attention with the checkpoint's on what entered that."""
        block = self._filled(name, layer, weights)
        self.errors[name].append(_relative(attended(block, entering_BSD), expected_BSD))
        self.hidden[name] = run(block, self.hidden[name])

    def _folded(self, attention: Mapping[str, Array], layer: int) -> dict[str, Array]:
        """The projections with a layer's maps folded in as far as they fold, float64, whole and by the formulas: the
        export folds block by block."""
        config = self.source.model.attention_of(layer)
        if not isinstance(config, VirtualHeadAttention):
            return {}
        prefix = f"model.layers.{layer}.self_attn."
        short = {name.removeprefix(prefix): array for name, array in attention.items()}
        stays, result = what_stays(config), dict[str, Array]()
        if PREMIX in short and "premix" not in stays:
            result["q_proj.weight"] = fold_premix(short["q_proj.weight"], short[PREMIX])
            if "q_proj.bias" in short:
                result["q_proj.bias"] = fold_premix(short["q_proj.bias"][None], short[PREMIX])[0]
        if POSTMIX_A in short and "postmix" not in stays:
            result["o_proj.weight"] = fold_postmix(short["o_proj.weight"], short[POSTMIX_A], short[POSTMIX_B])
        return {prefix + name: array for name, array in result.items()}

    def _exact_attention(
        self, layer: int, unfolded: Mapping[str, Array], exact: Mapping[str, Array], entering_BSD: Array
    ) -> None:
        x_BSD, outputs = entering_BSD.astype(np.float64), []
        for name, weights in ((CHECKPOINT, unfolded), (FOLD, exact)):
            block = self.exact_blocks[name].block(layer)
            for parameter_name, parameter in parameters_of(block).items():
                if in_attention(parameter_name):  # the others get no memory
                    fill(parameter, weights[parameter_name])
            outputs.append(attended(block, x_BSD))
        self.exact_errors.append(_relative(outputs[1], outputs[0]))

    def _logits(self) -> tuple[dict[str, Distribution], dict[str, Difference]]:
        """Final norm and head of all models, compared."""
        model, weights = self.source.model, self.source.weights
        tied = model.tie_word_embeddings
        gain_D = weights.read(FINAL_NORM)
        gains = {name: gain_D for name in self.blocks} | {EXPORT: self._stored(FINAL_NORM, gain_D)}
        if CAST in self.blocks:
            gains[CAST] = self._cast(FINAL_NORM, gain_D)
        hidden = {name: _normed(x_BSD, gains[name], model.rms_norm_eps) for name, x_BSD in self.hidden.items()}
        head = EMBEDDING if tied else LM_HEAD
        table = weights.read(head)
        source_DV = table.T if tied else table
        if self.exported.model.tie_word_embeddings:
            files_DV = self._stored(EMBEDDING, table).T
        else:  # also of a tied model where a reader ties nothing
            files_DV = self._stored(LM_HEAD, source_DV)

        def projection(first: int, stop: int) -> dict[str, Array]:
            part, stored = (each[:, first:stop].astype(np.float32) for each in (source_DV, files_DV))
            parts = {name: part for name in self.blocks} | {EXPORT: stored}
            if CAST in self.blocks:
                parts[CAST] = self._cast(head, part)
            return parts

        before_files = FOLD if FOLD in self.blocks else CHECKPOINT
        pairs = {name: (CHECKPOINT, name) for name in self.blocks if name != CHECKPOINT}
        pairs["storage"] = before_files, EXPORT
        labels_T = self.tokens.labels_BS(NO_LABEL).reshape(-1)
        return compare(hidden, projection, model.vocab_size, labels_T, pairs)

    def _result(self, distributions: dict[str, Distribution], gaps: dict[str, Difference]) -> Verification:
        return Verification(
            dtype=self.exported.dtype,
            num_tokens=self.tokens.tokens_BS.size,
            text=self.tokens.text,
            num_text_tokens=self.tokens.tokens_BS[self.tokens.num_random :].size,
            scale=distributions[CHECKPOINT].largest_size,
            export=gaps[EXPORT],
            fold=gaps.get(FOLD),
            storage=gaps["storage"],
            cast=gaps.get(CAST),
            attention=AttentionErrors(
                export=tuple(self.errors[EXPORT]),
                fold=tuple(self.exact_errors) if FOLD in self.blocks else None,
                cast=tuple(self.errors[CAST]) if CAST in self.blocks else None,
            ),
            largest_rounding=self.largest_rounding,
            largest_rounding_tensor=self.largest_rounding_tensor,
            config_differences=self.config_differences,
            checkpoint_loss=distributions[CHECKPOINT].loss,
            export_loss=distributions[EXPORT].loss,
            expert_agreement=self.routers[EXPORT].mean_agreement() if self.routers else None,
        )

    def _stored(self, name: str, exact: Array) -> Array:
        """A tensor of the files, once it has been compared with what was to be rounded."""
        array = self.exported.read(name)
        in_order = self.exported.in_stored_order
        found = departure(in_order(name, array), in_order(name, exact), self.exported.format_of(name))
        if not found <= self.largest_rounding:
            self.largest_rounding, self.largest_rounding_tensor = found, name
        return array

    def _cast(self, name: str, values: Array) -> Array:
        """Values of the unfolded model as the files' dtype has them, float32."""
        rounded = np.array(values, np.float32)
        round_in_place(rounded, self.exported.format_of(name))
        return rounded


def _steer(blocks: Mapping[str, Blocks]) -> dict[str, Steered]:
    """In a mixture, let the other models use the experts that the checkpoint chooses; their routers by model."""
    model = blocks[CHECKPOINT].model
    if model.experts is None:
        return {}
    recorded = Recorded(model)
    blocks[CHECKPOINT].choose_by(recorded)
    routers = {name: Steered(each.model, recorded) for name, each in blocks.items() if name != CHECKPOINT}
    for name, router in routers.items():
        blocks[name].choose_by(router)
    return routers


def _served(model: Model, exported: Exported) -> Model:
    """What the directory must hold: the checkpoint's model itself, or what is left of it when it is folded."""
    found = expected_tensors(exported.model)
    if model.tie_word_embeddings and not exported.model.tie_word_embeddings:
        del found[LM_HEAD]  # where a reader ties nothing, the table is written twice
    for served in (model, folded(model)):
        if found == expected_tensors(served):
            return served
    raise RunError(
        f"{exported.path}: holds other tensors than the checkpoint's model has, folded or not; it was exported from "
        "another one"
    )


def _differences(served: Model, exported: Exported) -> tuple[str, ...]:
    """What config.json says otherwise. A window that is longer than the sequences compared shows nowhere else."""
    other = exported.model
    pairs: list[tuple[str, Any, Any]] = [(key, getattr(served, key), getattr(other, key)) for key in _SAME]
    for layer in range(served.num_hidden_layers):
        pairs.append((f"window of layer {layer}", served.window_of(layer), other.window_of(layer)))
        pairs.append((f"attention of layer {layer}", _computed(served, layer), _computed(other, layer)))
    if served.experts is not None and other.experts is not None:
        pairs += [
            (f"experts.{key}", getattr(served.experts, key), getattr(other.experts, key))
            for key in ("num_experts_per_tok", "norm_topk_prob", "capacity_factor")
        ]
    return tuple(
        f"{exported.path.name}/config.json: {key} is {theirs}, the checkpoint's {ours}"
        for key, ours, theirs in pairs
        if ours != theirs
    )


def _computed(model: Model, layer: int) -> dict[str, object]:
    values = model.attention_of(layer).model_dump()
    return {key: value for key, value in values.items() if key not in _TRAINING_ONLY}


def _relative(actual: Array, expected: Array) -> float:
    difference, scale = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
    return difference / scale if scale > 0 else difference


def _normed(x_BSD: Array, gain_D: Array, eps: float) -> Array:
    x_TD = paddle.to_tensor(x_BSD.reshape(-1, x_BSD.shape[-1]))
    return rms_norm(x_TD, paddle.to_tensor(gain_D.astype(np.float32)), eps).numpy()
