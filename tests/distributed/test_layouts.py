"""Every layout trains as one process does: losses, every gradient, weights after clipped AdamW steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cases import CASES, LAYOUTS, NUM_STEPS, Case, num_ranks, starting_weights
from tests.distributed.launch import run_ranks
from tests.tolerances import FLOAT32, FLOAT64, assert_close
from vha_paddle.tensor_file import TensorFile, read_tensors, write_tensors

WORKER = Path(__file__).with_name("equivalence_worker.py")
TOLERANCE = {"float32": FLOAT32, "float64": FLOAT64}
MANY = [layout for layout in LAYOUTS if layout != "one"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every layout once over all cases, from the same starting weights."""
    directory = tmp_path_factory.mktemp("layouts")
    for case in CASES:
        weights = starting_weights(case)
        path = directory / f"{case.name}.start.safetensors"
        specs = {name: (array.dtype, array.shape) for name, array in weights.items()}
        write_tensors(path, specs, weights.values(), {})
    for layout in LAYOUTS:
        run_ranks(WORKER, num_ranks(layout), [str(directory), layout], timeout=900)
    return directory


def read(results: Path, case: Case, layout: str, dtype: str) -> TensorFile:
    return read_tensors(results / f"{case.name}.{layout}.{dtype}.safetensors")


@pytest.mark.parametrize(
    ("case", "layout", "dtype"),
    [(case, layout, dtype) for case in CASES for layout in MANY if case.fits(layout) for dtype in case.dtypes],
    ids=lambda value: getattr(value, "name", value),
)
class TestALayoutEqualsOneProcess:
    def test_losses_before_and_in_training_and_gradient_norms(
        self, results: Path, case: Case, layout: str, dtype: str
    ) -> None:
        one, many = read(results, case, "one", dtype), read(results, case, layout, dtype)
        for name in ("evaluation", "losses", "norms", "group_norms"):
            assert_close(many.array(name), one.array(name), TOLERANCE[dtype], name)

    @pytest.mark.parametrize("what", ["gradient", "weight"])
    def test_every_tensor(self, results: Path, case: Case, layout: str, dtype: str, what: str) -> None:
        one, many = read(results, case, "one", dtype), read(results, case, layout, dtype)
        names = [name for name in one if name.startswith(what)]
        assert len(names) == len(starting_weights(case))
        for name in names:
            assert np.abs(one.array(name)).max() > 0, f"{name} is zero, so it proves nothing"
            assert_close(many.array(name), one.array(name), TOLERANCE[dtype], name)


@pytest.mark.parametrize("case", [case for case in CASES if "experts" in case.model], ids=lambda case: case.name)
def test_load_and_biases_of_the_routers_are_those_of_one_process_exactly(results: Path, case: Case) -> None:
    one = read(results, case, "one", "float64")
    names = [name for name in one if name.startswith("router/")]
    assert len(names) == case.layers * (2 if "router_bias_update_rate" in case.model["experts"] else 1)
    for layout in filter(case.fits, MANY):
        many = read(results, case, layout, "float64")
        for name in names:
            assert np.array_equal(many.array(name), one.array(name)), f"{name} under {layout}"


def test_clipping_was_active(results: Path) -> None:
    for case in CASES:
        norms = read(results, case, "one", "float64").array("norms")
        assert norms.shape == (NUM_STEPS,) and (norms > case.recipe().optim.max_grad_norm).all()
