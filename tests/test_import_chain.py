"""A model of transformers is imported, trained on with its own tokenizer, made into virtual heads, and exported."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.hf_models import write_model
from tests.hf_tokenizers import TEXT, TURN_END
from tests.tolerances import FLOAT32, assert_close
from vha_paddle.checkpoint.layout import METRICS_FILE, open_checkpoint
from vha_paddle.config import Model, Recipe, load_recipe, recipe_from_dict, recipe_to_yaml
from vha_paddle.config.attention import GroupedAttention
from vha_paddle.counts import folded
from vha_paddle.data.prepare import Plan, prepare
from vha_paddle.data.tokenizer import load_tokenizer, save_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import load_model
from vha_paddle.export.fold_export import export_checkpoint
from vha_paddle.import_hf import _recipe, import_hf, plan_import
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.trainer import RunData, Trainer
from vha_paddle.warm_start.convert import layers_to_convert
from vha_paddle.warm_start.run import warm_start

NUM_STEPS = 2


@dataclass(frozen=True)
class Start:
    """An import and the data that were prepared with its tokenizer."""

    theirs: PreTrainedModel
    checkpoint: Path
    data: Path


@pytest.fixture(scope="module", params=["Qwen3", "Llama, no head_dim, MHA, biases"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("import")
    theirs = write_model(folder / "hf", request.param)
    import_hf(plan_import(folder / "hf", folder / "start", None, None), folder / "start")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each * 40}) + "\n" for each in TEXT), "utf-8")
    plan = Plan(folder / "data", (text,), folder / "start", None, 0.0, overwrite=False)
    prepare(plan)
    return Start(theirs, folder / "start", folder / "data")


def recipe_for(start: Start, output: Path, **attention: object) -> Recipe:
    """The import's own recipe with small numbers."""
    values = load_recipe(start.checkpoint / "recipe.yaml").model_dump(mode="json", exclude_none=True)
    values["run"]["output"] = str(output)
    values["data"] |= {
        "train": str(start.data / "train"),
        "sequence_length": 32,
        "global_batch_size": 4,
        "micro_batch_size": 2,
    }
    values["schedule"] |= {"total_tokens": NUM_STEPS * 4 * 32, "warmup_tokens": 0}
    values["model"]["attention"] |= attention
    if attention:
        values["optim"]["decay_target"] = "identity"
    return recipe_from_dict(values, source="test recipe")


def train(recipe: Recipe) -> Path:
    """The last checkpoint."""
    Trainer(recipe, RunData(recipe), Mesh()).fit()
    return Path(recipe.run.output) / "checkpoints" / f"step-{NUM_STEPS:08d}"


def first_loss(recipe: Recipe) -> float:
    return float(json.loads((Path(recipe.run.output) / METRICS_FILE).read_text().splitlines()[0])["loss"])


def test_training_goes_on_where_transformers_would(start: Start, tmp_path: Path) -> None:
    recipe = recipe_for(start, tmp_path / "run")
    tokens_BS, labels_BS = RunData(recipe).batches.batch(0)
    with torch.no_grad():
        logits_BSV = start.theirs(torch.from_numpy(tokens_BS)).logits
    expected = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), torch.from_numpy(labels_BS).flatten())
    trained = train(recipe)
    assert_close(np.array(first_loss(recipe)), np.array(float(expected)), FLOAT32, "loss of the first step")

    kept = {name for name in open_checkpoint(trained).files if "token" in name or name in ("vocab.json", "merges.txt")}
    assert {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"} <= kept
    export_checkpoint(trained, tmp_path / "out", "float32", plain=True)
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (start.checkpoint / name).read_bytes()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = np.array([tokenizer(TEXT[1])["input_ids"]])
    with torch.no_grad(), paddle.no_grad():
        after, before = (model(torch.from_numpy(tokens)).logits.numpy() for model in (theirs, start.theirs))
        assert_close(after, load_model(trained)(paddle.to_tensor(tokens)).numpy(), FLOAT32, "export")
    assert np.abs(after - before).max() > 1e-3  # it has learned something


def test_virtual_heads_start_from_an_import_and_export(start: Start, tmp_path: Path) -> None:
    vha = {"kind": "vha", "num_key_value_heads": 2, "postmix_rank": 3, "output_gate": "none"}
    recipe = recipe_for(start, tmp_path / "run", **vha)
    warm_start(start.checkpoint, recipe, tmp_path / "warm", None, 0)
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"start_from": str(tmp_path / "warm")})})
    trained = train(recipe)
    export_checkpoint(trained, tmp_path / "out", "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.num_key_value_heads == 2 == folded(recipe.model).attention.num_key_value_heads
    tokens = np.random.default_rng(0).integers(0, 320, (1, 24))
    with torch.no_grad(), paddle.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
        assert_close(load_model(trained)(paddle.to_tensor(tokens)).numpy(), expected, FLOAT32, "folded")


def test_data_of_another_tokenizer_do_not_start(start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in start.data.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content + " ")
    digest = {"tokenizer_sha256": hashlib.sha256(f"{content} ".encode()).hexdigest()}
    manifest = json.loads((other / "train.json").read_text())
    (other / "train.json").write_text(json.dumps(manifest | digest))
    recipe = recipe_for(Start(start.theirs, start.checkpoint, other), tmp_path / "run")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": str(other)})})
    with pytest.raises(UserError, match="its tokenizer differs from data.tokenizer=.*other, so the same ids mean"):
        train(recipe)


def test_a_tokenizer_with_another_end_token_than_the_data_is_refused(start: Start, tmp_path: Path) -> None:
    """Checkpoints would keep it, and their exports would not stop where documents end."""
    save_tokenizer(load_tokenizer(start.data, TURN_END), tmp_path)
    recipe = recipe_for(start, tmp_path / "run")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": str(tmp_path)})})
    with pytest.raises(
        UserError, match=r"its eos_token <\|im_end\|> is id 312, but documents of .*train end with id 310"
    ):
        RunData(recipe)


def test_the_changes_that_the_document_shows_make_an_imports_recipe_one_of_virtual_heads(tmp_path: Path) -> None:
    """Nothing but data, batch and schedule, which are anyone's own, is left to change."""
    model = Model(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attention=GroupedAttention(num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    )
    before = _recipe(model, Path("models/Qwen3-0.6B-Base"), Path("imported/qwen3"), None)
    lines, at = recipe_to_yaml(before).splitlines(), 0
    document = (Path(__file__).resolve().parents[1] / "docs" / "warm_start.md").read_text(encoding="utf-8")
    (changes,) = re.findall(r"^```diff\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    for change in changes.splitlines():
        sign, line = change[0], change[1:]
        if sign == "+":
            lines.insert(at, line)
        else:
            at = lines.index(line, at)
        if sign == "-":
            del lines[at]
        else:
            at += 1
    (tmp_path / "vha.yaml").write_text("\n".join(lines), encoding="utf-8")
    after = load_recipe(tmp_path / "vha.yaml")
    assert layers_to_convert(model, after.model) == list(range(28))
    assert (after.run.start_from, after.data.tokenizer) == ("warm/qwen3", "imported/qwen3")
