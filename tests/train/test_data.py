"""The data of a run: blends, named validation sets, documents, and what is refused at its start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import NUM_STEPS, TOKENS, MakeRecipe
from vha_paddle.checkpoint.layout import open_checkpoint, step_directory
from vha_paddle.config import Recipe
from vha_paddle.data.indexed import write_indexed
from vha_paddle.data.tokenizer import load_tokenizer
from vha_paddle.errors import UserError
from vha_paddle.evaluate import validation_loss
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.data import RunData
from vha_paddle.train.trainer import Trainer

Sets = dict[str, Path]
EOD = 2  # of the sets, as of every SentencePiece model made here


@pytest.fixture
def sets(dataset: Path, tmp_path: Path) -> Sets:
    """Prefixes of three more sets of documents of about six tokens; `endless` has no end-of-document tokens."""
    tokenizer, generator = load_tokenizer(dataset / "tokenizer.model"), np.random.default_rng(1)
    prefixes = {}
    for name, count in (("web", 60), ("code", 40), ("endless", 60)):
        documents = [generator.integers(4, TOKENS, generator.integers(3, 9)).tolist() for _ in range(count)]
        prefixes[name] = tmp_path / "sets" / name
        write_indexed(
            prefixes[name],
            documents,
            tokenizer.vocab_size,
            eod_id=None if name == "endless" else tokenizer.eos_id,
            tokenizer_sha256=tokenizer.digest,
            source="random tokens",
        )
    return prefixes


def blend(sets: Sets, **weights: float) -> list[dict[str, Any]]:
    return [{"prefix": str(sets[name]), "weight": weight} for name, weight in weights.items()]


def trained(recipe: Recipe, stop: int = NUM_STEPS) -> Trainer:
    """A run that ends after `stop` steps as if it had been asked to."""
    trainer = Trainer(recipe, RunData(recipe), Mesh())
    trainer.fit(lambda: trainer.step == stop)
    return trainer


def records(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(recipe.run.output) / "metrics.jsonl").read_text().splitlines()]


def losses(recipe: Recipe) -> list[float]:
    return [record["loss"] for record in records(recipe)]


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_resumed_run_on_a_blend_continues_its_stream(
    make_recipe: MakeRecipe, sets: Sets, tmp_path: Path, document_mask: bool
) -> None:
    data = {"data__train": blend(sets, web=0.7, code=0.3), "data__document_mask": document_mask}
    unbroken = make_recipe(**data)
    trained(unbroken)
    broken = make_recipe(**data, run__output=str(tmp_path / "broken"), data__micro_batch_size=4)
    trained(broken, stop=4)
    continued = make_recipe(**data, run__output=str(tmp_path / "broken"))
    trained(continued)
    assert losses(continued)[4:] == pytest.approx(losses(unbroken)[4:], rel=1e-5)
    again = make_recipe(**data, run__output=str(tmp_path / "again"))
    trained(again, stop=2)
    trained(again)
    assert losses(again) == losses(unbroken)


def test_the_start_tells_tokens_and_epochs_of_each_set(
    make_recipe: MakeRecipe, sets: Sets, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(data__train=blend(sets, web=3, code=1))
    data = trained(recipe).data
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data ")]
    samples = NUM_STEPS * 4
    expected = [
        f"data {sets[name]}: {count * 16:,} tokens, {count / ((part.indexed.num_tokens - 1) // 16):.2f} epochs"
        for (name, count), part in zip(
            {"web": samples * 3 // 4, "code": samples // 4}.items(), data.batches.parts, strict=True
        )
    ]
    assert told == expected


def test_a_resume_on_another_blend_is_refused_by_name(make_recipe: MakeRecipe, sets: Sets) -> None:
    trained(make_recipe(data__train=blend(sets, web=3, code=1)), stop=3)
    sets["other"] = sets["endless"]
    for train, message in (
        (blend(sets, web=3, code=2), f"{sets['code']} had weight 1 and has 2"),
        (blend(sets, web=3, other=1), f"{sets['other']} holds other tokens than the one in its place did"),
        (str(sets["web"]), "it was a blend of 2 and is one of 1"),
    ):
        recipe = make_recipe(data__train=train)
        with pytest.raises(UserError, match="was trained on other data") as caught:
            Trainer(recipe, RunData(recipe), Mesh())
        assert message in str(caught.value) and "\n" not in str(caught.value)
    same_shares = make_recipe(data__train=blend(sets, web=0.75, code=0.25))
    assert Trainer(same_shares, RunData(same_shares), Mesh()).step == 3


def test_named_validation_sets_are_evaluated_and_logged_by_name(
    make_recipe: MakeRecipe, dataset: Path, sets: Sets, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(data__validation={"held_out": str(dataset / "validation"), "code": str(sets["code"])})
    trainer = trained(recipe)
    expected = {
        name: validation_loss(trainer.model, held_out.windows, 4, 2, Mesh())
        for name, held_out in trainer.data.validation.items()
    }
    assert list(expected) == ["held_out", "code"] and expected["held_out"] != expected["code"]
    last = records(recipe)[-1]
    assert last["val_losses"] == expected
    assert last["val_loss"] == pytest.approx(sum(expected.values()) / 2, rel=1e-12)
    told = capsys.readouterr().out
    for name, loss in expected.items():
        entropy = trainer.data.validation[name].unigram_entropy
        assert f"validation loss of {name} {loss:.4f} nats/token (unigram entropy {entropy:.4f})" in told


def test_one_validation_set_has_one_loss(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    trained(recipe)
    assert "val_loss" in records(recipe)[-1] and "val_losses" not in records(recipe)[-1]


def test_a_document_mask_reaches_training_and_evaluation(make_recipe: MakeRecipe, sets: Sets, tmp_path: Path) -> None:
    seen = {}
    for mask in (False, True):
        recipe = make_recipe(
            data__train=str(sets["web"]),
            data__validation=str(sets["code"]),
            data__document_mask=mask,
            run__output=str(tmp_path / f"masked_{mask}"),
        )
        trainer = trained(recipe)
        seen[mask] = records(recipe)
        windows = trainer.data.validation["validation"].windows
        with_mask, without = (validation_loss(trainer.model, windows, 4, 2, Mesh(), eod_id) for eod_id in (EOD, None))
        assert with_mask != without
        assert seen[mask][-1]["val_loss"] == (with_mask if mask else without)
    first = [abs(seen[True][0][key] / seen[False][0][key] - 1) for key in ("loss", "grad_norm")]
    assert min(first) > 1e-6  # maps of a fresh model attend almost evenly


def test_documents_without_ends_cannot_be_masked(make_recipe: MakeRecipe, sets: Sets) -> None:
    recipe = make_recipe(data__train=blend(sets, web=1, endless=1), data__document_mask=True)
    with pytest.raises(UserError, match=r"document_mask=true: .*endless\.json names no eod_id.*use false"):
        RunData(recipe)
    RunData(make_recipe(data__train=blend(sets, web=1, endless=1)))


def test_a_forged_manifest_does_not_let_a_token_past_the_start(make_recipe: MakeRecipe, sets: Sets) -> None:
    """The tokens are looked at, whatever the manifest says of the vocabulary."""
    tokens = np.fromfile(f"{sets['code']}.bin", dtype=np.uint16)
    tokens[5] = 320
    tokens.tofile(f"{sets['code']}.bin")
    with pytest.raises(UserError, match=r"code\.bin holds token id 320, which is not in \[0, vocab_size=320\)"):
        RunData(make_recipe(data__train=blend(sets, web=1, code=1)))


def test_a_set_that_is_there_twice_under_two_names_is_refused(make_recipe: MakeRecipe, sets: Sets) -> None:
    sets["link"] = sets["web"].with_name("link")
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{sets['link']}{suffix}").symlink_to(f"{sets['web']}{suffix}")
    recipe = make_recipe(data__train=blend(sets, web=1, link=2))
    with pytest.raises(UserError, match=r"data\.train: .*link holds the same tokens as .*web; name one of them"):
        RunData(recipe)
    recipe = make_recipe(data__train=blend(sets, web=1, code=1), data__validation={"held_out": str(sets["link"])})
    with pytest.raises(
        UserError, match=r"data\.validation: .*link holds the same tokens as the training set .*web, so"
    ):
        RunData(recipe)


@dataclass(frozen=True)
class Ranks(Mesh):
    """The main rank of a mesh whose others have given values."""

    others: tuple[object, ...] = ()

    def objects(self, value: object) -> list[object]:
        return [value, *self.others]


def test_ranks_with_other_data_are_named(make_recipe: MakeRecipe, sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with copies of their own, of which one is an old one."""
    validation = {"held_out": str(sets["endless"])}
    recipe = make_recipe(data__train=blend(sets, web=1, code=1), data__validation=validation)
    data = RunData(recipe)
    seen = data.batches.fingerprint, {"held_out": data.validation["held_out"].windows.digest}
    data.check_ranks(Ranks(others=(seen, seen)))
    old = data.batches.fingerprint.replace("1*", "2*", 1), seen[1]
    with pytest.raises(UserError, match=r"data\.train: .*web had weight 1 and has 2; rank 2 must have what rank 0 has"):
        data.check_ranks(Ranks(others=(seen, old)))
    with pytest.raises(UserError, match=r"data\.validation: held_out holds other tokens; rank 1 must have"):
        data.check_ranks(Ranks(others=((seen[0], {"held_out": "5f"}),)))
    with pytest.raises(UserError, match="rank 1 must have what rank 0 has"):
        Trainer(recipe, data, Ranks(others=(old,)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_reads_its_rows_of_the_batch(make_recipe: MakeRecipe, sets: Sets, ranks: int) -> None:
    data = RunData(make_recipe(data__train=blend(sets, web=0.7, code=0.3)))
    rows = [data.rows_of(Mesh(data_rank=rank, data_degree=ranks)) for rank in range(ranks)]
    for step in (3, 4, 11):
        read = [of_rank(step) for of_rank in rows]
        for which, whole in enumerate(data.batches.batch(step)):
            assert [len(part[which]) for part in read] == [4 // ranks] * ranks
            assert np.array_equal(np.concatenate([part[which] for part in read]), whole)


def test_the_checkpoint_says_where_in_the_stream_it_is(make_recipe: MakeRecipe, sets: Sets) -> None:
    recipe = make_recipe(data__train=blend(sets, web=0.7, code=0.3))
    trained(recipe, stop=3)
    state = open_checkpoint(step_directory(Path(recipe.run.output), 3)).state
    assert state.samples == 12
    assert state.data_fingerprint == RunData(recipe).batches.fingerprint
