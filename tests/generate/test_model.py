"""What is read for writing text: exported directories as they are, checkpoints folded, everything else refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_HYBRID,
    SMALL_MIXTURE,
    SMALL_VHA,
    forward_spec,
    small_recipe,
    small_tokenizer,
    write_checkpoint,
)
from tests.generate.cases import UNTIED, Case, continued_alone, lively_weights
from tests.oracles import forward
from tests.sources.upstream.models import MODELS, config, weights
from tests.sources.upstream.written import merged, write_config
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.config import Recipe
from vha_paddle.counts import cache_bytes
from vha_paddle.errors import UserError
from vha_paddle.evaluate import assumptions, model_logits
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.generate.decoder import CachedDecoder
from vha_paddle.generate.model import TextModel
from vha_paddle.sampling import Sampling

PLAIN_SLIDING = {"num_hidden_layers": 4, "sliding_window": {"window": 5, "full_every": 2, "attention": SMALL_GROUPED}}
BIASED_EXPERTS = {"intermediate_size": None, "experts": SMALL_EXPERTS | {"router_bias_update_rate": 1e-3}}

FOLDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense, tied": (SMALL_VHA, {}),
    "hybrid": (SMALL_VHA, UNTIED | SMALL_HYBRID),
    "hybrid, sliding plain": (SMALL_VHA, UNTIED | PLAIN_SLIDING),
    "mixture": (SMALL_VHA, UNTIED | SMALL_MIXTURE),
    "mixture, chosen with a bias": (SMALL_VHA, UNTIED | BIASED_EXPERTS),
    "gate": (SMALL_VHA | {"output_gate": "before_postmix"}, UNTIED),
    "biases": (SMALL_VHA | {"attention_bias": True}, UNTIED),
    "no norm": (SMALL_VHA | {"qk_norm": False}, UNTIED),
}


def checkpoint_of(folder: Path, attention: dict[str, Any], model: dict[str, Any]) -> tuple[Recipe, dict, Path]:
    recipe = small_recipe(attention, **model)
    weights = lively_weights(recipe)
    return recipe, weights, write_checkpoint(folder / "checkpoint", recipe, weights, small_tokenizer())


@pytest.mark.parametrize(("attention", "keys"), FOLDED.values(), ids=FOLDED)
def test_a_checkpoint_with_virtual_heads_is_folded_in_memory(
    attention: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Token by token on the folded cache, the logits of the unfolded model; and the calculator's cache of either."""
    recipe, weights, checkpoint = checkpoint_of(tmp_path, attention, keys)
    model = TextModel.load(checkpoint)
    assert model.origin == f"vha_paddle checkpoint {checkpoint}, virtual heads folded in memory"
    tokens_BS = np.random.default_rng(0).integers(0, 330, (2, 11))
    decoder = model.decoder(4, 7)
    steps = [decoder.read(tokens_BS[:, :4])] + [decoder.read(tokens_BS[:, at : at + 1]) for at in range(4, 11)]
    if keys is not FOLDED["mixture, chosen with a bias"][1]:
        in_float64 = {name: array.astype(np.float64) for name, array in weights.items()}
        expected = forward.logits(in_float64, tokens_BS, forward_spec(recipe.model))
    else:  # which the oracle's router does not have
        expected = model_logits(checkpoint)(tokens_BS)
    assert_close(np.stack(steps, axis=1), expected[:, 3:], FLOAT32, "logits")
    assert decoder.cache_figures()["bytes"] == 2 * cache_bytes(recipe.model, 11, "float32")


def test_a_checkpoint_and_its_export_write_the_same_text(tmp_path: Path) -> None:
    _, _, checkpoint = checkpoint_of(tmp_path, SMALL_VHA, UNTIED)
    export_checkpoint(checkpoint, tmp_path / "out", "float32")
    unexported, exported = TextModel.load(checkpoint), TextModel.load(tmp_path / "out")
    assert exported.origin == f"exported model {tmp_path / 'out'}, as it is"
    assert unexported.config == exported.config
    assert (unexported.begin_id, unexported.end_ids) == (exported.begin_id, exported.end_ids)
    tokens = continued_alone(exported, Sampling())
    assert len(set(tokens)) > 2, "repeats itself: compares too little"
    assert continued_alone(unexported, Sampling()) == tokens


def test_a_grouped_checkpoint_is_taken_as_it_is(gqa: Case) -> None:
    model = TextModel.load(gqa.checkpoint)
    assert model.origin.endswith("checkpoint, as it is")
    assert model.config == gqa.recipe.model


def test_of_a_run_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_GROUPED)
    for step in (3, 7):
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        write_checkpoint(path, recipe, lively_weights(recipe), small_tokenizer())
    assert "step-00000007, as it is" in TextModel.load(tmp_path).origin


NOT_DECODED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mla": (
        {"kind": "mla", "num_attention_heads": 2, "kv_lora_rank": 6, "qk_rope_head_dim": 4},
        {},
        r"model\.attention\.kind=mla: only grouped heads",
    ),
    "mfa": (
        {"kind": "mfa", "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 6},
        {},
        r"model\.attention\.kind=mfa: only grouped heads",
    ),
    "gva": (
        {"kind": "gva", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4},
        {},
        r"model\.attention\.kind=gva: only grouped heads",
    ),
    "dcmha": (
        {"kind": "dcmha", "num_attention_heads": 2, "head_dim": 8},
        {},
        r"model\.attention\.kind=dcmha: only grouped heads",
    ),
    "SiLU in Postmix": (SMALL_VHA | {"postmix": "silu"}, {}, r"model\.attention\.postmix=silu: SiLU lies"),
    "gate after Postmix": (
        SMALL_VHA | {"output_gate": "after_postmix"},
        {},
        r"model\.attention\.output_gate=after_postmix: the gate lies",
    ),
    "SiLU in the full layers": (
        SMALL_VHA | {"premix": "silu"},
        PLAIN_SLIDING,
        r"model\.attention\.premix=silu: SiLU lies",
    ),
    "capacity": (
        SMALL_GROUPED,
        SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"capacity_factor": 1.5}},
        r"model\.experts\.capacity_factor=1\.5 counts whole sequences",
    ),
}


