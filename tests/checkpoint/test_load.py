"""Loading: tensors that do not fit the model, or that mean something else, are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import SMALL_VHA, small_recipe, trained_weights, write_checkpoint
from vha_paddle.checkpoint import layout
from vha_paddle.checkpoint.load import find_damage, load_parameters, open_together
from vha_paddle.errors import UserError
from vha_paddle.model.decoder import build_decoder
from vha_paddle.parallel.mesh import Mesh

RECIPE = small_recipe(SMALL_VHA)
NAME = "model.layers.1.self_attn.q_proj.weight"


class TwoRanks(Mesh):
    """Rank 0 of two; the other one answers `theirs`: its names, or its fault where ranks exchange faults."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(num_ranks=2)
        object.__setattr__(self, "theirs", theirs)

    def objects(self, value: Any) -> list[Any]:
        theirs = vars(self)["theirs"]
        return [value, theirs if isinstance(value, list) or not isinstance(theirs, list) else None]


def load(path: Path, weights: dict[str, np.ndarray], num_files: int = 1) -> None:
    write_checkpoint(path, RECIPE, weights, b"a tokenizer", num_files)
    model = build_decoder(RECIPE.model, Mesh(), seed=0)
    load_parameters(model.named_tensors(), layout.open_checkpoint(path).model_tensors(), Mesh())
    for name, parameter in model.named_tensors().items():
        assert np.array_equal(parameter.numpy(), weights[name]), name


def test_every_parameter_takes_the_value_of_the_file(tmp_path: Path) -> None:
    load(tmp_path / "checkpoint", trained_weights(RECIPE))


def test_every_parameter_takes_the_value_of_its_parts(tmp_path: Path) -> None:
    load(tmp_path / "checkpoint", trained_weights(RECIPE), num_files=2)


def test_a_tensor_of_another_pipeline_stage_is_not_left_over(tmp_path: Path) -> None:
    weights = trained_weights(RECIPE)
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, weights | {"elsewhere": np.zeros(3)}, b"a tokenizer")
    tensors = layout.open_checkpoint(path).model_tensors()
    parameters = build_decoder(RECIPE.model, Mesh(), seed=0).named_tensors()
    load_parameters(parameters, tensors, TwoRanks(["elsewhere"]))
    with pytest.raises(UserError, match="unexpected tensor elsewhere"):
        load_parameters(parameters, tensors, TwoRanks([]))


def test_ranks_that_open_a_checkpoint_together_digest_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer", num_files=3)
    digested: list[str] = []

    def recording(file: Path, *arguments: Any) -> str:
        digested.append(file.name)
        return sha256_of(file, *arguments)

    sha256_of = layout.sha256_of
    monkeypatch.setattr(layout, "sha256_of", recording)
    for rank in range(3):
        layout.open_checkpoint(path, rank, 3)
    listed = [entry.name for entry in path.iterdir() if entry.name != layout.MANIFEST_FILE]
    assert sorted(digested) == sorted(listed) and len(listed) == 7


def test_damage_that_another_rank_found_is_an_error_here_too(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    assert open_together(path, TwoRanks(None)).path == path
    with pytest.raises(UserError, match="file x differs"):
        open_together(path, TwoRanks("file x differs"))


def test_a_tensor_left_over_is_refused(tmp_path: Path) -> None:
    weights = trained_weights(RECIPE)
    with pytest.raises(UserError, match="unexpected tensor model.layers.2.extra"):
        load(tmp_path / "checkpoint", weights | {"model.layers.2.extra": np.zeros(3, np.float32)})


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    weights = trained_weights(RECIPE)
    del weights[NAME]
    with pytest.raises(UserError, match=f"tensor {NAME} is missing"):
        load(tmp_path / "checkpoint", weights)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    weights = trained_weights(RECIPE)
    weights[NAME] = np.ascontiguousarray(weights[NAME].T)
    with pytest.raises(UserError, match=rf"{NAME} has shape \[24, 20\], the model needs \[20, 24\]"):
        load(tmp_path / "checkpoint", weights)


@pytest.mark.parametrize(("key", "value"), [("head_order", "head_major"), ("linear_layout", "out_in")])
def test_a_file_of_another_orientation_or_head_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(layout.TENSOR_METADATA, key, value)
        path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    with pytest.raises(UserError, match=f"metadata {key}={value}: must be {layout.TENSOR_METADATA[key]}"):
        layout.open_checkpoint(path).model_tensors()


@pytest.mark.parametrize(
    "change", [{"step": "six"}, {"step": 6.0}, {"step": -1}, {"step": None}, {"samples": -1}, {"another": 1}]
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    state = json.loads((path / layout.STATE_FILE).read_text(encoding="utf-8")) | change
    (path / layout.STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    files = [file for file in path.iterdir() if file.name != layout.MANIFEST_FILE]
    layout.write_manifest(path, {file.name: layout.record_of(file) for file in files})
    with pytest.raises(UserError, match=r"state\.json: not the state this version writes"):
        layout.open_checkpoint(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused_with_its_own(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step-00000007", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    path = path.rename(tmp_path / "step-00000099")
    with pytest.raises(UserError, match="holds step 7; rename it to step-00000007"):
        layout.open_checkpoint(path)
    assert layout.open_checkpoint(path.rename(tmp_path / "any-other-name")).state.step == 7


def test_a_tensor_that_another_rank_could_not_read_stops_this_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    tensors = layout.open_checkpoint(path).model_tensors()
    parameters = build_decoder(RECIPE.model, Mesh(), seed=0).named_tensors()

    class WithAFault(TwoRanks):
        def objects(self, value: Any) -> list[Any]:
            return [value, value if isinstance(value, list) else "tensor x is missing"]

    with pytest.raises(UserError, match="tensor x is missing"):
        load_parameters(parameters, tensors, WithAFault(None))


def test_damage_that_one_rank_sees_is_every_ranks(tmp_path: Path) -> None:
    """Each checks the digests of its share: the others must not go on with what it has found to be damaged."""
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    assert find_damage(path, TwoRanks(None)) is None
    assert find_damage(path, TwoRanks("a file differs")) == "a file differs"
    (path / layout.STATE_FILE).unlink()
    fault = f"{path}: incomplete, {layout.STATE_FILE} is missing"
    assert find_damage(path, TwoRanks(None)) == find_damage(path, Mesh()) == fault


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
    ],
    ids=["missing", "cut", "a bit", "empty", "a directory", "a link"],
)
@pytest.mark.parametrize("content", ["model", "optimizer", "recipe", "tokenizer", "state", "manifest"])
def test_any_damage_to_any_file_is_seen(tmp_path: Path, damage: Callable[[Path], Any], content: str) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", RECIPE, trained_weights(RECIPE), b"a tokenizer")
    damage(next(path.glob(f"{content}*")))
    fault = find_damage(path, Mesh())
    assert fault is not None and str(path) in fault


def test_a_file_of_another_run_is_seen(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other")]
    for scale, path in enumerate(paths, 1):
        weights = {name: array * np.float32(scale) for name, array in trained_weights(RECIPE).items()}
        write_checkpoint(path, RECIPE, weights, b"a tokenizer")
    name = next(path.name for path in paths[0].glob("model-*"))
    shutil.copy(paths[1] / name, paths[0] / name)
    assert find_damage(paths[0], Mesh()) == f"{paths[0] / name}: differs from the manifest (damaged or edited)"
