from __future__ import annotations

import pytest

from tests.generate.cases import CASES, UNTIED, Case, export_grouped
from vha_paddle.generate.model import TextModel


@pytest.fixture(scope="package", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    num_kv_heads, model = request.param
    return export_grouped(tmp_path_factory.mktemp("grouped"), num_kv_heads, **model)


@pytest.fixture(scope="package")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return export_grouped(tmp_path_factory.mktemp("gqa"), 2, **UNTIED)


@pytest.fixture(scope="package")
def exported(gqa: Case) -> TextModel:
    return TextModel.load(gqa.directory)
