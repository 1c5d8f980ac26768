"""A checkpoint on disk with anything about it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sources.upstream.models import config, options, weights
from tests.sources.upstream.oracle import Array, Upstream
from tests.sources.upstream.written import merged, write_config
from vha_paddle.sources.base import Source
from vha_paddle.sources.upstream import open_upstream

Open = Callable[..., Source]


@pytest.fixture
def open_changed(tmp_path: Path) -> Open:
    """Write a model with other tensors (None takes one away) and configuration (likewise), and open it."""

    def opened(
        model: Upstream,
        tensors: Mapping[str, Array | None] | None = None,
        values: Mapping[str, Any] | None = None,
        write: Callable[[Path, Mapping[str, Array]], Path] = merged,
        **stated: Any,
    ) -> Source:
        found = weights(model) | (tensors or {})
        path = write(tmp_path, {name: tensor for name, tensor in found.items() if tensor is not None})
        described = config(model) | (values or {})
        write_config(path, {key: value for key, value in described.items() if value != "absent"})
        given = options(model) | stated
        return open_upstream(path, **{key: value for key, value in given.items() if value is not None})

    return opened
