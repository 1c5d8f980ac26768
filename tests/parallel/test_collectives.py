"""How gradients are joined for their sums. The sums themselves are tested in tests/distributed."""

from __future__ import annotations

import paddle
import pytest

from vha_paddle.parallel import collectives


def test_buckets_hold_each_gradient_once_in_order_and_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_BUCKET_ELEMENTS", 10)
    sizes = [(4, "float32"), (6, "float32"), (1, "float32"), (30, "float32"), (2, "float32"), (2, "float64")]
    gradients = [paddle.full([size], float(number), dtype) for number, (size, dtype) in enumerate(sizes)]
    buckets = [[int(gradient[0]) for gradient in bucket] for bucket in collectives._buckets(gradients)]
    assert buckets == [[0, 1], [2], [3], [4], [5]]
