"""A SentencePiece tokenizer: train it, load it, text to ids and back without losing a character.

Every option is chosen so that the model file converts exactly to a Hugging Face fast tokenizer and to
llama.cpp:

* BPE with byte fallback. Every piece has a score of its own, minus its rank: the order of a merge list.
* No normalisation, no dummy prefix, no removed white space. The only change to the text is that a piece
  spells the space "▁" (U+2581), so that a fast tokenizer needs no pre-tokenizer and llama.cpp no space
  prefix.
* Ids 0 <unk>, 1 <s>, 2 </s>, 3 <pad>, then the 256 bytes, then the pieces. No text encodes to the first four.
* White space alone may be a piece, so that indentation costs one id a run and not one a space; a digit is
  always one id.

A literal "▁" in the text is encoded as its three bytes and so comes back as itself. A converted tokenizer
agrees if its vocabulary has the space in place of "▁"; one that replaces spaces by "▁" first, as llama.cpp
does, reads that one character as a space.
"""

from __future__ import annotations

import hashlib
import heapq
import io
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from vha_paddle.data.tokenizer_files import SENTENCEPIECE_FILE
from vha_paddle.data.word_cache import SENTENCEPIECE_WORDS, WordCache, sentencepiece_goes_by_words
from vha_paddle.errors import UserError
from vha_paddle.files import atomic_write

UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3
NUM_RESERVED = 4 + 256  # the special ids and the bytes: a vocabulary must be larger
SPACE_SYMBOL = "▁"

# Text that a tokenizer with a normaliser, a dummy prefix or no byte fallback does not give back.
_PROBE = f"  aA\t\n {SPACE_SYMBOL} \r\n \ufb01\u00a0\u00e9\U0001d11e "
_LONGEST_DOCUMENT = 1 << 20  # characters given to the trainer at once; longer documents are cut


