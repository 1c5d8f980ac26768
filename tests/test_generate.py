"""Decoding with a cache against the whole forward pass, and against transformers on the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    forward_spec,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.oracles import forward
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.config import Recipe
from vha_paddle.data.tokenizer import Tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.generate import CachedDecoder, ExportedModel, TextStream, generate
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sampling import Sampling

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The lazy dog"
NUM_NEW = 24
NO_END = -1  # an id that never comes
GATED = SMALL_GROUPED | {"output_gate": True}
OTHER_HEADS = {"kind": "grouped", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6}


@dataclass(frozen=True)
class Case:
    """A grouped model and its exported directory."""

    recipe: Recipe
    weights: dict[str, np.ndarray]
    directory: Path


def export_grouped(folder: Path, num_kv_heads: int, **model: Any) -> Case:
    recipe = small_recipe(SMALL_GROUPED | {"num_key_value_heads": num_kv_heads}, **model)
    weights = trained_weights(recipe, seed=1)
    # At full size a tied embedding outweighs the layers, and the likeliest token is the last one again.
    weights["model.embed_tokens.weight"] *= np.float32(0.2)
    checkpoint = write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer())
    export_checkpoint(checkpoint, folder / "out", "float32", plain=True)
    return Case(recipe, weights, folder / "out")


UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "MHA": (6, UNTIED),
    "GQA, tied": (2, {}),
    "MQA": (1, UNTIED),
    "hybrid": (2, UNTIED | SMALL_HYBRID),
    "mixture": (2, UNTIED | SMALL_MIXTURE),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    num_kv_heads, model = request.param
    return export_grouped(tmp_path_factory.mktemp("grouped"), num_kv_heads, **model)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return export_grouped(tmp_path_factory.mktemp("gqa"), 2, **UNTIED)


@pytest.fixture(scope="module")
def exported(gqa: Case) -> ExportedModel:
    return ExportedModel.load(gqa.directory)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(small_tokenizer())


def continued(model: ExportedModel, sampling: Sampling, num_new: int = NUM_NEW, end_id: int = NO_END) -> list[int]:
    prompt = model.encode(PROMPT)
    return list(generate(model.decoder(len(prompt), num_new), prompt, num_new, sampling, end_id))


def text_of(model: ExportedModel, tokens: list[int]) -> str:
    """Ids that the tokenizer does not know have no text."""
    return model.tokenizer.decode([token for token in tokens if token < model.tokenizer.vocab_size])


def logits_by_steps(path: Path, tokens_BS: np.ndarray, num_prompt: int) -> np.ndarray:
    """Logits from the prompt's last position on, read one token at a time after the prompt."""
    batch, length = tokens_BS.shape
    decoder = CachedDecoder(load_model(path), batch, capacity=length)
    steps = [decoder.read(tokens_BS[:, :num_prompt])]
    steps += [decoder.read(tokens_BS[:, at : at + 1]) for at in range(num_prompt, length)]
    return np.stack(steps, axis=1)


def random_tokens(case: Case, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, case.recipe.model.vocab_size, (batch, length))


# Of the hybrid, less than the window, all of it, one more, and more than twice as much.
@pytest.mark.parametrize("num_prompt", [1, 5, 6, 13])
def test_cached_logits_of_every_step_equal_the_full_forward(case: Case, num_prompt: int) -> None:
    tokens_BS = random_tokens(case, batch=2, length=17)
    full_BSV = load_model(case.directory)(paddle.to_tensor(tokens_BS)).numpy()
    steps_BSV = logits_by_steps(case.directory, tokens_BS, num_prompt)
    for step in range(steps_BSV.shape[1]):
        assert_close(steps_BSV[:, step], full_BSV[:, num_prompt - 1 + step], FLOAT32, f"step {step}")


def test_cached_logits_equal_the_oracle(case: Case) -> None:
    tokens_BS = random_tokens(case, batch=2, length=9)
    weights = {name: array.astype(np.float64) for name, array in case.weights.items()}
    expected = forward.logits(weights, tokens_BS, forward_spec(case.recipe.model))
    assert_close(logits_by_steps(case.directory, tokens_BS, 4), expected[:, 3:], FLOAT32, "logits")


