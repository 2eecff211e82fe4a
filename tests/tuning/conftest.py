"""Workers of the simulated machine fork, also where Python's default is another start method."""

import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def default_is_fork(request, monkeypatch):
    if request.node.get_closest_marker("unit"):
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
