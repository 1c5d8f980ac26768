"""A checkpoint's tokenizer as the files that Hugging Face clients read.

A Hugging Face tokenizer is copied byte for byte, except for the two spellings of `tokenizer_config.json` that
transformers 5 writes and transformers 4 stops at. A SentencePiece BPE model becomes a Hugging Face tokenizer that gives
the same ids for every text, as follows.

Both encoders start from single characters and merge neighbours until nothing merges. SentencePiece merges any
two neighbours whose concatenation is a piece, highest score first, leftmost among equals. A fast tokenizer
merges the pairs of a list, earliest in the list first, leftmost among equals. So the list must name, in order
of the piece's score, the pairs that SentencePiece merges, and ONE PAIR PER PIECE IS ENOUGH: while a stretch
of text becomes the piece W, no merge crosses its ends, so what happens inside is what happens when W is
encoded alone. That run is deterministic and has a single state of two symbols. No other split of W can ever
meet in any text; the usual conversion, which lists all of them, has the same effect with a longer list.

Two details make the ids equal for the rest of Unicode. SentencePiece keeps a space as "▁" (U+2581); the
vocabulary here has the space itself, so no normalizer is needed, and a literal "▁" in the text falls back to
its bytes as `vha_paddle.data.Tokenizer` encodes it. And text that spells a special token (`</s>`) is text:
`split_special_tokens` tells transformers so.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models

from vha_paddle.data.hf_tokenizer import GENERAL_CLASS, as_json
from vha_paddle.data.sentencepiece_tokenizer import SPACE_SYMBOL, SentencePieceTokenizer
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.data.tokenizer_files import HF_CONFIG_FILE, HF_FILE, HF_SPECIAL_FILE
from vha_paddle.errors import UserError
from vha_paddle.export.config import SpecialTokens

V5_CLASS = "TokenizersBackend"
"""What transformers 5 calls the class that it and transformers 4 know as `GENERAL_CLASS`."""

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
_SPECIAL = (_Piece.UNKNOWN, _Piece.CONTROL)


class TokenizerExport:
    """A checkpoint's tokenizer, converted where it must be; `write` puts its files into a directory.

    Raises:
        UserError: `path` is no tokenizer, or a SentencePiece model that is no BPE with byte fallback or has no order.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = load_tokenizer(path)
        self._converted: ConvertedSentencePiece | None = None
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            self._converted = ConvertedSentencePiece(self._tokenizer, path)
        self.special = SpecialTokens(self._tokenizer.eos_id, self._tokenizer.pad_id, self._tokenizer.vocab_size)

    def write(self, directory: Path, max_length: int) -> None:
        """Write the files; `max_length` is the model's longest sequence in tokens."""
        files = dict(self._tokenizer.files)
        if self._converted is not None:
            files |= self._converted.files(max_length)
        else:
            files[HF_CONFIG_FILE] = _config_for_all(files.get(HF_CONFIG_FILE))
        for name, content in files.items():
            (directory / name).write_bytes(content)


def _config_for_all(content: bytes | None) -> bytes:
    """A tokenizer_config.json that transformers 4 and 5 both read: as it is, where it is one."""
    config = json.loads(content) if content is not None else {}
    changed = dict(config)
    if changed.get("tokenizer_class") in (None, V5_CLASS):
        changed["tokenizer_class"] = GENERAL_CLASS
    if isinstance(changed.get("extra_special_tokens"), list):  # transformers 4 has an object under this name
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return content if content is not None and changed == config else as_json(changed)


