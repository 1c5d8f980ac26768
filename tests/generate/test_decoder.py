"""Decoding with a cache against the whole forward pass, and against transformers on the same files."""

from __future__ import annotations

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
from tests.generate.cases import NUM_NEW, PROMPT, Case, continued_alone
from tests.oracles import forward
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.counts import cache_bytes
from vha_paddle.evaluate import load_model
from vha_paddle.generate.decoder import CachedDecoder
from vha_paddle.generate.model import TextModel
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sampling import Sampling

GATED = SMALL_GROUPED | {"output_gate": True}
OTHER_HEADS = {"kind": "grouped", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6}


def logits_by_steps(path: Path, tokens_BS: np.ndarray, num_prompt: int) -> np.ndarray:
    """Logits from the prompt's last position on, read one token at a time after the prompt."""
    decoder = CachedDecoder(load_model(path), capacity=tokens_BS.shape[1])
    steps = [decoder.read(tokens_BS[:, :num_prompt])]
    steps += [decoder.read(tokens_BS[:, at : at + 1]) for at in range(num_prompt, tokens_BS.shape[1])]
    return np.stack(steps, axis=1)


def random_tokens(batch: int, length: int, vocab_size: int = 330) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (batch, length))


# Of the hybrid, less than the window, all of it, one more, and more than twice as much.
@pytest.mark.parametrize("num_prompt", [1, 5, 6, 13])
def test_cached_logits_of_every_step_equal_the_full_forward(case: Case, num_prompt: int) -> None:
    tokens_BS = random_tokens(batch=2, length=17)
    full_BSV = load_model(case.directory)(paddle.to_tensor(tokens_BS)).numpy()
    steps_BSV = logits_by_steps(case.directory, tokens_BS, num_prompt)
    for step in range(steps_BSV.shape[1]):
        assert_close(steps_BSV[:, step], full_BSV[:, num_prompt - 1 + step], FLOAT32, f"step {step}")


def test_cached_logits_equal_the_oracle(case: Case) -> None:
    tokens_BS = random_tokens(batch=2, length=9)
    weights = {name: array.astype(np.float64) for name, array in case.weights.items()}
    expected = forward.logits(weights, tokens_BS, forward_spec(case.recipe.model))
    assert_close(logits_by_steps(case.directory, tokens_BS, 4), expected[:, 3:], FLOAT32, "logits")


def test_every_text_of_a_batch_has_a_length_and_a_position_of_its_own(case: Case) -> None:
    """Prompts shorter and longer than the hybrid's window of 5, texts that leave, come twice and change places."""
    lengths = [3, 11, 1, 6]
    tokens_BS = random_tokens(batch=4, length=17)
    full_BSV = load_model(case.directory)(paddle.to_tensor(tokens_BS)).numpy()
    decoder = CachedDecoder(load_model(case.directory), capacity=17)
    logits_BV = decoder.read([tokens_BS[text, :length] for text, length in enumerate(lengths)])
    texts = list(range(4))
    for step in range(6):
        for row, text in enumerate(texts):
            at = lengths[text] + step - 1
            assert_close(logits_BV[row], full_BSV[text, at], FLOAT32, f"step {step} of text {text}")
        if step in (2, 4):
            chosen = [3, 1, 0, 1] if step == 2 else [1, 2]
            decoder.select(chosen)
            texts = [texts[row] for row in chosen]
        logits_BV = decoder.read([[tokens_BS[text, lengths[text] + step]] for text in texts])
    assert decoder.lengths_B.tolist() == [11 + 6, 3 + 6]


