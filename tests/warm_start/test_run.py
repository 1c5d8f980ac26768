"""Warm starts of whole models: where nothing is lost, how much is lost, what is written, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from tests.checkpoints import (
    SMALL_EXPERTS,
    SMALL_GROUPED,
    SMALL_MIXTURE,
    SMALL_VHA,
    small_recipe,
    small_tokenizer,
    trained_weights,
    write_checkpoint,
)
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from tests.warm_start.conftest import GROUPED, VHA, MakeRecipe
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.config import Recipe, load_recipe, recipe_to_yaml
from vha_paddle.config.reduced import reduced
from vha_paddle.errors import UserError
from vha_paddle.evaluate import decoder_with, load_model, model_logits, sequence_means
from vha_paddle.fold import fold_premix, fold_state
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.sources.own import open_own
from vha_paddle.train.trainer import RunData, Trainer
from vha_paddle.warm_start.activations import input_moments
from vha_paddle.warm_start.convert import layers_to_convert
from vha_paddle.warm_start.run import FEWEST_COMPARED, Text, describe, difference, open_text, warm_start

ROOT = Path(__file__).resolve().parents[2]
TOKENS_BS = np.random.default_rng(0).integers(0, 330, (2, 17))


def folded(recipe: Recipe) -> dict[str, np.ndarray]:
    """A VHA model of trained size, folded: its query heads are virtual heads' by making."""
    return dict(fold_state(trained_weights(recipe), recipe.model, np.float32, "test"))


def repeated(weights: dict[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
    """Every key/value head `times` times, beside itself."""
    result = dict(weights)
    for name, array in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = array.reshape(*array.shape[:-1], -1, SMALL_VHA["head_dim"])
            result[name] = np.repeat(heads, times, axis=-2).reshape(*array.shape[:-1], -1)
    return result


BIAS = {"attention_bias": True}


@pytest.mark.parametrize(("times", "keys"), [(1, {}), (3, {}), (3, BIAS | {"qk_norm": False})])
def test_a_model_that_is_virtual_heads_already_loses_nothing(times: int, keys: dict[str, Any], tmp_path: Path) -> None:
    """Folded VHA with each key/value head `times` times: the pooled heads and the factors are exact."""
    recipe = small_recipe(SMALL_VHA | keys)
    grouped = small_recipe(SMALL_GROUPED | {"num_key_value_heads": 2 * times} | keys)
    source = write_checkpoint(tmp_path / "source", grouped, repeated(folded(recipe), times), small_tokenizer())
    warm_start(source, recipe, tmp_path / "out", data=None, num_tokens=0)
    expected, found = model_logits(source)(TOKENS_BS), model_logits(tmp_path / "out")(TOKENS_BS)
    assert_close(found, expected, FLOAT32, "logits")


@pytest.mark.parametrize("keys", [{}, BIAS], ids=["no bias", "bias"])
def test_a_fit_to_activations_loses_nothing_either(
    keys: dict[str, Any], make: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    recipe = make(VHA | keys)
    grouped = make(GROUPED | {"num_key_value_heads": 2} | keys)
    source = write_checkpoint(tmp_path / "source", grouped, folded(recipe), small_tokenizer())
    report = warm_start(source, recipe, tmp_path / "out", folder / "text", num_tokens=2048)
    tokens = TOKENS_BS % recipe.model.vocab_size
    expected, found = model_logits(source)(tokens), model_logits(tmp_path / "out")(tokens)
    assert_close(found, expected, FLOAT32, "logits")
    assert report["losses"]["fitted_warm_start"] == pytest.approx(report["losses"]["source"], rel=FLOAT32)


def test_inputs_of_projections_with_a_bias_have_a_channel_that_is_always_one() -> None:
    recipe, inputs = small_recipe(SMALL_GROUPED | BIAS), []
    model = decoder_with(recipe.model, trained_weights(recipe).items())
    model.layers[1].self_attn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].numpy()))
    moments = input_moments(model, [1], [TOKENS_BS, TOKENS_BS[:, ::-1].copy()])
    x_TD = np.concatenate([x_BSD.reshape(-1, 20) for x_BSD in inputs]).astype(np.float64)
    ones_TE = np.concatenate([x_TD, np.ones((2 * TOKENS_BS.size, 1))], axis=1)
    assert_close(moments[1], ones_TE.T @ ones_TE, FLOAT64, "moments")


