"""Recipe against checkpoint: what may change, what must be allowed, what cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import MakeRecipe
from vha_paddle.checkpoint.layout import open_checkpoint
from vha_paddle.config import Recipe
from vha_paddle.config.schema import Recipe as Schema
from vha_paddle.errors import UserError
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.changes import FIXED, FREE, changed_keys, refuse_changes
from vha_paddle.train.trainer import RunData, Trainer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "running.md"
WSD = {"kind": "wsd", "total_tokens": 10 * 64, "warmup_tokens": 64, "decay_tokens": 3 * 64, "min_lr": 1e-4}


def fit(recipe: Recipe, *allowed: str) -> Trainer:
    trainer = Trainer(recipe, RunData(recipe), Mesh(), allow_changed=allowed)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optim__lr": 5e-4}, r"optim.lr=0.0005 \(it was 0.001\)"),
        ({"optim__weight_decay": 0.2}, r"optim.weight_decay=0.2 \(it was 0.1\)"),
        ({"optim__decay_target": "zero"}, r"optim.decay_target=zero \(it was identity\)"),
        ({"schedule__total_tokens": 8 * 64}, r"schedule.total_tokens=512 \(it was 384\)"),
        ({"schedule__min_lr": 2e-4}, r"schedule.min_lr=0.0002 \(it was 0.0001\)"),
        ({"failure__spike_sigmas": 6.0}, r"failure.spike_sigmas=6.0 \(it was null\)"),
        ({"precision__fp8": "all"}, r"precision.fp8=all \(it was none\)"),
    ],
)
def test_a_key_that_changes_what_is_trained_is_refused_unless_allowed(
    make_recipe: MakeRecipe, change: dict[str, Any], told: str
) -> None:
    fit(make_recipe())
    checkpoint = open_checkpoint(Path(make_recipe().run.output))
    key = next(iter(change)).replace("__", ".")
    remedy = rf"{told}: differs from what step-00000006 was trained with; .* or --allow-changed {key} to change"
    with pytest.raises(UserError, match=remedy):
        refuse_changes(checkpoint, make_recipe(**change), [])
    with pytest.raises(UserError, match=remedy):
        refuse_changes(checkpoint, make_recipe(**change), ["optim.eps"])
    refuse_changes(checkpoint, make_recipe(**change), [key])


def test_several_changed_keys_are_named_together(make_recipe: MakeRecipe) -> None:
    fit(make_recipe())
    with pytest.raises(
        UserError, match=r"optim.lr=.*, optim.beta1=.* --allow-changed optim.lr --allow-changed optim.b"
    ):
        fit(make_recipe(optim__lr=5e-4, optim__beta1=0.8))


def test_an_allowed_change_is_said_and_the_next_start_needs_no_flag(
    make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(make_recipe())
    longer = make_recipe(schedule__total_tokens=8 * 64, optim__lr=5e-4)
    capsys.readouterr()
    assert fit(longer, "optim.lr", "schedule.total_tokens").step == 8
    said = capsys.readouterr().out
    assert "changed since the checkpoint: optim.lr 0.001 -> 0.0005, schedule.total_tokens 384 -> 512" in said
    fit(longer)
    fit(longer, "optim.lr")  # the same command again


@pytest.mark.parametrize(
    "change",
    [
        {"run__name": "other", "logging__interval": 5, "checkpoint__keep": 5, "failure__hang_seconds": 60.0},
        {"data__micro_batch_size": 1, "parallel__tensor": 2, "memory__recompute": "full"},
        {"failure__max_skipped_steps": 3, "checkpoint__asynchronous": True, "data__validation": None},
    ],
)
def test_what_leaves_training_as_it_was_may_change(make_recipe: MakeRecipe, change: dict[str, Any]) -> None:
    fit(make_recipe(logging__eval_interval=None))
    checkpoint = open_checkpoint(Path(make_recipe().run.output))
    refuse_changes(checkpoint, make_recipe(logging__eval_interval=None, **change), [])


@pytest.mark.parametrize(
    ("steps", "change", "free"),
    [
        (6, {"total_tokens": 20 * 64}, True),
        (6, {"decay_tokens": 2 * 64, "min_lr": 2e-4}, True),
        (7, {"total_tokens": 20 * 64}, True),  # step 8 is the first of the fall
        (8, {"total_tokens": 20 * 64}, False),
        (6, {"warmup_tokens": 2 * 64}, False),
        (6, {"decay_tokens": 5 * 64}, False),
    ],
)
def test_a_schedule_may_change_where_the_steps_done_had_the_same_rates(
    make_recipe: MakeRecipe, steps: int, change: dict[str, Any], free: bool
) -> None:
    recipe = make_recipe(schedule=WSD, checkpoint__interval=1)
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit(lambda: trainer.step == steps)
    checkpoint = open_checkpoint(Path(recipe.run.output))
    changed = make_recipe(schedule=WSD | change, checkpoint__interval=1)
    if free:
        refuse_changes(checkpoint, changed, [])
    else:
        with pytest.raises(UserError, match=f"schedule.{next(iter(change))}="):
            refuse_changes(checkpoint, changed, [])


@pytest.mark.parametrize("key", ["model.rope_theta", "run.seed", "data.global_batch_size"])
def test_what_the_state_cannot_serve_is_refused_even_if_allowed(make_recipe: MakeRecipe, key: str) -> None:
    fit(make_recipe())
    value: Any = {"model.rope_theta": 500.0, "run.seed": 12, "data.global_batch_size": 2}[key]
    with pytest.raises(UserError, match=rf"{key}=.*: step-00000006 was trained with"):
        fit(make_recipe(**{key.replace(".", "__"): value}), key)


@pytest.mark.parametrize(
    ("change", "takes_weights"),
    [
        ({"model__rope_theta": 500.0}, True),
        ({"model__attention__postmix": "silu"}, True),
        ({"model__hidden_size": 32}, False),
        ({"model__attention__postmix_rank": 1}, False),
        ({"model__num_hidden_layers": 3}, False),
        ({"run__seed": 12, "model__hidden_size": 32}, False),
    ],
)
def test_weights_are_offered_to_a_new_run_only_where_their_shapes_fit(
    make_recipe: MakeRecipe, change: dict[str, Any], takes_weights: bool
) -> None:
    fit(make_recipe())
    checkpoint = open_checkpoint(Path(make_recipe().run.output))
    with pytest.raises(UserError, match="use that, or another run.output for a new run") as caught:
        refuse_changes(checkpoint, make_recipe(**change), [])
    assert ("run.start_from" in str(caught.value)) == takes_weights
    assert ("tensors have other shapes" in str(caught.value)) != takes_weights


def test_every_entry_names_a_key_or_section_and_stands_in_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, reason in (FREE | FIXED).items():
        section, _, key = name.partition(".")
        fields = Schema.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        assert not key or key in fields, name
        assert re.search(rf"^\| `{re.escape(name)}` \| {re.escape(reason)} \|$", text, re.MULTILINE), name


def test_changed_keys_are_named_with_both_values(make_recipe: MakeRecipe) -> None:
    before, after = make_recipe(), make_recipe(parallel__tensor=2)
    assert changed_keys(before, before) == []
    assert changed_keys(before, after) == ["parallel.tensor 1 -> 2"]


JUDGED = {
    "data.document_mask",
    "optim.lr",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.weight_decay",
    "optim.decay_target",
    "optim.max_grad_norm",
    "precision.fp8",
    "failure.spike_sigmas",
}
"""Keys that change what is trained, and that a command may allow all the same."""


def test_of_every_key_of_the_schema_it_is_settled_what_a_change_means() -> None:
    """A new key must be put somewhere."""
    keys = set()
    for section, field in Schema.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)  # a schedule is one of several sections
        keys |= {section} if inner is None else {f"{section}.{key}" for key in inner}
    places = [*FREE, *FIXED, *JUDGED, "schedule"]  # of a schedule its past decides
    for key in sorted(keys):
        assert len([place for place in places if f"{key}.".startswith(f"{place}.")]) == 1, key
    assert {place for place in places if not any(f"{key}.".startswith(f"{place}.") for key in keys)} == set()
