"""Stock Qwen3, Qwen3-MoE and Llama directories: releases of others, and what `tools/fold_export.py` wrote."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.config import Model
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.data.tokenizer_files import HF_FILE, SENTENCEPIECE_FILE
from vha_paddle.errors import UserError
from vha_paddle.names import QWEN3, from_hf
from vha_paddle.sources.base import LazyTensors, Source
from vha_paddle.sources.containers import StoredTensors, open_safetensors
from vha_paddle.sources.hf_config import ARCHITECTURES, CONFIG_FILE, read_hf_model, read_json
from vha_paddle.sources.hf_specs import hf_specs
from vha_paddle.sources.upstream import map_among
from vha_paddle.tensors import EMBEDDING, LM_HEAD

KIND = "Hugging Face directory"

_FLOATING = ("float32", "float16", "bfloat16")
_ROWS_COMPARED = 4096
_ROTARY_TABLE = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")


class HFWeights:
    """The tensors of such a directory, in the dtypes that they are stored in; see `sources.base.Weights`."""

    def __init__(self, model: Model, stored: StoredTensors) -> None:
        """Check names, shapes and dtypes; reads no tensor.

        Raises:
            UserError: the tensors are not exactly the model's.
        """
        self._stored = stored
        self.left_out: dict[str, str] = {}
        for there in stored.entries:
            if there == LM_HEAD and model.tie_word_embeddings:
                self.left_out[there] = f"a copy of {EMBEDDING}, to which it is tied"
            elif _ROTARY_TABLE.fullmatch(there):
                self.left_out[there] = "follows from rope_theta"
        rule = f"a tensor must have one of the dtypes {', '.join(_FLOATING)}; take the model's unquantized release"
        self.specs = hf_specs(model, stored, QWEN3, self.left_out, _FLOATING, rule)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """See `Weights.read`; with a tied embedding, a copy of it that is there too is compared.

        Raises:
            UserError: the file is damaged, or the copy differs.
        """
        array = from_hf(name, self.specs[name].shape, LazyTensors(self._stored.entries, self._stored.read))
        if name == EMBEDDING and LM_HEAD in self.left_out:
            copy = self._stored.read(LM_HEAD)
            if not _same_bits(array, copy):
                raise UserError(
                    f"{self._stored.path}: tie_word_embeddings=true, but {LM_HEAD} differs from {EMBEDDING}; "
                    "set it to false in config.json if the model was trained so"
                )
        return array


def _same_bits(array: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two matrices are one, compared some rows at a time: a large one is there twice already."""
    if (array.shape, array.dtype) != (other.shape, other.dtype):
        return False
    starts = range(0, len(array), _ROWS_COMPARED)
    slices = (slice(start, start + _ROWS_COMPARED) for start in starts)
    return all(np.array_equal(array[rows].view(np.uint8), other[rows].view(np.uint8)) for rows in slices)


def is_hugging_face(path: Path) -> bool:
    """Whether a directory holds a model that `open_hugging_face` may read.

    The research fork's config.json says Qwen3ForCausalLM of virtual heads; the tensors tell.
    """
    if not (path / CONFIG_FILE).is_file() or read_json(path / CONFIG_FILE).get("model_type") not in [*ARCHITECTURES]:
        return False
    return any(path.glob("*.safetensors")) and map_among(open_safetensors(path).entries) is None


def open_hugging_face(directory: Path) -> Source:
    """A stock directory.

    Raises:
        UserError: config.json describes another model than can be read, or the tensors are not the model's.
    """
    model = read_hf_model(directory)
    values = read_json(directory / CONFIG_FILE)
    stored = open_safetensors(directory)
    if (name := map_among(stored.entries)) is not None:
        raise UserError(
            f"{directory}: holds {name}, so it is a VHA checkpoint, whatever {CONFIG_FILE} says; fold it with "
            "tools/fold_export.py first"
        )
    dropout = values.get("attention_dropout")
    warning = f"attention_dropout={dropout} was for training there; attention has none here, use model.hidden_dropout"
    return Source(
        path=directory,
        kind=KIND,
        model=model,
        weights=HFWeights(model, stored),
        tokenizer=_tokenizer(directory),
        provenance={
            "directory": directory.resolve().name,
            "model_type": values["model_type"],
            "config_sha256": hashlib.sha256((directory / CONFIG_FILE).read_bytes()).hexdigest(),
        },
        files=dict.fromkeys(str(file.relative_to(directory)) for file in (directory / CONFIG_FILE, *stored.files)),
        warnings=(warning,) if dropout else (),
    )


def _tokenizer(directory: Path) -> Path | None:
    """The tokenizer that belongs to the model.

    Where there are both, a SentencePiece model of the form that is used here is the one that tokenizer.json was made
    from, by an export of ours. That of a release (Llama 2) has another form: there tokenizer.json is meant.
    """
    model, fast = (directory / name for name in (SENTENCEPIECE_FILE, HF_FILE))
    if not model.is_file() or not fast.is_file():
        return next((file for file in (model, fast) if file.is_file()), None)
    try:
        SentencePieceTokenizer.load(model)
    except UserError:
        return fast
    return model
