"""The fast tokenizer gives SentencePiece's ids on any text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.checkpoints import Exported, small_tokenizer
from tests.export.stock_directories import silently
from vha_paddle.data.corpus import builtin_documents
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from vha_paddle.errors import UserError
from vha_paddle.export.tokenizer import ConvertedSentencePiece, TokenizerExport

AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "\n\n\tdef f(x):\r\n        return  x\n",
    "1234567890 3.14",
    "one , two . did n't it 's ?",
    "</s><pad> <s><unk>",
    "<0x0A> <0xE2>",
    "▁a ▁▁ b▁",
    "naïve ﬁ e\u0301 日本語 \U0001d11e 👩‍💻",
    "\0\x7f\u00a0\u2028\ufeff\uffff",
    "a" * 300,
    " " * 37 + "x",
]


class Pair:
    """SentencePiece and its conversion."""

    def __init__(self, path: Path) -> None:
        self.original = SentencePieceTokenizer.load(path)
        fast = ConvertedSentencePiece(self.original, path).fast_tokenizer()
        self.fast = tokenizers.Tokenizer.from_str(fast.to_str())  # as read from tokenizer.json
        self.fast.encode_special_tokens = True  # what split_special_tokens does in transformers

    def check(self, text: str) -> None:
        ids = self.fast.encode(text, add_special_tokens=False).ids
        assert ids == self.original.encode(text), repr(text)
        assert self.fast.decode(ids, skip_special_tokens=False) == text


def train(documents: list[str], vocab_size: int, path: Path) -> Path:
    train_sentencepiece(documents, vocab_size, path)
    return path


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(builtin_documents())


@pytest.fixture(scope="module")
def pair(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tokenizer as the quickstart makes it."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return Pair(train(documents, 4096, path))


def test_ids_are_equal_on_a_whole_corpus(pair: Pair, documents: list[str]) -> None:
    assert sum(map(len, documents)) > 1_000_000
    for text in documents:
        pair.check(text)


def test_ids_are_equal_on_source_code(pair: Pair) -> None:
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:100]
    for file in files:
        pair.check(file.read_text(encoding="utf-8", errors="replace"))
    assert len(files) == 100


@pytest.mark.parametrize("text", AWKWARD)
def test_ids_are_equal_on_awkward_text(pair: Pair, text: str) -> None:
    pair.check(text)


@settings(max_examples=600, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_ids_are_equal_on_any_unicode(pair: Pair, text: str) -> None:
    pair.check(text)


@settings(max_examples=600, deadline=None)
@given(st.text(st.sampled_from("aeot  \n\t.:=_<>/s▁"), max_size=120))
def test_ids_are_equal_where_many_merges_compete(pair: Pair, text: str) -> None:
    pair.check(text)


@pytest.mark.parametrize("alphabet", ["ab ", "a \n", "aé ", "abc ", "x \t"])
def test_ids_are_equal_for_pieces_that_overlap_themselves(alphabet: str, tmp_path: Path) -> None:
    """Small alphabets make pieces such as `abab`, whose splits would compete if more than one could arise."""
    chooser = random.Random(alphabet)
    words = ["".join(chooser.choices(alphabet, k=chooser.randint(1, 5))) for _ in range(8)]

    def text(length: int) -> str:
        return "".join(chooser.choice((*words, *alphabet)) for _ in range(length))

    overlapping = Pair(train([text(400) + " " for _ in range(40)], 280, tmp_path / "tokenizer.model"))
    for _ in range(1000):
        overlapping.check(text(chooser.randint(0, 40)))


def test_each_piece_has_one_merge_in_order_of_its_score(pair: Pair) -> None:
    model = json.loads(pair.fast.to_str())["model"]
    made = [left + right for left, right in model["merges"]]
    assert made == sorted(set(made), key=lambda piece: model["vocab"][piece])
    assert set(made) == {
        piece for piece, i in model["vocab"].items() if i >= 260 and len(piece) > 1
    }  # SentencePiece numbers trained pieces by falling score


def test_every_piece_encodes_to_itself_or_as_sentencepiece_does(pair: Pair) -> None:
    for piece in json.loads(pair.fast.to_str())["model"]["vocab"]:
        pair.check(piece)


def test_transformers_loads_the_directory_silently_and_agrees(exported: Exported) -> None:
    with silently():
        theirs = AutoTokenizer.from_pretrained(exported.directory)
    ours = SentencePieceTokenizer.load(exported.checkpoint / "tokenizer.model")
    for text in AWKWARD:
        encoded = theirs(text)
        assert encoded["input_ids"] == ours.encode(text)
        assert set(encoded) == {"input_ids", "attention_mask"}
        assert theirs.decode(encoded["input_ids"]) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (ours.eos_id, ours.pad_id, 0)
    assert theirs.bos_token is None and len(theirs) == ours.vocab_size
    assert theirs.model_max_length == exported.recipe.model.max_position_embeddings
    assert theirs.decode([ours.eos_id, ours.pad_id], skip_special_tokens=True) == ""


def test_the_sentencepiece_model_is_kept_byte_for_byte(exported: Exported) -> None:
    assert (exported.directory / "tokenizer.model").read_bytes() == small_tokenizer()
    converted = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    assert all((exported.directory / name).is_file() for name in converted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram"}, "a UNIGRAM model; it must be BPE"),
        ({"model_type": "bpe", "user_defined_symbols": ["fox"]}, "piece 'fox' is USER_DEFINED"),
    ],
)
def test_a_model_that_does_not_convert_exactly_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with open(tmp_path / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([f"the fox  {number}\n" for number in range(50)]),
            model_writer=file,
            vocab_size=280,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            hard_vocab_limit=False,
            pad_id=3,
            minloglevel=2,
            **options,
        )
    with pytest.raises(UserError, match=message):
        TokenizerExport(tmp_path / "tokenizer.model")


def edited(path: Path, edit: Callable[[sentencepiece.sentencepiece_model_pb2.ModelProto], None]) -> Path:
    model = sentencepiece.sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(small_tokenizer())
    edit(model)
    path.write_bytes(model.SerializeToString())
    return path


def test_pieces_of_one_score_are_refused(tmp_path: Path) -> None:
    def edit(model: sentencepiece.sentencepiece_model_pb2.ModelProto) -> None:
        first, second = [piece for piece in model.pieces if piece.type == 1 and len(piece.piece) > 1][:2]
        second.score = first.score

    with pytest.raises(UserError, match="have one score, so no order"):
        TokenizerExport(edited(tmp_path / "tokenizer.model", edit))


def test_a_piece_without_its_parts_is_refused(tmp_path: Path) -> None:
    def edit(model: sentencepiece.sentencepiece_model_pb2.ModelProto) -> None:
        next(piece for piece in model.pieces if piece.type == 1 and len(piece.piece) == 2).piece = "qж"

    with pytest.raises(UserError, match="which are no pieces"):
        TokenizerExport(edited(tmp_path / "tokenizer.model", edit))


def test_a_piece_that_sentencepiece_never_makes_has_no_merge(tmp_path: Path) -> None:
    def edit(model: sentencepiece.sentencepiece_model_pb2.ModelProto) -> None:
        next(piece for piece in model.pieces if piece.type == 1 and len(piece.piece) == 2).piece = "xqxzx"

    unreachable = Pair(edited(tmp_path / "tokenizer.model", edit))
    unreachable.check("xqxzx the fox")
    merges = json.loads(unreachable.fast.to_str())["model"]["merges"]
    assert "xqxzx" not in {left + right for left, right in merges}
