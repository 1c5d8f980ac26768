"""Import against transformers: the same logits, and every bit back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import SMALL_GROUPED, SMALL_VHA, small_recipe, small_tokenizer
from tests.hf_models import CONFIGS, VOCABULARY, as_transformers_5_writes, edit_config, write_model
from tests.hf_tokenizers import write_qwen_tokenizer
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.checkpoint.inspect import find_faults
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.config import recipe_to_yaml
from vha_paddle.errors import RunError, UserError
from vha_paddle.evaluate import load_model
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.import_hf import REPORT_FILE, import_hf, plan_import
from vha_paddle.sources.own import open_own

ROOT = Path(__file__).resolve().parents[1]


def imported(directory: Path, out: Path, **options: Any) -> dict[str, Any]:
    return import_hf(plan_import(directory, out, None, None), out, **options)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    theirs = write_model(tmp_path / "hf", case)
    imported(tmp_path / "hf", tmp_path / "ours")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    with paddle.no_grad():
        assert_close(load_model(tmp_path / "ours")(paddle.to_tensor(tokens)).numpy(), expected, FLOAT32, case)
        assert_close(load_model(tmp_path / "hf")(paddle.to_tensor(tokens)).numpy(), expected, FLOAT32, "as it is")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CONFIGS)
def test_an_export_of_an_import_gives_every_bit_back(tmp_path: Path, case: str, dtype: Any) -> None:
    write_model(tmp_path / "hf", case, getattr(torch, dtype), max_shard_size="4KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    imported(tmp_path / "hf", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", dtype, plain=True)
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype is after[name].dtype is getattr(torch, dtype)
        assert tensor.shape == after[name].shape
        assert bytes(tensor.view(torch.uint8).numpy()) == bytes(after[name].view(torch.uint8).numpy()), name
    for file in (tmp_path / "hf").glob("*token*.json"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("case", ["Qwen3", "Qwen3-MoE", "Llama"])
def test_a_directory_of_transformers_5_gives_the_same_checkpoint(tmp_path: Path, case: str) -> None:
    write_model(tmp_path / "hf", case)
    imported(tmp_path / "hf", tmp_path / "ours")
    as_transformers_5_writes(tmp_path / "hf")
    edit_config(tmp_path / "hf", head_dim=8)
    imported(tmp_path / "hf", tmp_path / "again")
    names = [path.name for path in (tmp_path / "ours").glob("*.safetensors")]
    assert len(names) == (3 if case == "Qwen3-MoE" else 2)
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Qwen3, tied")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    report = imported(tmp_path / "hf", tmp_path / "ours")
    assert list(report["left_out"]) == ["lm_head.weight"]
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "ours").model_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match="tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens"):
        imported(tmp_path / "hf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_rotary_table_of_an_old_release_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Llama")
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    left_out = imported(tmp_path / "hf", tmp_path / "ours")["left_out"]
    assert left_out == {"model.layers.1.self_attn.rotary_emb.inv_freq": "follows from rope_theta"}


def test_the_checkpoint_says_what_it_is_and_where_from(tmp_path: Path) -> None:
    write_model(tmp_path / "My model (v1)", "Qwen3", torch.bfloat16)
    calls: list[tuple[int, int]] = []
    out = tmp_path / "ours"
    report = imported(tmp_path / "My model (v1)", out, progress=lambda done, total: calls.append((done, total)))
    assert json.loads((out / REPORT_FILE).read_text()) == report
    assert report["dtypes"] == {"bfloat16": len(report["tensors"])}
    assert len(calls) == len(report["tensors"]) and calls[-1] == (report["bytes"], report["bytes"])
    assert report["bytes"] == 2 * report["parameters"]
    assert report["files"].keys() == {"config.json", "model.safetensors"}
    found = open_own(out).provenance["imported_from"]
    assert (found["directory"], found["architecture"]) == ("My model (v1)", "Qwen3ForCausalLM")
    checkpoint = open_checkpoint(out)
    recipe = checkpoint.recipe
    assert (recipe.run.name, recipe.run.start_from, recipe.data.tokenizer) == ("My-model-v1-", str(out), str(out))
    assert recipe.checkpoint.interval == 1000
    assert (checkpoint.state.step, list(checkpoint.optimizer_tensors())) == (0, [])
    assert checkpoint.tokenizer_path.name == "tokenizer.json"
    assert not any(find_faults(out, lambda count: None).values())


def test_of_two_tokenizers_the_one_that_the_other_was_made_from_is_taken(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Qwen3")
    (tmp_path / "hf" / "tokenizer.model").write_bytes(small_tokenizer())
    assert plan_import(tmp_path / "hf", tmp_path / "ours", None, None).tokenizer_path.name == "tokenizer.model"
    with open(tmp_path / "hf" / "tokenizer.model", "wb") as file:  # as Llama 2's: it puts a space before every text
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox"] * 20),
            model_writer=file,
            vocab_size=280,
            hard_vocab_limit=False,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
    assert plan_import(tmp_path / "hf", tmp_path / "ours", None, None).tokenizer_path.name == "tokenizer.json"


def test_a_recipe_gives_the_other_sections(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Qwen3")
    for name, attention in {"grouped": SMALL_GROUPED, "vha": SMALL_VHA}.items():
        (tmp_path / f"{name}.yaml").write_text(recipe_to_yaml(small_recipe(attention)))
    recipe = plan_import(tmp_path / "hf", tmp_path / "ours", tmp_path / "grouped.yaml", None).recipe
    assert (recipe.data.sequence_length, recipe.optim.lr, recipe.model.hidden_size) == (32, 1e-3, 24)
    with pytest.raises(UserError, match=r"vha.yaml with the model of .*hf: optim.decay_target"):
        plan_import(tmp_path / "hf", tmp_path / "ours", tmp_path / "vha.yaml", None)


def _without(name: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file)

    return damage


def _with(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "model.safetensors"
        save_file(load_file(file) | {name: tensor}, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda hf: (hf / "tokenizer.json").unlink(), "has no tokenizer.json, and a checkpoint needs a tokenizer"),
        (lambda hf: write_qwen_tokenizer(hf, 317), "321 ids, more than vocab_size=320"),
        (_without("lm_head.weight"), "missing lm_head.weight"),
        (_without("model.layers.1.self_attn.q_norm.weight"), "missing model.layers.1.self_attn.q_norm.weight"),
        (_with("model.layers.0.self_attn.q_proj.bias", torch.zeros(48)), "unexpected model.layers.0.self_attn.q_proj."),
        (
            _with("model.norm.weight", torch.zeros(23)),
            "model.norm.weight has shape [23], the described model needs [24]",
        ),
        (_with("model.norm.weight", torch.zeros(24).to(torch.float8_e4m3fn)), "model.norm.weight holds float8_e4m3fn"),
        (_with("model.norm.weight", torch.zeros(24, dtype=torch.int32)), "model.norm.weight holds int32"),
        (lambda hf: (hf / "model.safetensors").unlink(), "has no .safetensors file"),
    ],
)
def test_a_directory_that_is_not_the_described_model_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    write_model(tmp_path / "hf", "Qwen3")
    damage(tmp_path / "hf")
    with pytest.raises(UserError) as error:
        imported(tmp_path / "hf", tmp_path / "ours")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_an_expert_of_another_dtype_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Qwen3-MoE")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    _with(name, torch.zeros(12, 24, dtype=torch.bfloat16))(tmp_path / "hf")
    with pytest.raises(UserError, match="model.layers.0.mlp.experts.up_proj holds bfloat16, float32"):
        imported(tmp_path / "hf", tmp_path / "ours")


def test_a_failure_leaves_an_earlier_import_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hf", "Qwen3")
    out = tmp_path / "ours"
    imported(tmp_path / "hf", out)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="exists; name another, or add --overwrite"):
        imported(tmp_path / "hf", out)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vha_paddle.checkpoint.fresh.write_common", full)
        with pytest.raises(RunError, match="ours: cannot be written .No space left on device"):
            imported(tmp_path / "hf", out, overwrite=True)
    assert (out / "manifest.json").read_bytes() == before
    imported(tmp_path / "hf", out, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "ours"}
    (out / REPORT_FILE).unlink()
    with pytest.raises(UserError, match=f"holds no {REPORT_FILE}"):
        imported(tmp_path / "hf", out, overwrite=True)


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "import_hf.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_tool_lists_and_imports(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "Llama")
    done = run_tool(tmp_path / "hf", tmp_path / "ours", "--dry-run")
    assert (done.returncode, {path.name for path in tmp_path.iterdir()}) == (0, {"hf"})
    assert "model.layers.1.self_attn.k_proj.weight" in done.stdout and "would write" in done.stdout
    done = run_tool(tmp_path / "hf", tmp_path / "first")
    remedy = f"copy {tmp_path}/first/recipe.yaml and edit the copy, or name run.start_from={tmp_path}/first"
    assert done.stdout.splitlines()[-1] == remedy, done.stderr
    done = run_tool(tmp_path / "hf", tmp_path / "ours", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention"]["qk_norm"] is False
    assert open_checkpoint(tmp_path / "ours").state.step == 0
    done = run_tool(tmp_path / "hf", tmp_path / "ours")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# The tool, which waits once the model's tensors are written.
WAITING = """
import runpy, sys, time
from vha_paddle.checkpoint import fresh

write_tensors = fresh.write_tensors
def waiting(*arguments):
    record = write_tensors(*arguments)
    print("ready", flush=True)
    for _ in range(600):  # a signal that comes just before a sleep is heard after it
        time.sleep(0.1)
    return record
fresh.write_tensors = waiting
sys.argv = ["import_hf.py", *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


@pytest.mark.parametrize("case", ["Qwen3", "Qwen3-MoE"])  # the mixture has imported Paddle, which takes the signal
def test_an_import_that_is_told_to_end_leaves_nothing(case: str, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", case)
    program = WAITING.format(tool=str(ROOT / "tools" / "import_hf.py"))
    command = [sys.executable, "-c", program, str(tmp_path / "hf"), str(tmp_path / "ours")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_the_tools_help_teaches_with_examples() -> None:
    done = run_tool("--help")
    assert done.returncode == 0 and "python tools/import_hf.py models/Qwen3-0.6B-Base imported/qwen3" in done.stdout