@pytest.mark.parametrize(
    ("attention", "model"),
    [
        (GATED, {}),
        (GATED, SMALL_HYBRID | {"sliding_window": {"window": 3, "full_every": 4, "attention": OTHER_HEADS}}),
        (SMALL_GROUPED | {"attention_bias": True}, {}),
        (SMALL_GROUPED | {"attention_bias": True, "qk_norm": False}, {"tie_word_embeddings": False}),
    ],
    ids=["gate", "gate, other heads in sliding layers", "biases", "biases, no norm"],
)
def test_other_grouped_layers_are_decoded_from_their_checkpoint(
    attention: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small_recipe(attention, **model)
    weights = trained_weights(recipe, seed=1)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, weights, small_tokenizer())
    tokens_BS = random_tokens(2, 9)
    in_float64 = {name: array.astype(np.float64) for name, array in weights.items()}
    expected = forward.logits(in_float64, tokens_BS, forward_spec(recipe.model))
    assert_close(logits_by_steps(checkpoint, tokens_BS, 4), expected[:, 3:], FLOAT32, "logits")


def test_greedy_tokens_equal_those_of_transformers(case: Case) -> None:
    model = TextModel.load(case.directory)
    ours = continued_alone(model, Sampling(), end_ids=model.end_ids)
    hf = AutoModelForCausalLM.from_pretrained(case.directory)
    prompt = torch.tensor([model.encode(PROMPT)])
    theirs = hf.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW)[0, prompt.shape[1] :].tolist()
    assert len(set(ours)) > 2, "repeats itself: compares too little"
    assert ours == theirs


@pytest.mark.parametrize("lengths", [[7], [2, 9, 4]], ids=["one text", "three texts"])
def test_the_cache_holds_what_the_calculator_says(case: Case, lengths: list[int]) -> None:
    model = case.recipe.model
    decoder = CachedDecoder(load_model(case.directory), capacity=11)
    decoder.read([[5] * length for length in lengths])
    bytes_per_token = 2 * model.attention.num_key_value_heads * model.attention.head_dim * 4
    form = {"num_key_value_heads": model.attention.num_key_value_heads, "bytes_per_token": bytes_per_token}
    layers = [{"count": 2, "positions": 11, **form}]
    if model.sliding_window is not None:
        layers = [{"count": 2, "positions": 5, **form}, *layers]
    assert decoder.cache_figures() == {
        "dtype": "float32",
        "texts": len(lengths),
        "bytes": len(lengths) * cache_bytes(model, 11, "float32"),
        "layers": layers,
    }


@pytest.mark.parametrize(
    ("attention", "model", "message"),
    [
        (SMALL_VHA, {}, "SelfAttentionVHA keeps something else"),
        ({"kind": "mfa", "num_attention_heads": 2, "head_dim": 8, "q_lora_rank": 6}, {}, "SelfAttentionMFA keeps"),
        (SMALL_GROUPED, SMALL_MIXTURE | {"experts": SMALL_EXPERTS | {"capacity_factor": 1.5}}, "whole sequences"),
    ],
    ids=["vha", "mfa", "capacity"],
)
def test_layers_that_cannot_be_decoded_are_refused(
    attention: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    decoder = build_decoder(small_recipe(attention, **model).model, Mesh(), seed=0)
    with pytest.raises(ValueError, match=message):
        CachedDecoder(decoder, capacity=8)


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ([[[1, 2], []]], r"\[2, 0\] tokens of the texts after \[0, 0\]"),
        ([[[1], [2]], [[1]]], r"\[1\] tokens of the texts after \[1, 1\]"),
        ([[[1], [2]], [[1], [2, 3]]], r"\[1, 2\] tokens of the texts after \[1, 1\]"),
        ([[[1], [2] * 8], [[1], [2]]], "more than 8 tokens"),
    ],
    ids=["empty prompt", "a text is missing", "two tokens of a text", "no room"],
)
def test_what_is_no_step_is_refused(reads: list[list[list[int]]], message: str) -> None:
    decoder = CachedDecoder(build_decoder(small_recipe(SMALL_GROUPED).model, Mesh(), seed=0), capacity=8)
    for tokens in reads[:-1]:
        decoder.read(tokens)
    with pytest.raises(ValueError, match=message):
        decoder.read(reads[-1])