class ConvertedSentencePiece:
    """A SentencePiece model, read once as merges.

    Raises:
        UserError: it is no BPE model with byte fallback, or one without an order.
    """

    def __init__(self, original: SentencePieceTokenizer, path: Path) -> None:
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(original.model_bytes)
        _check(model, path)
        self._original, self._pieces = original, model.pieces
        self._merges = _merges(model, path)

    def files(self, max_length: int) -> dict[str, bytes]:
        """The files that the conversion makes."""
        return {
            # One line; `save` would indent the vocabulary to twice the size.
            HF_FILE: self.fast_tokenizer().to_str().encode(),
            HF_CONFIG_FILE: as_json(self._config(max_length)),
            HF_SPECIAL_FILE: as_json(self._special_names()),
        }

    def fast_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that `tokenizer.json` holds."""
        vocabulary = {_with_spaces(piece.piece): token_id for token_id, piece in enumerate(self._pieces)}
        names = self._special_names()
        fast = tokenizers.Tokenizer(
            models.BPE(vocabulary, self._merges, unk_token=names["unk_token"], fuse_unk=True, byte_fallback=True)
        )
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        special = [piece.piece for piece in self._pieces if piece.type in _SPECIAL]
        fast.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
        return fast

    def _special_names(self) -> dict[str, str]:
        unknown = next(piece.piece for piece in self._pieces if piece.type == _Piece.UNKNOWN)
        eos, pad = (self._pieces[token_id].piece for token_id in (self._original.eos_id, self._original.pad_id))
        return {"eos_token": eos, "pad_token": pad, "unk_token": unknown}

    def _config(self, max_length: int) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        return {
            "added_tokens_decoder": {
                str(token_id): {"content": piece.piece} | flags
                for token_id, piece in enumerate(self._pieces)
                if piece.type in _SPECIAL
            },
            "add_bos_token": False,  # llama.cpp adds both to a SentencePiece vocabulary unless told not to
            "add_eos_token": False,
            "bos_token": None,
            **self._special_names(),
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
            "model_max_length": max_length,
            "split_special_tokens": True,
            "tokenizer_class": GENERAL_CLASS,
        }


def _check(model: sentencepiece_model_pb2.ModelProto, path: Path) -> None:
    """What the conversion relies on beyond what `Tokenizer` has asked of the model already."""
    if model.trainer_spec.model_type != sentencepiece_model_pb2.TrainerSpec.BPE:
        kind = sentencepiece_model_pb2.TrainerSpec.ModelType.Name(model.trainer_spec.model_type)
        raise UserError(f"{path}: a {kind} model; it must be BPE, train one with tools/prepare_data.py")
    for piece in model.pieces:
        if piece.type in (_Piece.USER_DEFINED, _Piece.UNUSED):
            kind = _Piece.Type.Name(piece.type)
            raise UserError(
                f"{path}: piece {piece.piece!r} is {kind}, which does not convert to the same ids; "
                "train a tokenizer with tools/prepare_data.py"
            )


def _merges(model: sentencepiece_model_pb2.ModelProto, path: Path) -> list[tuple[str, str]]:
    """The pair that makes each piece, best score first, as texts with spaces."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _Piece.NORMAL}
    pieces = sorted((piece for piece in scores if len(piece) > 1), key=lambda piece: -scores[piece])
    merges = []
    for index, piece in enumerate(pieces):
        if index and scores[piece] == scores[pieces[index - 1]]:
            raise UserError(
                f"{path}: pieces {pieces[index - 1]!r} and {piece!r} have one score, so no order; "
                "train a tokenizer with tools/prepare_data.py"
            )
        pair = _last_merge(piece, scores)
        if pair is None:
            continue  # SentencePiece itself never arrives at this piece
        if not all(part in scores for part in pair):
            raise UserError(f"{path}: piece {piece!r} is made of {pair}, which are no pieces; it is damaged")
        merges.append((_with_spaces(pair[0]), _with_spaces(pair[1])))
    return merges


def _last_merge(piece: str, scores: dict[str, float]) -> tuple[str, str] | None:
    """Encode `piece` alone, as SentencePiece does, and stop when two symbols are left."""
    symbols = list(piece)
    while len(symbols) > 2:
        merged_scores = [scores.get(left + right, -math.inf) for left, right in itertools.pairwise(symbols)]
        best = merged_scores.index(max(merged_scores))  # the leftmost
        merged = symbols[best] + symbols[best + 1]
        if merged not in scores:
            return None
        symbols[best : best + 2] = [merged]
    return symbols[0], symbols[1]


def _with_spaces(piece: str) -> str:
    return piece.replace(SPACE_SYMBOL, " ")