@pytest.fixture(scope="module")
def fitted(trained: Path, make: MakeRecipe, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a fitted warm start of the trained model."""
    out = tmp_path_factory.mktemp("fitted") / "out"
    return warm_start(trained, make(VHA), out, folder / "text", num_tokens=8192)


def test_losses_come_in_their_order(fitted: dict[str, Any]) -> None:
    losses = fitted["losses"]
    assert losses["source"] < losses["fitted_warm_start"] < losses["warm_start"] < losses["random_start"]
    assert losses["warm_start"] - losses["source"] < 0.5 * (losses["random_start"] - losses["source"])


def test_losses_are_of_tokens_that_no_fit_has_seen(
    fitted: dict[str, Any], trained: Path, make: MakeRecipe, folder: Path
) -> None:
    recipe = make(VHA)
    text = open_text(folder / "text", recipe, folder / "tokenizer.model", 8192)
    assert fitted["data"]["fitted_tokens"] == 8192 and fitted["data"]["compared_tokens"] == 64 * 32
    stream = text.windows.samples(256, 320)
    for key, path in {"source": trained, "fitted_warm_start": Path(fitted["out"])}.items():
        assert fitted["losses"][key] == pytest.approx(sequence_means(load_model(path), [stream]).mean(), rel=FLOAT32)
    assert np.array_equal(np.concatenate(list(text.to_fit())), text.windows.samples(0, 256)[0])
    random = Trainer(recipe, RunData(recipe), Mesh()).model
    assert fitted["losses"]["random_start"] == pytest.approx(sequence_means(random, [stream]).mean(), rel=FLOAT32)


def test_the_fit_lowers_the_error_of_every_layers_attention(fitted: dict[str, Any]) -> None:
    for layer, row in enumerate(fitted["layers"]):
        assert row["layer"] == layer
        assert 0 < row["output_error"] < row["output_error_without_postmix"] < 1
        assert 0 < row["query_error"] < 0.5
        assert len(row["premix_distance"]) == 2


def test_the_reported_error_is_of_the_queries_on_the_sources_inputs(
    fitted: dict[str, Any], trained: Path, make: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    text = open_text(folder / "text", make(VHA), folder / "tokenizer.model", 8192)
    model, inputs = load_model(trained), {}
    for layer, block in enumerate(model.layers):
        block.self_attn.register_forward_pre_hook(
            lambda _, arguments, layer=layer: inputs.update({layer: arguments[0]})
        )
    model(paddle.to_tensor(text.windows.samples(0, 256)[0]))
    plain = warm_start(trained, make(VHA), tmp_path / "plain", data=None, num_tokens=0)
    given = open_checkpoint(trained).model_tensors()

    def lost(out: str, layer: int) -> float:
        made, name = open_checkpoint(Path(out)).model_tensors(), f"model.layers.{layer}.self_attn."
        virtual = fold_premix(made.array(f"{name}q_proj.weight"), made.array(f"{name}premix"))
        x_TD = inputs[layer].numpy().reshape(-1, 32).astype(np.float64)
        queries = x_TD @ given.array(f"{name}q_proj.weight").astype(np.float64)
        return float(np.square(queries - x_TD @ virtual).sum() / np.square(queries).sum())

    for row in fitted["layers"]:
        assert lost(fitted["out"], row["layer"]) == pytest.approx(row["query_error"], rel=1e-3)
        assert row["query_error"] < lost(plain["out"], row["layer"])


def test_what_is_written_is_a_checkpoint_that_a_run_starts_from(
    fitted: dict[str, Any], make: MakeRecipe, trained: Path, folder: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(Path(fitted["out"]))
    assert (checkpoint.state.step, checkpoint.state.tokens, checkpoint.state.samples) == (0, 0, 0)
    assert checkpoint.recipe == make(VHA)
    assert checkpoint.tokenizer_path.read_bytes() == (folder / "tokenizer.model").read_bytes()
    source = open_checkpoint(trained)
    started_from = f"{source.recipe.run.name}, checkpoint {source.path.name}"
    assert open_own(checkpoint.path).provenance["started_from"] == started_from
    assert json.loads((checkpoint.path / "warm_start_report.json").read_text())["losses"] == fitted["losses"]
    given, made = open_checkpoint(trained).model_tensors(), checkpoint.model_tensors()
    changed = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "premix", "postmix_a", "postmix_b"}
    for name in made:
        if name.rpartition("self_attn.")[2] not in changed:
            assert np.array_equal(made.array(name), given.array(name)), name
    recipe = make(VHA, run__start_from=fitted["out"], run__output=str(tmp_path / "run"), data__validation=None)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    text = open_text(folder / "text", recipe, folder / "tokenizer.model", 8192)
    assert sequence_means(trainer.model, text.to_compare()).mean() == pytest.approx(
        fitted["losses"]["fitted_warm_start"], rel=FLOAT32
    )


def test_without_data_the_maps_are_the_weights_and_postmix_a_fresh_models(
    trained: Path, make: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make(VHA)
    report = warm_start(trained, recipe, tmp_path / "out", data=None, num_tokens=0)
    assert report["losses"] is None and "output_error" not in report["layers"][0]
    made = open_checkpoint(tmp_path / "out").model_tensors()
    fresh = Trainer(recipe, RunData(recipe), Mesh()).model.named_tensors()
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.postmix_"
        assert np.array_equal(made.array(f"{name}a"), fresh[f"{name}a"].numpy())
        assert not made.array(f"{name}b").any()


def test_a_model_with_one_map_is_started_too(trained: Path, make: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    only_postmix = make(VHA | {"premix": "none"})
    report = warm_start(trained, only_postmix, tmp_path / "postmix", folder / "text", num_tokens=4096)
    assert "query_error" not in report["layers"][0] and report["layers"][0]["output_error"] < 1
    only_premix = make({key: value for key, value in VHA.items() if key != "postmix_rank"} | {"postmix": "none"})
    report = warm_start(trained, only_premix, tmp_path / "premix", folder / "text", num_tokens=4096)
    assert "output_error" not in report["layers"][0] and report["layers"][0]["query_error"] < 1


def test_experts_and_what_their_routers_remember_are_kept(make: MakeRecipe, folder: Path, tmp_path: Path) -> None:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "router_bias_update_rate": 0.5,
    }
    changes = {"model__intermediate_size": None, "model__experts": experts, "schedule__total_tokens": 11 * 512}
    source = make(GROUPED, run__output=str(tmp_path / "moe"), **changes)
    Trainer(source, RunData(source), Mesh()).fit()
    report = warm_start(tmp_path / "moe", make(VHA, **changes), tmp_path / "out", folder / "text", num_tokens=2048)
    before, after = load_model(tmp_path / "moe"), load_model(tmp_path / "out")
    assert before.balance is not None and after.balance is not None
    expected, found = before.balance.state(), after.balance.state()
    assert set(found) == set(expected) and "model.layers.1.mlp.gate.bias" in found
    for name, array in expected.items():
        assert array.any() and np.array_equal(found[name], array), name
    text = open_text(folder / "text", source, folder / "tokenizer.model", 2048)
    for key, model in {"source": before, "fitted_warm_start": after}.items():
        assert report["losses"][key] == pytest.approx(sequence_means(model, text.to_compare()).mean(), rel=FLOAT32)


@pytest.mark.parametrize(
    ("attention", "changes", "words"),
    [
        (VHA | {"num_key_value_heads": 8}, {}, "num_key_value_heads=8: must divide the 4 of the source"),
        (VHA | {"num_attention_heads": 16}, {}, "num_attention_heads=16: the source has 8"),
        (VHA | {"head_dim": 16}, {}, "head_dim=16: the source has 8"),
        (VHA | {"output_gate": "before_postmix"}, {}, "output_gate=before_postmix: the source has no gate: use none"),
        (VHA | {"qk_norm": False}, {}, "qk_norm=false: the source has true, and it is kept; use that"),
        (VHA | BIAS, {}, "attention_bias=true: the source has false, and it is kept; use that"),
        (VHA | {"premix": "silu"}, {}, "a map that does not fold"),
        (GROUPED | {"num_key_value_heads": 2}, {}, "kind=grouped: a warm start makes virtual heads; use vha"),
        (GROUPED, {}, "the source has the same; name the source as run.start_from"),
        (VHA, {"model__hidden_size": 48}, "model.hidden_size=48: the source has 32, and it is copied; use that"),
        (VHA, {"model__rope_theta": 5e5}, "model.rope_theta=500000.0: the source has 1000.0"),
        (VHA, {"model__rms_norm_eps": 1e-5}, "model.rms_norm_eps=1e-05: the source has 1e-06"),
    ],
)
def test_a_model_that_is_no_counterpart_is_refused(
    attention: dict[str, Any], changes: dict[str, Any], words: str, trained: Path, make: MakeRecipe, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        warm_start(trained, make(attention, **changes), tmp_path / "out", data=None, num_tokens=0)
    assert not (tmp_path / "out").exists()


def test_experts_that_are_used_in_another_way_are_refused() -> None:
    source = small_recipe(SMALL_GROUPED, **SMALL_MIXTURE).model
    other = {"intermediate_size": None, "experts": SMALL_EXPERTS | {"norm_topk_prob": False}}
    with pytest.raises(UserError, match="model.experts=.*'norm_topk_prob': False.*: the source has "):
        layers_to_convert(source, small_recipe(SMALL_VHA, **other).model)


def test_a_source_with_virtual_heads_is_refused(make: MakeRecipe, tmp_path: Path) -> None:
    recipe = small_recipe(SMALL_VHA)
    source = write_checkpoint(tmp_path / "source", recipe, trained_weights(recipe), small_tokenizer())
    other = small_recipe(SMALL_VHA | {"postmix_rank": 2})
    with pytest.raises(UserError, match="attention of kind vha; a warm start takes grouped attention only"):
        warm_start(source, other, tmp_path / "out", data=None, num_tokens=0)


def test_a_source_that_is_not_finite_is_refused_naming_the_tensor(tmp_path: Path) -> None:
    grouped = small_recipe(SMALL_GROUPED)
    weights = trained_weights(grouped)
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = np.inf
    source = write_checkpoint(tmp_path / "source", grouped, weights, small_tokenizer())
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj\.weight holds values that are not finite"):
        warm_start(source, small_recipe(SMALL_VHA), tmp_path / "out", data=None, num_tokens=0)


def test_the_difference_of_two_losses_has_the_error_of_pairs(
    fitted: dict[str, Any], trained: Path, make: MakeRecipe, folder: Path
) -> None:
    stream = open_text(folder / "text", make(VHA), folder / "tokenizer.model", 8192).windows.samples(256, 320)
    found, source = (sequence_means(load_model(path), [stream]) for path in (Path(fitted["out"]), trained))
    measured = fitted["differences"]["fitted_warm_start - source"]
    expected = [np.mean(found - source), np.std(found - source) / np.sqrt(63)]  # 64 sequences
    assert_close(np.array([measured["mean"], measured["standard_error"]]), np.array(expected), 1e-4, "difference")
    assert difference(np.array([3.0, 9.0]), np.array([2.0, 6.0])) == {"mean": 2.0, "standard_error": 1.0}


@pytest.mark.parametrize(
    ("mean", "words", "harmed"),
    [
        (-0.3, "-0.3000 ± 0.1000  is better than the weights alone", False),
        (0.3, "+0.3000 ± 0.1000  is worse than the weights alone", True),
        (0.2, "+0.2000 ± 0.1000  is as good as the weights alone within the noise", False),
        (-0.2, "-0.2000 ± 0.1000  is as good as the weights alone within the noise", False),
    ],
)
def test_the_report_says_in_words_what_the_figures_show(
    fitted: dict[str, Any], mean: float, words: str, harmed: bool
) -> None:
    measured = {"fitted_warm_start - warm_start": {"mean": mean, "standard_error": 0.1}}
    lines = list(describe(fitted | {"differences": fitted["differences"] | measured}))
    assert f"   {words}" in lines
    assert ("  the fit did harm: make it without --data, or give more --tokens" in lines) == harmed


def test_few_evaluation_sequences_do_not_make_the_comparison_short(make: MakeRecipe, folder: Path) -> None:
    few = make(VHA, logging__eval_sequences=4)
    assert open_text(folder / "text", few, folder / "tokenizer.model", 320).num_compared == FEWEST_COMPARED
    samples = 60_002 // 32
    left = open_text(folder / "text", few, folder / "tokenizer.model", (samples - 2) * 32)
    assert (left.num_fitted, left.num_compared) == (samples - 2, 2)
    with pytest.raises(UserError, match=f"leave two of the {samples} "):
        open_text(folder / "text", few, folder / "tokenizer.model", (samples - 1) * 32)


@pytest.mark.parametrize("num_tokens", [31, 60_003])
def test_too_few_or_too_many_tokens_are_refused(
    num_tokens: int, trained: Path, make: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--tokens {num_tokens}: must be one sequence of data.sequence_length=32"):
        warm_start(trained, make(VHA), tmp_path / "out", folder / "text", num_tokens)


def test_batches_cover_the_fitted_and_the_compared_sequences_once(make: MakeRecipe, folder: Path) -> None:
    text = open_text(folder / "text", make(VHA), folder / "tokenizer.model", 20 * 32)
    assert isinstance(text, Text)
    assert [len(tokens_BS) for tokens_BS in text.to_fit()] == [16, 4]
    assert [len(tokens_BS) for tokens_BS, _ in text.to_compare()] == [16] * 4


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "warm_start.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_tool_prints_losses_and_writes_what_it_says(
    trained: Path, make: MakeRecipe, folder: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(make(VHA)), encoding="utf-8")
    arguments = [str(trained), str(recipe), "--out", str(tmp_path / "out"), "--data", str(folder / "text")]
    result = tool(*arguments, "--tokens", "4096", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report["losses"]) == {"source", "warm_start", "fitted_warm_start", "random_start"}
    assert open_checkpoint(Path(report["out"])).state.step == 0
    again = tool(*arguments, "--tokens", "4096")
    assert again.returncode == 2 and again.stderr == f"error: {tmp_path / 'out'}: exists; name a directory to make\n"
    text = tool(str(trained), str(recipe), "run.seed=6", "--out", str(tmp_path / "plain")).stdout.splitlines()
    assert text[0].startswith("per layer: share of the weights' mean square")
    assert text[-1] == f"wrote {tmp_path / 'plain'}; train it with run.start_from={tmp_path / 'plain'}"
    without_data = tool(str(trained), str(recipe), "--out", str(tmp_path / "x"), "--tokens", "4096")
    assert without_data.returncode == 2 and "--tokens 4096: has no effect without --data" in without_data.stderr


def test_the_reduced_recipe_starts_from_its_reduced_source(tmp_path: Path) -> None:
    """The two recipes that are meant for each other still are when both are small."""
    models = [f"recipes/{name}.yaml" for name in ("table2_1p7b_gqa16_2", "ours_1p7b_vha_from_gqa2")]
    grouped, virtual = (reduced(load_recipe(ROOT / path), on_cpu=True).recipe for path in models)
    source = write_checkpoint(tmp_path / "source", grouped, trained_weights(grouped), small_tokenizer())
    arguments = [str(source), str(ROOT / models[1]), "--reduced", "run.seed=7", "--out", str(tmp_path / "out")]
    result = tool(*arguments)
    assert result.returncode == 0 and "model.hidden_size: 2048 -> 64" in result.stderr.splitlines()
    made = open_checkpoint(tmp_path / "out").recipe
    assert made.model == virtual.model and (made.run.seed, made.run.name) == (7, "ours_1p7b_vha_from_gqa2_reduced")