@pytest.mark.parametrize(("attention", "keys", "message"), NOT_DECODED.values(), ids=NOT_DECODED)
def test_what_keeps_something_else_than_keys_and_values_is_refused_with_its_key(
    attention: dict[str, Any], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, _, checkpoint = checkpoint_of(tmp_path, attention, keys)
    with pytest.raises(UserError, match=f"checkpoint: {message}") as error:
        TextModel.load(checkpoint)
    assert "\n" not in str(error.value)


def _no_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.model").unlink()
    (directory / "tokenizer.json").unlink()
    return "a directory without tokenizer.model and tokenizer.json"


def _larger_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.model").write_bytes(small_tokenizer(331))
    return "its tokenizer has 331 ids, more than the model's vocab_size=330"


def _begin_token_that_is_no_id(directory: Path) -> str:
    return _edited(directory, "config.json", "bos_token_id", "<s>")


def _end_token_beyond_the_vocabulary(directory: Path) -> str:
    return _edited(directory, "generation_config.json", "eos_token_id", 330)


def _one_end_token_of_two_below_zero(directory: Path) -> str:
    _edited(directory, "generation_config.json", "eos_token_id", [2, -1])
    return "generation_config.json: eos_token_id=-1: must be an id below vocab_size=330"


def _edited(directory: Path, file: str, key: str, value: Any) -> str:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return f"{file}: {key}={value}: must be an id"


@pytest.mark.parametrize(
    "damage",
    [
        _no_tokenizer,
        _larger_tokenizer,
        _begin_token_that_is_no_id,
        _end_token_beyond_the_vocabulary,
        _one_end_token_of_two_below_zero,
    ],
)
def test_a_directory_whose_files_do_not_fit_is_refused(damage: Any, gqa: Case, tmp_path: Path) -> None:
    directory = shutil.copytree(gqa.directory, tmp_path / "damaged")
    message = damage(directory)
    with pytest.raises(UserError, match=message):
        TextModel.load(directory)


def test_end_tokens_are_those_of_the_generation_settings_else_the_models_else_the_tokenizers(
    gqa: Case, tmp_path: Path
) -> None:
    directory = shutil.copytree(gqa.directory, tmp_path / "two")
    _edited(directory, "generation_config.json", "eos_token_id", [7, 9])
    _edited(directory, "config.json", "eos_token_id", 5)
    assert TextModel.load(directory).end_ids == {7, 9}
    (directory / "generation_config.json").unlink()
    assert TextModel.load(directory).end_ids == {5}
    _edited(directory, "config.json", "eos_token_id", None)
    assert TextModel.load(directory).end_ids == {2}


def test_a_directory_that_was_not_exported_here_is_read_too(gqa: Case, exported: TextModel, tmp_path: Path) -> None:
    directory = shutil.copytree(gqa.directory, tmp_path / "theirs")
    (directory / "fold_report.json").unlink()
    model = TextModel.load(directory)
    assert model.origin == f"Hugging Face directory {directory}, as it is"
    assert continued_alone(model, Sampling()) == continued_alone(exported, Sampling())


def test_an_empty_prompt_starts_after_the_begin_token_if_there_is_one(
    gqa: Case, exported: TextModel, tmp_path: Path
) -> None:
    config = json.loads((gqa.directory / "config.json").read_text())
    assert exported.encode("") == (config["bos_token_id"],)
    directory = shutil.copytree(gqa.directory, tmp_path / "none")
    _edited(directory, "config.json", "bos_token_id", None)
    without = TextModel.load(directory)
    assert without.encode("dog") == exported.encode("dog")
    with pytest.raises(UserError, match="the prompt is empty, and the model has no begin token"):
        without.encode("")


def test_a_prompt_that_is_no_text_is_refused(exported: TextModel) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        exported.encode("half a character: \udce2")


def test_a_checkpoint_of_another_project_is_folded_in_memory_if_its_files_say_all_of_it(tmp_path: Path) -> None:
    """One of the research fork, whose config.json says Qwen3ForCausalLM."""
    upstream = replace(MODELS["fork_no_premix"], vocab=330)
    write_config(merged(tmp_path, weights(upstream)), config(upstream))
    with pytest.raises(UserError, match="tokenizer"):
        TextModel.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(small_tokenizer())
    found = TextModel.load(tmp_path)
    assert found.config.attention.kind == "grouped" and "research fork" in found.origin
    assert "folded in memory" in found.origin
    assert any("rms_norm_eps" in line for line in assumptions(tmp_path))
    tokens = found.encode("The quick")
    logits = CachedDecoder(found.model, capacity=len(tokens)).read([list(tokens)])
    unfolded = model_logits(tmp_path)(np.array([tokens]))[:, -1]
    assert_close(np.asarray(logits), unfolded, FLOAT32, "logits")
