"""What text is made with, from a model directory or from a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vha_paddle.checkpoint.layout import open_without_digests
from vha_paddle.checkpoint.load import router_state
from vha_paddle.config import GroupedAttention, Model, VirtualHeadAttention
from vha_paddle.counts import folded
from vha_paddle.data.tokenizer import Tokenizer, load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import decoder_with, open_model
from vha_paddle.fold import check_foldable, convert_state
from vha_paddle.generate.decoder import CachedDecoder
from vha_paddle.model.decoder import Decoder
from vha_paddle.proof.exported import Exported
from vha_paddle.sources.base import LazyTensors, Source
from vha_paddle.sources.hf_config import CONFIG_FILE, read_json
from vha_paddle.sources.own import open_own

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True)
class TextModel:
    """A model that is decoded with a cache, its tokenizer, and where its texts begin and end."""

    config: Model
    """As it is decoded: a model with virtual heads is folded."""
    model: Decoder
    tokenizer: Tokenizer
    begin_id: int | None
    """What a text without a prompt starts after."""
    end_ids: frozenset[int]
    origin: str
    """What was read and what was done to it, in words."""

    @classmethod
    def load(cls, path: Path) -> TextModel:
        """Read a model directory, exported here or released by others, or a checkpoint (of a run directory the newest;
        or another project's, if its files say all of it).

        Whatever has virtual heads, an unfolded directory too, is folded in memory and rounded to float32.

        Raises:
            UserError: there is neither, its files do not fit together, or the model cannot be decoded with a cache;
                the line names the key and the reason.
        """
        found = open_model(path)
        if isinstance(found, Source) and found.recipe is not None:
            return _load_checkpoint(path)
        return _load_directory(path, found)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Ids to read before the first new token: the prompt's, or the begin token where it is empty.

        Raises:
            UserError: the prompt is not valid Unicode, or it is empty and the model has no begin token.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8; give text") from None
        tokens = tuple(self.tokenizer.encode(prompt))
        if tokens:
            return tokens
        if self.begin_id is None:
            raise UserError("the prompt is empty, and the model has no begin token to start after; give a prompt")
        return (self.begin_id,)

    def decoder(self, num_prompt_tokens: int, max_new_tokens: int) -> CachedDecoder:
        """A fresh decoder with room for the longest prompt and what follows it.

        Raises:
            UserError: no token is asked for, or more than the model's positions allow.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        total, most = num_prompt_tokens + max_new_tokens, self.config.max_position_embeddings
        if total > most:
            raise UserError(
                f"max_new_tokens={max_new_tokens} after a prompt of {num_prompt_tokens} is {total} tokens: "
                f"at most max_position_embeddings={most} are possible; shorten one of them"
            )
        return CachedDecoder(self.model, capacity=total)


def check_decodable(model: Model, source: str) -> None:
    """Require that a model, once folded, keeps keys and values of heads and nothing else.

    Raises:
        UserError: it keeps something else, its maps do not fold, or its experts have a capacity.
    """
    for section, attention in model.attention_sections.items():
        if not isinstance(attention, GroupedAttention | VirtualHeadAttention):
            raise UserError(
                f"{source}: {section}.kind={attention.kind}: only grouped heads, and virtual ones that fold into them, "
                "are decoded with a cache; evaluate the checkpoint with tools/evaluate.py"
            )
    check_foldable(model, source)
    if model.experts is not None and model.experts.capacity_factor is not None:
        raise UserError(
            f"{source}: model.experts.capacity_factor={model.experts.capacity_factor} counts whole sequences; token by "
            "token there are none; evaluate the checkpoint with tools/evaluate.py"
        )


def _load_directory(path: Path, found: Source | Exported) -> TextModel:
    """What has a config.json, which says, with what lies beside it, which tokens begin and end a text."""
    model = found.model
    if isinstance(found, Exported):
        kind, tokenizer_path = "exported model", path
        state = LazyTensors(found.shapes, found.read)
    else:
        kind, tokenizer_path = found.kind, found.tokenizer or path
        state = LazyTensors(found.weights.specs, found.weights.read)
    check_decodable(model, str(path))
    tokenizer = _tokenizer(tokenizer_path, model, str(path))
    begin_id, end_ids = _special_ids(path, model, tokenizer)
    origin = f"{kind} {path}, {_what_is_done(model)}"
    return TextModel(folded(model), _decoder(model, state, str(path)), tokenizer, begin_id, end_ids, origin)


def _load_checkpoint(path: Path) -> TextModel:
    source = open_own(path)
    model, where = source.model, str(source.path)
    check_decodable(model, where)
    assert source.tokenizer is not None, "a checkpoint of this package holds its tokenizer"
    tokenizer = _tokenizer(source.tokenizer, model, where)
    decoder = _decoder(model, LazyTensors(source.weights.specs, source.weights.read), where)
    if decoder.balance is not None:
        checkpoint = open_without_digests(source.path)
        decoder.balance.restore(router_state(decoder.balance.state(), checkpoint))
    origin = f"{source.kind} {where}, {_what_is_done(model)}"
    # the end token lies between the documents of the training data, so it is also what a text begins after
    return TextModel(folded(model), decoder, tokenizer, tokenizer.eos_id, frozenset({tokenizer.eos_id}), origin)


def _decoder(model: Model, state: Mapping[str, np.ndarray[Any, Any]], source: str) -> Decoder:
    return decoder_with(folded(model), convert_state(state, model, folded(model), np.float32, source))


def _what_is_done(model: Model) -> str:
    return "virtual heads folded in memory" if model.has_maps else "as it is"


def _special_ids(directory: Path, model: Model, tokenizer: Tokenizer) -> tuple[int | None, frozenset[int]]:
    """The begin token, if there is one, and the end tokens: those of the settings for generation, else of the model,
    else of the tokenizer."""
    files = [file for name in (GENERATION_CONFIG_FILE, CONFIG_FILE) if (file := directory / name).is_file()]
    begin_id, stated = None, list[tuple[str, Any]]()
    for file in files:
        values = read_json(file)
        ends = values.get("eos_token_id")
        if ends is not None and not stated:
            stated = [(f"{file}: eos_token_id", end) for end in (ends if isinstance(ends, list) else [ends])]
        if file.name == CONFIG_FILE and values.get("bos_token_id") is not None:
            begin_id = _id(f"{file}: bos_token_id", values["bos_token_id"], model)
    end_ids = frozenset(_id(where, end, model) for where, end in stated)
    return begin_id, end_ids or frozenset({tokenizer.eos_id})


def _id(where: str, value: Any, model: Model) -> int:
    if type(value) is not int or not 0 <= value < model.vocab_size:
        raise UserError(f"{where}={value}: must be an id below vocab_size={model.vocab_size}; correct it")
    return value


def _tokenizer(path: Path, config: Model, source: str) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, more than the model's "
            f"vocab_size={config.vocab_size}; the tokenizer belongs to another model"
        )
    return tokenizer
