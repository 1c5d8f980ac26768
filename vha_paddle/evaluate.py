"""Models read back from disk, as functions: logits of tokens, loss of held-out text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from vha_paddle.checkpoint.layout import TOKENIZER_FILE, open_checkpoint, open_without_digests, sha256_of
from vha_paddle.checkpoint.load import device_tensor, load_parameters, router_state
from vha_paddle.config import Model
from vha_paddle.counts import folded
from vha_paddle.data.loader import ValidationWindows
from vha_paddle.export.config import ExportDtype
from vha_paddle.export.fold_export import folded_tensors
from vha_paddle.export.reader import CONFIG_FILE, read_hf_model, read_hf_tensors
from vha_paddle.export.verify import ROUNDING, Logits, Verification, random_tokens, verify_logits
from vha_paddle.export.writer import REPORT_FILE
from vha_paddle.model.balance import Balance
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import Microbatch, microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder
from vha_paddle.ops.routing import Routing
from vha_paddle.parallel.mesh import Mesh


def load_model(path: Path) -> Decoder:
    """The model of a checkpoint, a run directory (its newest checkpoint) or an exported directory, in float32.

    Raises:
        UserError: the path holds neither, or its tensors do not fit its configuration.
    """
    if (path / CONFIG_FILE).is_file():
        return _load_exported(path)
    checkpoint = open_checkpoint(path)
    model = _new_decoder(checkpoint.recipe.model)
    load_parameters(model.named_tensors(), checkpoint.model_tensors(), Mesh())
    if model.balance is not None:
        model.balance.restore(router_state(model.balance.state(), checkpoint))
    return model


def tokenizer_digest(path: Path) -> str | None:
    """sha256 of the tokenizer that belongs to what `load_model` finds at `path`; None where a directory that was
    exported elsewhere holds none."""
    if not (path / CONFIG_FILE).is_file():
        return sha256_of(open_without_digests(path).tokenizer_path)
    tokenizer = path / TOKENIZER_FILE
    return sha256_of(tokenizer) if tokenizer.is_file() else None


def sequence_lengths(path: Path) -> tuple[int | None, int]:
    """Tokens of the sequences that the model at `path` was trained on, and the most that it promises to serve.

    The first is None where a directory that was exported elsewhere does not say.
    """
    if not (path / CONFIG_FILE).is_file():
        recipe = open_without_digests(path).recipe
        return recipe.data.sequence_length, recipe.model.max_position_embeddings
    report = path / REPORT_FILE
    source = json.loads(report.read_text(encoding="utf-8"))["source"] if report.is_file() else {}
    return source.get("sequence_length"), read_hf_model(path).max_position_embeddings


def model_logits(path: Path) -> Logits:
    """Tokens `[B, S]` to logits `[B, S, V]` of what `load_model` finds at `path`; a checkpoint is not folded."""
    return _logits_of(load_model(path))


def verify_export(checkpoint: Path, exported: Path) -> Verification:
    """Compare an exported directory with its checkpoint on random tokens, as `export/verify.py` describes."""
    values = json.loads((exported / CONFIG_FILE).read_text(encoding="utf-8"))
    tokens_BS = random_tokens(values["vocab_size"], values["max_position_embeddings"])
    reference, files = load_model(checkpoint), load_model(exported)
    result = _compared(reference, files, tokens_BS, values["dtype"])
    if values["dtype"] == "float32":
        return result
    unrounded = _load_folded(checkpoint)
    return replace(
        result,
        fold_relative=_compared(reference, unrounded, tokens_BS, "float32").relative,
        largest_rounding=_largest_rounding(files, unrounded, *ROUNDING[values["dtype"]]),
    )


def _compared(reference: Decoder, other: Decoder, tokens_BS: np.ndarray[Any, Any], dtype: ExportDtype) -> Verification:
    """The two models' logits; in a mixture both use the experts that the reference chooses."""
    agreement = None
    if reference.balance is not None and other.balance is not None:
        recorded = _Recorded(reference.balance)
        steered = _Steered(other.balance, recorded)
        _put_in_place(reference, recorded)
        _put_in_place(other, steered)
        agreement = steered.mean_agreement
    return verify_logits(_logits_of(reference), _logits_of(other), tokens_BS, dtype, agreement)


def _largest_rounding(files: Decoder, unrounded: Decoder, relative: float, absolute: float) -> float:
    """Largest difference of a weight, over the largest that rounding makes."""
    exact = unrounded.named_tensors()
    largest = 0.0
    for name, parameter in files.named_tensors().items():
        value = exact[name].numpy().astype(np.float64)
        difference = np.abs(parameter.numpy() - value) / np.maximum(relative * np.abs(value), absolute)
        largest = max(largest, float(difference.max()))
    return largest


