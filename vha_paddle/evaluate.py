"""Models read back from disk, as functions: logits of tokens, loss of held-out text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from vha_paddle.checkpoint.layout import open_checkpoint, sha256_of
from vha_paddle.checkpoint.load import device_tensor, load_parameters, router_state
from vha_paddle.config import Model
from vha_paddle.data.loader import ValidationWindows
from vha_paddle.data.tokenizer_files import IDENTIFYING_FILES, tokenizer_files
from vha_paddle.export.output import REPORT_FILE
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import Microbatch, microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.proof.exported import Exported, is_export, open_exported
from vha_paddle.sources.base import Source
from vha_paddle.sources.hugging_face import is_hugging_face, open_hugging_face
from vha_paddle.sources.open import open_source

Logits = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
"""Tokens `[B, S]`, int64, to logits `[B, S, V]`, float32."""


def load_model(path: Path) -> Decoder:
    """The model of a checkpoint (of a run directory the newest; or another project's, if its files say all of it), or
    of a model directory, exported here or released by others; in float32.

    Raises:
        UserError: the path holds none, or its tensors do not fit its configuration.
    """
    found = open_model(path)
    if isinstance(found, Exported):
        return decoder_with(found.model, ((name, found.read(name)) for name in found.shapes))
    if found.recipe is not None:
        return _load_own(path)
    weights = found.weights
    return decoder_with(found.model, ((name, weights.read(name)) for name in weights.specs))


def assumptions(path: Path) -> tuple[str, ...]:
    """What the reader of what `load_model` finds at `path` had to assume, a line each."""
    found = open_model(path)
    return found.warnings if isinstance(found, Source) else ()


def tokenizer_digest(path: Path) -> str | None:
    """sha256 of the tokenizer that belongs to what `load_model` finds at `path`; None where it has none."""
    tokenizer: Path | None = path
    if not any((path / name).is_file() for name in IDENTIFYING_FILES):
        found = open_model(path)
        tokenizer = None if isinstance(found, Exported) else found.tokenizer
    return None if tokenizer is None else sha256_of(tokenizer_files(tokenizer)[0])


def sequence_lengths(path: Path) -> tuple[int | None, int]:
    """Tokens of the sequences that the model at `path` was trained on, and the most that it promises to serve.

    The first is None where nothing there says it.
    """
    found = open_model(path)
    longest = found.model.max_position_embeddings
    if isinstance(found, Source) and found.recipe is not None:
        return found.recipe.data.sequence_length, longest
    report = path / REPORT_FILE
    origin = json.loads(report.read_text(encoding="utf-8"))["source"] if report.is_file() else {}
    return origin.get("sequence_length"), longest


def model_logits(path: Path) -> Logits:
    """Tokens `[B, S]` to logits `[B, S, V]` of what `load_model` finds at `path`; a checkpoint is not folded."""
    model = load_model(path)

    def logits(tokens_BS: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with paddle.no_grad():
            result: np.ndarray[Any, Any] = model(paddle.to_tensor(tokens_BS.astype(np.int64))).numpy()
        return result

    return logits


def validation_loss(
    model: Decoder | PipelinedDecoder,
    windows: ValidationWindows,
    num_sequences: int,
    batch_size: int,
    mesh: Mesh,
    eod_id: int | None = None,
) -> float:
    """Mean cross-entropy (nats per token) over the first `num_sequences` windows, dealt out over the data ranks.

    Every rank takes part and gets the mean. `eod_id` is `microbatches_of`'s.
    """
    count = min(num_sequences, windows.num_samples)
    microbatches: list[Microbatch] = []
    # every rank runs as many: under sharding stage 3 all of them take part in each one's forward pass
    rounds = math.ceil(count / (batch_size * mesh.data_degree))
    starts = [(turn * mesh.data_degree + mesh.data_rank) * batch_size for turn in range(rounds)]
    for start in starts:
        # filled up with the last sequence: pipeline stages exchange tensors of one shape
        rows = [min(start + row, count - 1) for row in range(batch_size)]
        tokens_BS, labels_BS = windows.samples(rows[0], rows[-1] + 1)
        kept = [row - rows[0] for row in rows]
        microbatches += microbatches_of(tokens_BS[kept], labels_BS[kept], 0, batch_size, mesh, eod_id)
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


def open_model(path: Path) -> Source | Exported:
    """What lies at `path`: anything that `load_model` takes. No tensor is read. Raises as `load_model`."""
    if is_export(path):
        return open_exported(path)
    return open_hugging_face(path) if is_hugging_face(path) else open_source(path)


def _load_own(path: Path) -> Decoder:
    checkpoint = open_checkpoint(path)
    model = _new_decoder(checkpoint.recipe.model)
    load_parameters(model.named_tensors(), checkpoint.model_tensors(), Mesh())
    if model.balance is not None:
        model.balance.restore(router_state(model.balance.state(), checkpoint))
    return model


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
