"""Steps that are skipped: which, what they leave alone, and that a resumed run skips as an unbroken one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import MEASURED, NUM_STEPS, MakeRecipe
from tests.train.test_experts import MIXTURE
from vha_paddle.checkpoint.layout import list_steps, open_checkpoint, step_directory
from vha_paddle.checkpoint.retention import last_good_step
from vha_paddle.config import Recipe
from vha_paddle.config.schema import Failure
from vha_paddle.errors import RunError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train import skips as skips_module
from vha_paddle.train import step as step_module
from vha_paddle.train.schedule import learning_rate
from vha_paddle.train.skips import Skips
from vha_paddle.train.trainer import RunData, Trainer

ACCUMULATE = step_module.accumulate_gradients


def fit(recipe: Recipe) -> Trainer:
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit()
    return trainer


def records(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.run.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    loaded = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN is no JSON
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in loaded]


def checkpoints(recipe: Recipe) -> dict[str, bytes]:
    output = Path(recipe.run.output) / "checkpoints"
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


class Spoiled:
    """Makes what some steps compute unusable, by their first sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, steps: dict[int, str]) -> None:
        batch = recipe.data.global_batch_size

        def spoiled(model: Any, tokens_BS: Any, labels_BS: Any, first_sample: int, *rest: Any) -> float:
            loss = ACCUMULATE(model, tokens_BS, labels_BS, first_sample, *rest)
            what = steps.get(first_sample // batch + 1)
            if what == "gradient":
                gradient = model.parameters()[-1].grad
                gradient.set_value(gradient * float("inf"))
            return {"loss": math.nan, "spike": loss + 5.0}.get(what or "", loss)

        monkeypatch.setattr(step_module, "accumulate_gradients", spoiled)


@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_takes_its_batch_and_leaves_the_state(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, what: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = make_recipe(checkpoint={"interval": 1, "keep": 9}, **changes)
    Spoiled(monkeypatch, recipe, {3: what})
    fit(recipe)
    found = records(recipe)
    assert [record["step"] for record in found if "skipped" in record] == [3]
    assert "not finite" in found[2]["skipped"] and found[2]["skipped_steps"] == 1 and "moe" not in found[2]
    before, after = (open_checkpoint(step_directory(Path(recipe.run.output), step)) for step in (2, 3))
    for content in ("model_tensors", "optimizer_tensors", "router_tensors"):
        old, new = getattr(before, content)(), getattr(after, content)()
        assert list(old) == list(new)
        for name in old:
            assert np.array_equal(old.array(name), new.array(name)), name
    assert (after.state.samples, after.state.skipped, after.state.skipped_in_a_row) == (12, 1, 1)
    assert found[3]["lr"] == learning_rate(recipe.schedule, recipe.optim.lr, 4 * recipe.tokens_per_step)

    # the fourth batch on the weights after two steps, and no memory of the third in anything: without the third batch
    monkeypatch.undo()
    left_out = make_recipe(run__output=str(tmp_path / "left_out"), checkpoint__interval=1, **changes)
    other = Trainer(left_out, RunData(left_out), Mesh())
    other._train_one(), other._train_one()
    other.step += 1
    record = other._train_one()
    for key in ("step", "loss", "grad_norm", "lr", *(("moe",) if changes else ())):
        assert record[key] == found[3][key], key


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_with_skips_resumed_anywhere_is_bit_equal(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr(skips_module, "SPIKE_WINDOW", 2)
    recipe = make_recipe(
        checkpoint={"interval": 1, "keep": 9, "asynchronous": asynchronous}, failure__spike_sigmas=50.0
    )
    Spoiled(monkeypatch, recipe, {2: "gradient", 4: "spike", 6: "loss"})
    fit(recipe)
    unbroken = records(recipe), checkpoints(recipe)
    assert [record["step"] for record in unbroken[0] if "skipped" in record] == [2, 4, 6]
    assert "sigma above the mean" in unbroken[0][3]["skipped"]
    for last in range(1, NUM_STEPS):
        for step in range(last + 1, NUM_STEPS + 1):
            shutil.rmtree(step_directory(Path(recipe.run.output), step))
        fit(recipe)
        assert (records(recipe), checkpoints(recipe)) == unbroken


def test_past_the_budget_the_run_ends_and_names_the_last_good_checkpoint(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good one is kept though `keep` newer ones, from after skipped steps, are there."""
    recipe = make_recipe(checkpoint={"interval": 1, "keep": 1}, failure__max_skipped_steps=2)
    Spoiled(monkeypatch, recipe, dict.fromkeys(range(3, 7), "gradient"))
    with pytest.raises(RunError, match=r"step 5: .*not finite; steps skipped: 3, .*steps=2; .*/step-00000002; look"):
        fit(recipe)
    assert list_steps(Path(recipe.run.output)) == [2, 4]
    assert last_good_step(Path(recipe.run.output)) == 2
    with pytest.raises(RunError, match="step 5"):
        fit(recipe)  # the count is the checkpoint's
    fit(make_recipe(checkpoint={"interval": 1, "keep": 1}, failure__max_skipped_steps=4))
    assert list_steps(Path(recipe.run.output)) == [2, NUM_STEPS]


def test_a_run_that_may_skip_nothing_ends_at_the_first(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(failure__max_skipped_steps=0)
    Spoiled(monkeypatch, recipe, {2: "loss"})
    with pytest.raises(RunError, match=r"step 2: loss nan .*: not finite; .*nothing was saved yet"):
        fit(recipe)


def test_a_loss_is_compared_with_the_window_of_those_applied() -> None:
    generator = np.random.default_rng(0)
    losses = (3 + 0.1 * generator.standard_normal(500)).tolist()
    rules = Failure(spike_sigmas=6.0)
    skips = Skips(rules)
    for number, loss in enumerate(losses):
        window = np.array(losses[max(0, number - 128) : number])
        if number < 128:
            assert skips.fault(1e9, 1.0) is None  # not enough to compare with
        else:
            limit = window.mean() + 6 * window.std()
            assert skips.fault(limit + 1e-9, 1.0) is not None and skips.fault(limit - 1e-9, 1.0) is None
            skips.skipped()
        skips.applied(loss)
    again = Skips(rules, skips.total, skips.in_a_row, json.loads(json.dumps(skips.losses)))
    assert (again.losses, again.total, again.in_a_row) == (skips.losses, 372, 0)
    assert len(skips.losses) == 128 and skips.losses[-1] == losses[-1]


def test_without_the_key_nothing_is_remembered_and_no_spike_found() -> None:
    skips = Skips(Failure())
    for _ in range(200):
        skips.applied(1.0)
    assert skips.losses == () and skips.fault(1e9, 1e9) is None