class _Recorded(Balance):
    """Remembers the experts that it chose last in each layer."""

    def __init__(self, balance: Balance) -> None:
        super().__init__(balance.config, len(balance.load_LE), balance.mesh)
        self.restore(balance.state())
        self.experts_by_layer: dict[int, np.ndarray[Any, Any]] = {}

    def route(self, layer: int, logits_TE: paddle.Tensor, counted: bool) -> Routing:
        routing = super().route(layer, logits_TE, counted)
        self.experts_by_layer[layer] = routing.experts_Tk
        return routing


class _Steered(Balance):
    """Sends each token where another model, which has run before, sent it."""

    def __init__(self, balance: Balance, recorded: _Recorded) -> None:
        super().__init__(balance.config, len(balance.load_LE), balance.mesh)
        self.restore(balance.state())
        self._recorded = recorded
        self._agreements: list[float] = []

    def route(self, layer: int, logits_TE: paddle.Tensor, counted: bool) -> Routing:
        own, experts_Tk = super().route(layer, logits_TE, counted), self._recorded.experts_by_layer[layer]
        self._agreements.append(float((experts_Tk[:, :, None] == own.experts_Tk[:, None]).any(-1).mean()))
        weights_Tk = paddle.take_along_axis(F.softmax(logits_TE), paddle.to_tensor(experts_Tk), axis=1)
        if self.config.norm_topk_prob:
            weights_Tk = weights_Tk / weights_Tk.sum(axis=-1, keepdim=True)
        return replace(own, weights_Tk=weights_Tk, experts_Tk=experts_Tk)

    def mean_agreement(self) -> float:
        """Share of the other model's choices that this one's routers make too, over all layers."""
        return float(np.mean(self._agreements))


def _put_in_place(model: Decoder, balance: Balance) -> None:
    for block in model.layers:
        block.mlp.balance = balance


def _logits_of(model: Decoder) -> Logits:
    def logits(tokens_BS: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with paddle.no_grad():
            result: np.ndarray[Any, Any] = model(paddle.to_tensor(tokens_BS.astype(np.int64))).numpy()
        return result

    return logits


def validation_loss(
    model: Decoder | PipelinedDecoder, windows: ValidationWindows, num_sequences: int, batch_size: int, mesh: Mesh
) -> float:
    """Mean cross-entropy (nats per token) over the first `num_sequences` windows, dealt out over the data ranks.

    Every rank takes part and gets the mean.
    """
    count = min(num_sequences, windows.num_samples)
    microbatches: list[Microbatch] = []
    # every rank runs as many: under sharding stage 3 all of them take part in each one's forward pass
    rounds = math.ceil(count / (batch_size * mesh.data_degree))
    starts = [(turn * mesh.data_degree + mesh.data_rank) * batch_size for turn in range(rounds)]
    alone = replace(mesh, data_rank=0, data_degree=1)  # what this rank takes is dealt out already
    for start in starts:
        # filled up with the last sequence: pipeline stages exchange tensors of one shape
        rows = [min(start + row, count - 1) for row in range(batch_size)]
        tokens_BS, labels_BS = windows.samples(rows[0], rows[-1] + 1)
        kept = [row - rows[0] for row in rows]
        microbatches += microbatches_of(tokens_BS[kept], labels_BS[kept], 0, batch_size, alone)
    losses = model.sequence_losses(microbatches)
    valid = np.concatenate([start + np.arange(batch_size) < count for start in starts])
    total = float(losses[valid[: len(losses)]].sum())
    return mesh.sum_over_batch(total) / (count * windows.sequence_length)


def sequence_means(
    model: Decoder, batches: Iterable[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
) -> np.ndarray[Any, Any]:
    """Mean cross-entropy (nats per token) of each sequence of batches of tokens and labels, without gradients, in one
    process."""
    means = [
        model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh())) / tokens_BS.shape[1]
        for tokens_BS, labels_BS in batches
    ]
    return np.concatenate(means)


def _load_folded(path: Path) -> Decoder:
    """The checkpoint at `path`, whose digests have been checked, folded, in float32."""
    checkpoint = open_without_digests(path)
    config = checkpoint.recipe.model
    return decoder_with(folded(config), folded_tensors(checkpoint.model_tensors(), config, "float32"))


def _load_exported(path: Path) -> Decoder:
    config = read_hf_model(path)
    return decoder_with(config, read_hf_tensors(path, config))


def decoder_with(config: Model, tensors: Iterable[tuple[str, np.ndarray[Any, Any]]]) -> Decoder:
    """A decoder for evaluation, in float32, with these values of its tensors, by canonical name."""
    model = _new_decoder(config)
    parameters = model.named_tensors()
    for name, array in tensors:
        parameters[name].set_value(device_tensor(array, parameters[name].dtype))
    return model


def _new_decoder(config: Model) -> Decoder:
    model = build_decoder(config, Mesh(), seed=0)
    model.eval()
    return model
