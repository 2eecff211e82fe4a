import pytest
from report.example import synthetic_result


@pytest.fixture
def result():
    return synthetic_result()
