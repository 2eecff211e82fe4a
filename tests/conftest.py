from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# A wall-clock limit per example fails on a machine that is busy with something else.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test finds what another one, or the user, has tuned; also not in the processes that it starts."""
    folder = tmp_path_factory.mktemp("autotune-cache")
    with pytest.MonkeyPatch.context() as patch:  # its own one: a test may undo the fixture's
        patch.setenv("AUTOTUNE_LOADER_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A model that a test makes without a seed is the same in every run."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def orphaned_segments() -> Callable[[], set[str]]:
    """Tells which of torch's shared-memory files belong to a process that has ended; others may be in use next door."""

    def names() -> set[str]:
        found = [path.name for path in Path("/dev/shm").glob("torch_*")]
        return {name for name in found if not Path("/proc", name.split("_")[1]).exists()}

    return names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only when a test asks: the rest of the suite may not need it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
