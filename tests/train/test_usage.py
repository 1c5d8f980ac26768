"""What a run records of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import run_ranks
from tests.train.conftest import MakeRecipe
from vha_paddle.counts import FlopRule, training_flops
from vha_paddle.parallel.mesh import Mesh
from vha_paddle.train.usage import Peaks, Usage, gpu_of, peak_memory, peaks_of

WORKER = Path(__file__).with_name("usage_worker.py")


def test_shares_are_of_the_measured_and_of_the_stated_peak() -> None:
    assert Peaks(400.0, None).shares(100.0) == {"mfu": 0.25}
    assert Peaks(400.0, 500.0).shares(100.0) == {"mfu": 0.25, "mfu_of_peak": 0.2}


def test_a_peak_is_a_rate_over_the_flops_of_a_token(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {("float32", 512): 7e9}  # products that a loaded machine's scheduler leaves whole
    monkeypatch.setattr("vha_paddle.train.usage.measured_gemm_rate", lambda *asked: rates[asked])
    recipe = make_recipe()
    flops = training_flops(recipe.model, FlopRule(sequence_length=recipe.data.sequence_length, causal=True))
    assert peaks_of(recipe, 3) == Peaks(3 * 7e9 / flops, None)


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H800", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 PCIe", None), ("Tesla T4", None)],
)
def test_a_gpu_is_known_by_its_whole_name(device: str, peak: float | None) -> None:
    gpu = gpu_of(device)
    assert (None if gpu is None else gpu.bf16_flops) == peak


def test_the_peak_of_memory_counts_what_is_freed_again() -> None:
    before = peak_memory()["resident"]
    size = before + (64 << 20)  # more than this process has ever had at once
    array = np.ones(size, np.uint8)
    del array
    assert size <= peak_memory()["resident"] < 4 * size
    assert Usage(Mesh()).record(with_memory=True)["memory"]["resident"] >= size


def test_one_process_has_no_communication_and_memory_only_when_asked() -> None:
    assert Usage(Mesh()).record(with_memory=False) == {}


def test_of_several_ranks_waiting_is_counted_and_the_largest_memory_is_recorded(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, [os.fspath(tmp_path)])
    assert (tmp_path / "done").exists()
