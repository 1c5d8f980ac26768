"""Hugging Face tokenizers: transformers' ids, text that stays text, and the files that stay together."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.hf_tokenizers import ADDED, END, ODD_TEXTS, SPECIAL_TEXTS, THINK, TURN_END, write_qwen_tokenizer
from vha_paddle.data.hf_tokenizer import HFTokenizer
from vha_paddle.data.indexed import IndexedTokens
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.sentencepiece_tokenizer import SentencePieceTokenizer
from vha_paddle.data.tokenizer import load_tokenizer, save_tokenizer
from vha_paddle.data.tokenizer_files import tokenizer_files
from vha_paddle.errors import UserError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def ours(directory: Path) -> HFTokenizer:
    return HFTokenizer.load(directory / "tokenizer.json")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_has_transformers_ids_and_text(text: str, ours: HFTokenizer, theirs: PreTrainedTokenizerBase) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_has_transformers_ids(ours: HFTokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    assert ours.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_numbers_agree_with_transformers(ours: HFTokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert ours.vocab_size == len(theirs) == 310 + len(ADDED)
    assert (ours.eos_id, ours.eos_token, ours.pad_id) == (theirs.eos_token_id, END, theirs.pad_token_id)
    assert ours.bos_id is theirs.bos_token_id is None


@pytest.mark.parametrize("text", SPECIAL_TEXTS)
def test_text_that_spells_a_special_token_is_text(text: str, ours: HFTokenizer) -> None:
    special = {ours._fast.token_to_id(token) for token, is_special in ADDED.items() if is_special}
    ids = ours.encode(text)
    assert not special & set(ids)
    assert ours.decode(ids) == text


def test_an_added_token_that_is_not_special_is_one_id(ours: HFTokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert ours.encode(THINK) == [theirs.convert_tokens_to_ids(THINK)]


def test_special_tokens_have_no_text(ours: HFTokenizer) -> None:
    assert ours.decode([*ours.encode("a b"), ours.eos_id]) == "a b"


def test_template_truncation_and_padding_of_the_file_are_not_obeyed(directory: Path, tmp_path: Path) -> None:
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog"
    expected = fast.encode(text).ids
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, fast.token_to_id(END))]
    )
    fast.enable_truncation(4)
    fast.enable_padding(length=100)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert HFTokenizer.load(tmp_path / "tokenizer.json").encode(text) == expected


def test_vocab_size_counts_gaps(directory: Path, tmp_path: Path) -> None:
    """A model needs a row for the largest id, however many ids are unused."""
    values = json.loads((directory / "tokenizer.json").read_text())
    values["model"]["vocab"]["Ġunused"] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "Ġunused"}}))
    assert load_tokenizer(tmp_path).vocab_size == 401


def test_what_is_loaded_is_chosen_by_the_path(
    directory: Path, tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    assert load_tokenizer(directory).digest == load_tokenizer(directory / "tokenizer.json").digest == digest
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    save_tokenizer(tokenizer, tmp_path)  # as in an export, where tokenizer.json was made from the model
    assert load_tokenizer(tmp_path).digest == load_tokenizer(tmp_path / "tokenizer.model").digest == tokenizer.digest
    assert load_tokenizer(tmp_path / "tokenizer.json").digest == digest


def test_the_files_stay_together_byte_for_byte(directory: Path, ours: HFTokenizer, tmp_path: Path) -> None:
    save_tokenizer(ours, tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {path.name for path in tokenizer_files(directory)} == set(written)


def test_another_end_token_is_the_copys_eos_token(directory: Path, ours: HFTokenizer, tmp_path: Path) -> None:
    chat = load_tokenizer(directory, TURN_END)
    assert chat.eos_token == TURN_END and chat.eos_id != ours.eos_id
    assert chat.digest == ours.digest  # the same ids mean the same text
    save_tokenizer(chat, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == chat.eos_id == load_tokenizer(tmp_path).eos_id


def test_a_special_tokens_map_is_read_and_changed_too(directory: Path, tmp_path: Path) -> None:
    write_qwen_tokenizer(tmp_path, eos_token=None, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert load_tokenizer(tmp_path).eos_token == END
    assert load_tokenizer(tmp_path).pad_id == load_tokenizer(tmp_path).eos_id
    save_tokenizer(load_tokenizer(tmp_path, TURN_END), tmp_path)
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["eos_token"] == TURN_END


def _text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def _config(**values: object) -> Callable[[Path], None]:
    return lambda folder: write_qwen_tokenizer(folder, **values) and None


def _renumber(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"] = [token | {"id": token["id"] + 500} for token in values["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_text("tokenizer.json", "{}"), "tokenizer.json must give every token, and every one"),
        (_text("tokenizer.json", "no json"), "tokenizer.json does not hold a JSON object"),
        (_text("tokenizer_config.json", "[]"), "tokenizer_config.json does not hold a JSON object"),
        (_text("tokenizer_config.json", "{}"), "names an eos_token"),
        (_config(eos_token="<|gone|>"), "eos_token='<|gone|>' is no token of tokenizer.json"),
        (_config(eos_token=THINK), "eos_token='<think>' is not a special token: text that spells it would end"),
        (_config(auto_map={"AutoTokenizer": ["x.Y", None]}), "names code, and none is executed"),
        (
            _config(added_tokens_decoder={"9": {"content": END}}),
            "tokenizer_config.json has added token '<|endoftext|>' as 9",
        ),
        (
            _config(added_tokens_decoder={"999": {"content": "<new>"}}),
            f"added token '<new>' as 999, tokenizers {tokenizers.__version__} makes it None",
        ),
        (_renumber, f"added token '<|endoftext|>' as 810, tokenizers {tokenizers.__version__} makes it 310"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "a directory without tokenizer.model and tokenizer.json"),
    ],
)
def test_a_directory_that_is_no_tokenizer_is_a_user_error(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_qwen_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"tokenizer {tmp_path}") and "\n" not in str(error.value)


def test_a_companion_is_no_tokenizer(directory: Path) -> None:
    with pytest.raises(UserError, match="vocab.json: give a tokenizer.model, a tokenizer.json or the directory"):
        load_tokenizer(directory / "vocab.json")


def test_a_sentencepiece_model_keeps_its_end_token(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path, "</s>").eos_id == tokenizer.eos_id
    with pytest.raises(UserError, match="its end token is </s>, fixed when it was trained"):
        load_tokenizer(tmp_path, END)


def _plan(tmp_path: Path, directory: Path | None, eod_token: str | None) -> Plan:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*ODD_TEXTS[2:], *SPECIAL_TEXTS)), "utf-8")
    size = None if directory else 350
    return Plan(tmp_path / "out", (path,), directory, size, 0.0, overwrite=False, eod_token=eod_token)


@pytest.mark.parametrize("eod_token", [None, TURN_END])
def test_data_end_each_document_with_the_end_token(directory: Path, tmp_path: Path, eod_token: str | None) -> None:
    summary = prepare(_plan(tmp_path, directory, eod_token))
    copy = load_tokenizer(tmp_path / "out")
    indexed = IndexedTokens(tmp_path / "out" / "train", vocab_size=copy.vocab_size, tokenizer_sha256=copy.digest)
    assert indexed.manifest is not None and indexed.manifest.eod_id == copy.eos_id
    assert summary["tokenizer"]["eod_token"] == copy.eos_token == (eod_token or END)
    documents: list[list[int]] = [[]]
    for token in indexed.tokens.tolist():
        documents.append([]) if token == copy.eos_id else documents[-1].append(token)
    theirs = AutoTokenizer.from_pretrained(directory)
    texts = (*ODD_TEXTS[2:], *SPECIAL_TEXTS)
    assert documents[:-1] == [theirs(text, split_special_tokens=True)["input_ids"] for text in texts]
    assert documents[-1] == []


def test_an_end_token_for_a_tokenizer_to_train_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eod_token 'x' has no effect on a tokenizer that is trained"):
        prepare(_plan(tmp_path, None, "x"))