@pytest.mark.parametrize(
    ("attention", "model"),
    [
        (GATED, {}),
        (GATED, SMALL_HYBRID | {"sliding_window": {"window": 3, "full_every": 4, "attention": OTHER_HEADS}}),
    ],
    ids=["gate", "gate, other heads in sliding layers"],
)
def test_what_has_no_stock_class_is_decoded_from_its_checkpoint(
    attention: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe(attention, **model)
    weights = trained_weights(recipe, seed=1)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    tokens_BS = np.random.default_rng(0).integers(0, 330, (2, 9))
    in_float64 = {name: array.astype(np.float64) for name, array in weights.items()}
    expected = forward.logits(in_float64, tokens_BS, forward_spec(recipe.model))
    assert_close(logits_by_steps(checkpoint, tokens_BS, 4), expected[:, 3:], FLOAT32, "logits")


def test_greedy_tokens_equal_those_of_transformers(case: Case) -> None:
    model = ExportedModel.load(case.directory)
    ours = continued(model, Sampling(), end_id=model.end_id)
    hf = AutoModelForCausalLM.from_pretrained(case.directory)
    prompt = torch.tensor([model.encode(PROMPT)])
    theirs = hf.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)[0, prompt.shape[1] :].tolist()
    assert len(set(ours)) > 2, "repeats itself: compares too little"
    assert ours == theirs


