"""tools/generate.py as it is called."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, small_tokenizer, write_checkpoint
from tests.generate.cases import NUM_NEW, PROMPT, Case, continued, continued_alone, lively_weights, text_of
from vha_paddle.counts import cache_bytes
from vha_paddle.errors import UserError
from vha_paddle.generate.batch import Text
from vha_paddle.generate.model import TextModel
from vha_paddle.generate.prompts import read_prompts
from vha_paddle.sampling import Sampling

ROOT = Path(__file__).resolve().parents[2]
GREEDY = ("--temperature", "0", "--max-new-tokens", str(NUM_NEW))


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, encoding="utf-8", timeout=120, check=False)


def json_of(*arguments: str) -> dict[str, Any]:
    result = run_tool(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_one_text_is_written_after_its_prompt_and_the_cache_is_the_calculators(gqa: Case, exported: TextModel) -> None:
    result = run_tool(str(gqa.directory), "--prompt", PROMPT, *GREEDY)
    assert result.returncode == 0, result.stderr
    tokens = continued_alone(exported, Sampling(), end_ids=exported.end_ids)
    assert result.stdout == PROMPT + text_of(exported, tokens) + "\n"
    positions = len(exported.encode(PROMPT)) + NUM_NEW
    size = cache_bytes(gqa.recipe.model, positions, "float32")
    assert result.stderr.splitlines()[-1] == (
        f"exported model {gqa.directory}, as it is; cache of {size:,} bytes in float32: 1 text x "
        f"(2 layers x 2 key/value heads x {positions} positions)"
    )


def test_a_checkpoint_with_virtual_heads_says_that_it_was_folded(tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", recipe, lively_weights(recipe), small_tokenizer())
    result = run_tool(str(checkpoint), "--prompt", PROMPT, *GREEDY)
    assert result.returncode == 0, result.stderr
    model = TextModel.load(checkpoint)
    tokens = continued_alone(model, Sampling(), end_ids=model.end_ids)
    assert result.stdout == PROMPT + text_of(model, tokens) + "\n"
    assert f"checkpoint {checkpoint}, virtual heads folded in memory; cache of " in result.stderr


def test_json_holds_the_texts_and_the_bytes_of_the_cache(gqa: Case, exported: TextModel, tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.7, top_k=50, top_p=0.9, seed=4)
    end_id = continued_alone(exported, sampling)[NUM_NEW // 2]
    tokens = continued_alone(exported, sampling, end_ids=[end_id])
    directory = shutil.copytree(gqa.directory, tmp_path / "ends")
    settings = directory / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": end_id}))
    options = ["--temperature", "0.7", "--top-k", "50", "--top-p", "0.9", "--seed", "4"]
    found = json_of(str(directory), "--prompt", PROMPT, "--max-new-tokens", str(NUM_NEW), *options)
    positions = len(exported.encode(PROMPT)) + NUM_NEW
    assert found == {
        "texts": [
            {
                "prompt": PROMPT,
                "prompt_tokens": list(exported.encode(PROMPT)),
                "sample": 0,
                "text": text_of(exported, tokens),
                "tokens": tokens,
                "stopped": "end",
            }
        ],
        "sampling": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 4},
        "kv_cache": {
            "dtype": "float32",
            "texts": 1,
            "bytes": cache_bytes(gqa.recipe.model, positions, "float32"),
            "layers": [
                {"count": 2, "num_key_value_heads": 2, "positions": positions, "bytes_per_token": 2 * 2 * 8 * 4}
            ],
        },
    }


def test_texts_of_a_file_are_those_of_each_prompt_alone_in_batches_of_any_size(
    gqa: Case, exported: TextModel, tmp_path: Path
) -> None:
    prompts, file = ["The quick", "dog\u2028", "fox\ncat"], tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n" for prompt in prompts))
    sampling = Sampling(temperature=0.8, seed=2)
    texts = [Text(exported.encode(prompt), sample) for prompt in prompts for sample in (0, 1)]
    expected = [continued(exported, [text], sampling, end_ids=exported.end_ids)[0] for text in texts]
    options = ["--prompts-file", str(file), "--num-samples", "2", "--seed", "2", "--max-new-tokens", str(NUM_NEW)]
    found = json_of(str(gqa.directory), *options, "--batch-size", "4")
    assert [text["tokens"] for text in found["texts"]] == expected
    assert [(text["prompt"], text["sample"]) for text in found["texts"]] == [(p, s) for p in prompts for s in (0, 1)]
    positions = max(len(text.prompt) for text in texts) + NUM_NEW
    assert found["kv_cache"]["texts"] == 4
    assert found["kv_cache"]["bytes"] == 4 * cache_bytes(gqa.recipe.model, positions, "float32")


def test_several_texts_are_printed_when_they_have_ended(gqa: Case, exported: TextModel) -> None:
    prompts = ["The quick", "dog"]
    result = run_tool(str(gqa.directory), "--prompt", prompts[0], "--prompt", prompts[1], *GREEDY)
    assert result.returncode == 0, result.stderr
    parts = []
    for number, prompt in enumerate(prompts, start=1):
        text = Text(exported.encode(prompt))
        (tokens,) = continued(exported, [text], Sampling(), end_ids=exported.end_ids)
        stopped = "end" if tokens[-1] in exported.end_ids else "length"
        parts.append(f"--- text {number} of 2 ({stopped})\n{prompt}{text_of(exported, tokens)}\n")
    assert result.stdout in ("".join(parts), "".join(reversed(parts)))


def test_no_more_is_written_than_the_models_positions_allow(gqa: Case, exported: TextModel) -> None:
    room = exported.config.max_position_embeddings - len(exported.encode(PROMPT))
    assert room < 100  # what is written by default where there is room
    arguments = [str(gqa.directory), "--prompt", PROMPT, "--temperature", "0"]
    found = json_of(*arguments)
    assert len(found["texts"][0]["tokens"]) == room or found["texts"][0]["stopped"] == "end"
    assert found["kv_cache"]["bytes"] == cache_bytes(gqa.recipe.model, 64, "float32")
    too_many = run_tool(*arguments, "--max-new-tokens", "100")
    assert too_many.returncode == 2 and "max_new_tokens=100 after a prompt of" in too_many.stderr
    full = run_tool(str(gqa.directory), "--prompt", PROMPT * 20)
    assert full.returncode == 2 and "at most max_position_embeddings=64 are possible" in full.stderr


def test_wrong_input_ends_with_one_line_and_exit_code_2(gqa: Case, tmp_path: Path) -> None:
    model = str(gqa.directory)
    for arguments in (
        [str(tmp_path)],
        [model, "--temperature", "-1"],
        [model, "--num-samples", "0"],
        [model, "--batch-size", "0"],
        [model, "--temperature", "0", "--top-k", "3"],
        [model, "--temperature", "0", "--top-p", "0.5"],
        [model, "--temperature", "0", "--num-samples", "2"],
        [model, "--prompts-file", str(tmp_path / "none.txt")],
    ):
        result = run_tool(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in result.stderr


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('first \n{"prompt": "x"}\nlast', encoding="utf-8")
    assert read_prompts(file) == ["first ", '{"prompt": "x"}', "last"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "line 1 is empty"),
        ("a.txt", b"one\n\nthree\n", "line 2 is empty"),
        ("a.txt", b"\xff\xfe", "a.txt: cannot be read"),
        ("a.jsonl", b'{"prompt": "one"}\nthree\n', "line 2 is no JSON"),
        ("a.jsonl", b'{"text": "one"}\n', 'line 1 has no string "prompt"'),
        ("a.jsonl", b'{"prompt": 3}\n', 'line 1 has no string "prompt"'),
        ("a.jsonl", b'["one"]\n', 'line 1 has no string "prompt"'),
    ],
)
def test_a_file_that_is_no_list_of_prompts_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_prompts(tmp_path / name)
    assert "\n" not in str(error.value)