class SentencePieceTokenizer:
    """One SentencePiece model: `decode(encode(text)) == text` for every text.

    Attributes:
        vocab_size: number of ids.
        bos_id, eos_id, pad_id: ids of the special tokens. `eos_id` also ends a document in the training data.
        eos_token: how the model file spells the end token.
        digest: sha256 of the model file, hexadecimal. Data and checkpoints carry it.
        model_bytes: the model file.
    """

    def __init__(self, model_bytes: bytes, name: str = "tokenizer") -> None:
        """Take the content of a `tokenizer.model`; `name` is for error messages.

        Raises:
            UserError: it is no SentencePiece model, or one that would lose characters or lacks a special
            token.
        """
        self.model_bytes = model_bytes
        self.digest = hashlib.sha256(model_bytes).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_bytes)
        except (RuntimeError, UnicodeDecodeError):  # the latter where the reason quotes a piece that is no UTF-8
            raise UserError(f"{name} is no SentencePiece model; tools/prepare_data.py trains one") from None
        model = sentencepiece_model_pb2.ModelProto.FromString(model_bytes)
        if not all(isinstance(piece.piece, str) for piece in model.pieces):  # bytes, where they are no UTF-8
            raise UserError(f"{name} is damaged: a piece is not UTF-8; copy it again")
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        for role, token_id in (("bos", self.bos_id), ("eos", self.eos_id), ("pad", self.pad_id)):
            if token_id < 0:
                raise UserError(f"{name} has no {role} token; train it with {role}_id >= 0")
        self.eos_token: str = self._processor.id_to_piece(self.eos_id)
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_SYMBOL.encode()]
        self._space_symbol_ids = [self._processor.piece_to_id(piece) for piece in pieces]
        if not all(map(self._processor.is_byte, self._space_symbol_ids)) or self.decode(self.encode(_PROBE)) != _PROBE:
            raise UserError(
                f"{name} changes text (white space, case or rare characters); train it with byte_fallback, "
                "the identity normalisation, no dummy prefix and remove_extra_whitespaces=false"
            )

    @classmethod
    def load(cls, path: Path) -> SentencePieceTokenizer:
        """Read a `tokenizer.model`.

        Raises:
            UserError: the file cannot be read, or it is not a model this class accepts.
        """
        try:
            model_bytes = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"tokenizer {path} cannot be read: {error.strerror}; "
                "name a tokenizer.model, a tokenizer.json or a folder with one"
            ) from None
        return cls(model_bytes, name=f"tokenizer {path}")

    @property
    def files(self) -> dict[str, bytes]:
        """The model file, byte for byte what was loaded."""
        return {SENTENCEPIECE_FILE: self.model_bytes}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin or end token."""
        return self._encode(text, self._processor.encode)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them; in a third of the time if the vocabulary allows to go by words."""
        return [self._encode(text, self._encode_words) for text in texts]

    def _encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        if SPACE_SYMBOL not in text:
            return encode(text)
        first, *rest = text.split(SPACE_SYMBOL)
        ids = encode(first)
        for part in rest:
            ids += self._space_symbol_ids
            ids += encode(part)
        return ids

    @cached_property
    def _encode_words(self) -> Callable[[str], list[int]]:
        """The processor behind a memory for words, where that makes no difference."""
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(self.model_bytes)
        is_bpe = model.trainer_spec.model_type == sentencepiece_model_pb2.TrainerSpec.BPE
        if is_bpe and sentencepiece_goes_by_words((piece.piece for piece in model.pieces), SPACE_SYMBOL):
            return WordCache(self._processor.encode, SENTENCEPIECE_WORDS).encode
        encode: Callable[[str], list[int]] = self._processor.encode
        return encode

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens give nothing; bytes that form no UTF-8 character give U+FFFD."""
        return self._processor.decode([int(token_id) for token_id in ids])


def train_sentencepiece(
    documents: Iterable[str],
    vocab_size: int,
    out_path: Path,
    *,
    seed: int = 0,
    maximum_characters: int = 200_000_000,
) -> SentencePieceTokenizer:
    """Train a tokenizer with the options at the top of this file and write its model to `out_path`.

    The same documents give the same bytes. Training holds its text in memory several times over, so of a
    corpus beyond `maximum_characters` only a sample of whole documents is used; `seed` chooses it and does
    nothing else.

    Raises:
        UserError: the vocabulary is too small for the reserved ids, or too large for the text.
    """
    if vocab_size <= NUM_RESERVED:
        raise UserError(f"vocab_size {vocab_size} must be above {NUM_RESERVED} (special tokens and bytes)")
    # The trainer refuses a corpus with a null character; encoding one is fine.
    sample = _sample((document for document in documents if "\0" not in document), maximum_characters, seed)
    if not any(document.strip() for document in sample):
        raise UserError("no tokenizer can be trained: the documents hold no text; give some")
    chunks = (
        document[start : start + _LONGEST_DOCUMENT]
        for document in sample
        for start in range(0, len(document), _LONGEST_DOCUMENT)
    )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chunks,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _LONGEST_DOCUMENT,  # bytes; a longer sentence would be skipped silently
            num_threads=1,
            minloglevel=2,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
        )
    except RuntimeError as error:
        reason = str(error).split("] ")[-1].strip() or str(error).strip()
        reason = reason.replace(" or decrease character_coverage with --character_coverage option", "")
        raise UserError(f"no tokenizer of {vocab_size} ids can be trained on this text: {reason}") from None
    tokenizer = SentencePieceTokenizer(model.getvalue())
    with atomic_write(out_path) as file:
        file.write(tokenizer.model_bytes)
    return tokenizer


def _sample(documents: Iterable[str], maximum_characters: int, seed: int) -> list[str]:
    """All documents, or those of lowest keyed hash that fit in `maximum_characters`; in their given order."""
    key = str(seed).encode()
    kept: list[tuple[int, int, str]] = []  # a heap: minus the hash, so that the highest hash leaves first
    characters = 0
    for index, document in enumerate(documents):
        digest = hashlib.blake2b(document.encode(), digest_size=8, key=key).digest()
        heapq.heappush(kept, (-int.from_bytes(digest, "little"), index, document))
        characters += len(document)
        while characters > maximum_characters and len(kept) > 1:
            characters -= len(heapq.heappop(kept)[2])
    return [document for _, _, document in sorted(kept, key=lambda entry: entry[1])]
