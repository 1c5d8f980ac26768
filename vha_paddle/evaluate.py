"""Models read back from disk, as functions: logits of tokens, loss of held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.checkpoint.load import device_tensor, load_parameters
from vha_paddle.config import Model
from vha_paddle.data.loader import ValidationWindows
from vha_paddle.errors import UserError
from vha_paddle.export.reader import CONFIG_FILE, read_hf_model, read_hf_tensors
from vha_paddle.model.decoder import Decoder, build_decoder
from vha_paddle.model.microbatch import Microbatch, microbatches_of
from vha_paddle.model.pipelined import PipelinedDecoder
from vha_paddle.names import account, check_shape
from vha_paddle.parallel.mesh import Mesh

Logits = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


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
    return model


def checkpoint_logits(path: Path) -> Logits:
    """Tokens `[B, S]` to logits `[B, S, V]` of the unfolded model of a checkpoint."""
    return _logits_of(load_model(path))


def exported_logits(path: Path) -> Logits:
    """Tokens `[B, S]` to logits `[B, S, V]` of an exported directory, read back from its files."""
    return _logits_of(load_model(path))


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


def mean_loss(model: Decoder, batches: Iterable[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> float:
    """Mean cross-entropy (nats per token) over batches of tokens and labels, without gradients, in one process."""
    total, count = 0.0, 0
    for tokens_BS, labels_BS in batches:
        total += float(model.sequence_losses(microbatches_of(tokens_BS, labels_BS, 0, len(tokens_BS), Mesh())).sum())
        count += tokens_BS.size
    return total / count


def _load_exported(path: Path) -> Decoder:
    config = read_hf_model(path)
    model = _new_decoder(config)
    parameters = model.named_tensors()
    found = []
    for name, array in read_hf_tensors(path):
        if name not in parameters:
            raise UserError(f"{path}: unexpected tensor {name}; export the model again")
        check_shape(name, array.shape, parameters[name].shape, str(path))
        parameters[name].set_value(device_tensor(array, parameters[name].dtype))
        found.append(name)
    account(found, parameters, str(path))
    return model


def _new_decoder(config: Model) -> Decoder:
    model = build_decoder(config, Mesh(), seed=0)
    model.eval()
    return model


def _logits_of(model: Decoder) -> Logits:
    def logits(tokens_BS: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with paddle.no_grad():
            result: np.ndarray[Any, Any] = model(paddle.to_tensor(tokens_BS.astype(np.int64))).numpy()
        return result

    return logits
