from __future__ import annotations

import pytest
from report.example import synthetic_result

from autotune_loader.results.result import TuningResult


@pytest.fixture
def result() -> TuningResult:
    return synthetic_result()
