"""What the tests of exports share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from export.models import Case, build
from urank.export.onnx import Export, export_onnx
from urank.export.vespa import export_vespa


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, str], Export]:
    """The export of a case, made once."""

    @cache
    def get(case: Case, kind: str) -> Export:
        folder = tmp_path_factory.mktemp("exported") / kind
        return {"onnx": export_onnx, "vespa": export_vespa}[kind](build(case), folder)

    return get