def test_the_cache_holds_the_kv_heads_and_the_window_and_no_more(case: Case) -> None:
    model = case.recipe.model
    decoder = CachedDecoder(load_model(case.directory), batch=3, capacity=11)
    bytes_per_token = 2 * model.attention.num_key_value_heads * model.attention.head_dim * 4
    form = {"num_key_value_heads": model.attention.num_key_value_heads, "bytes_per_token": bytes_per_token}
    if model.sliding_window is None:
        layers, positions = [{"count": 2, "positions": 11, **form}], 2 * 11
    else:
        layers = [{"count": 2, "positions": 5, **form}, {"count": 2, "positions": 11, **form}]
        positions = 2 * 5 + 2 * 11
    assert decoder.cache_figures() == {
        "dtype": "float32",
        "bytes": 3 * positions * bytes_per_token,
        "layers": layers,
    }


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(exported: ExportedModel) -> None:
    first, again, other = (continued(exported, Sampling(temperature=1.0, seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_top_k_of_1_is_greedy_at_any_temperature(exported: ExportedModel) -> None:
    assert continued(exported, Sampling(temperature=9.0, top_k=1)) == continued(exported, Sampling())


def test_nothing_follows_the_end_token(exported: ExportedModel) -> None:
    tokens = continued(exported, Sampling(temperature=1.0))
    end_id = tokens[NUM_NEW // 2]
    stopped = continued(exported, Sampling(temperature=1.0), end_id=end_id)
    assert stopped == tokens[: tokens.index(end_id) + 1]


def test_an_empty_prompt_starts_after_the_begin_token_of_the_configuration(gqa: Case, exported: ExportedModel) -> None:
    config = json.loads((gqa.directory / "config.json").read_text())
    assert exported.encode("") == [config["bos_token_id"]]


def test_a_text_up_to_the_last_position_is_written_and_one_token_more_refused(
    exported: ExportedModel,
) -> None:
    prompt = exported.encode(PROMPT)
    room = exported.max_positions - len(prompt)
    assert len(continued(exported, Sampling(), num_new=room)) == room
    with pytest.raises(UserError, match=f"max_new_tokens={room + 1} .*max_position_embeddings=64"):
        exported.decoder(len(prompt), room + 1)


def test_no_new_tokens_are_refused(exported: ExportedModel) -> None:
    with pytest.raises(UserError, match="max_new_tokens=0: must be at least 1"):
        exported.decoder(3, 0)


def test_a_prompt_that_is_no_text_is_refused(exported: ExportedModel) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        exported.encode("half a character: \udce2")


def test_a_model_with_virtual_heads_is_sent_to_the_export(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA)
    path = write_checkpoint(tmp_path / "vha", recipe, trained_weights(recipe), small_tokenizer())
    with pytest.raises(UserError, match="export .*tools/fold_export.py"):
        CachedDecoder(load_model(path), batch=1, capacity=8)
    with pytest.raises(UserError, match="export .*tools/fold_export.py"):
        ExportedModel.load(path)


@pytest.mark.parametrize(
    ("attention", "model", "message"),
    [
        (
            {"kind": "mfa", "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 6},
            {},
            "only attention of kind grouped",
        ),
        (
            SMALL_GROUPED,
            SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"capacity_factor": 1.5}},
            "counts whole sequences",
        ),
    ],
    ids=["another kind", "capacity"],
)
def test_what_cannot_be_decoded_is_refused(attention: dict[str, Any], model: dict[str, Any], message: str) -> None:
    decoder = build_decoder(small_recipe(attention, **model).model, Mesh(), seed=0)
    with pytest.raises(UserError, match=message):
        CachedDecoder(decoder, batch=1, capacity=8)


def _no_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.model").unlink()
    return "tokenizer .*tokenizer.model cannot be read"


def _larger_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.model").write_bytes(small_tokenizer(331))
    return "tokenizer.model: 331 ids, more than the model's vocab_size=330"


def _no_begin_token(directory: Path) -> str:
    return _edit_config(directory, "bos_token_id", None)


def _end_token_beyond_the_vocabulary(directory: Path) -> str:
    return _edit_config(directory, "eos_token_id", 330)


def _edit_config(directory: Path, key: str, value: Any) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return f"config.json: {key}={value}: must be an id"


@pytest.mark.parametrize(
    "damage", [_no_tokenizer, _larger_tokenizer, _no_begin_token, _end_token_beyond_the_vocabulary]
)
def test_a_directory_whose_files_do_not_fit_is_refused(damage: Any, gqa: Case, tmp_path: Path) -> None:
    directory = shutil.copytree(gqa.directory, tmp_path / "damaged")
    message = damage(directory)
    with pytest.raises(UserError, match=message):
        ExportedModel.load(directory)


def test_text_comes_in_whole_characters(tokenizer: Tokenizer) -> None:
    text = "dog ▁ é 漢字 😀😀 fox\n\ufffd!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "no character is spelled in bytes"
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if "\ufffd" in piece] == ["\ufffd!"]


def test_streamed_text_of_any_tokens_is_their_decoded_text(tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(0)
    bytes_only = [tokenizer.encode(chr(0x1F600 + i))[j] for i in range(40) for j in range(4)]
    for _ in range(300):
        ids = np.where(generator.random(12) < 0.8, generator.choice(bytes_only, 12), generator.integers(1, 320, 12))
        stream = TextStream(tokenizer)
        pieces = [stream.push(int(token)) for token in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    (first, *rest) = tokenizer.encode("é")
    assert stream.push(first) + stream.push(tokenizer.vocab_size) + "".join(map(stream.push, rest)) == "é"


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_the_tool_writes_the_prompt_and_what_follows(gqa: Case, exported: ExportedModel) -> None:
    result = run_tool(str(gqa.directory), "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "24")
    assert result.returncode == 0, result.stderr
    tokens = continued(exported, Sampling(), end_id=exported.end_id)
    assert result.stdout == PROMPT + text_of(exported, tokens) + "\n"


def test_the_tool_reports_json_with_the_bytes_of_the_cache(gqa: Case, exported: ExportedModel, tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.7, top_k=50, top_p=0.9, seed=4)
    end_id = continued(exported, sampling)[NUM_NEW // 2]
    tokens = continued(exported, sampling, end_id=end_id)
    directory = shutil.copytree(gqa.directory, tmp_path / "ends")
    _edit_config(directory, "eos_token_id", end_id)
    options = ["--temperature", "0.7", "--top-k", "50", "--top-p", "0.9", "--seed", "4"]
    result = run_tool(str(directory), "--prompt", PROMPT, "--max-new-tokens", str(NUM_NEW), *options, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "prompt": PROMPT,
        "prompt_tokens": exported.encode(PROMPT),
        "text": text_of(exported, tokens),
        "tokens": tokens,
        "stopped": "end",
        "sampling": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 4},
        "kv_cache": exported.decoder(len(exported.encode(PROMPT)), NUM_NEW).cache_figures(),
    }


def test_the_tool_writes_no_more_than_the_models_positions_allow(gqa: Case, exported: ExportedModel) -> None:
    room = exported.max_positions - len(exported.encode(PROMPT))
    assert room < 100  # what is written by default where there is room
    arguments = [str(gqa.directory), "--prompt", PROMPT, "--temperature", "0"]
    result = run_tool(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["tokens"]) == room or found["stopped"] == "end"
    cache = exported.decoder(len(exported.encode(PROMPT)), room).cache_figures()
    assert found["kv_cache"] == cache
    too_many = run_tool(*arguments, "--max-new-tokens", "100")
    assert too_many.returncode == 2 and "max_new_tokens=100 after a prompt of" in too_many.stderr
    full = run_tool(str(gqa.directory), "--prompt", PROMPT * 20)
    assert full.returncode == 2 and "at most max_position_embeddings=64 are possible" in full.stderr


def test_the_tool_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path)], [str(tmp_path), "--temperature", "-1"]):
        result = run_tool(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in result.stderr
