from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune_loader.results.load import load_config, user_file
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import ConfigFileError


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and an empty user configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("AUTOTUNE_LOADER_CONFIG", raising=False)
    return tmp_path


def write(path: Path, workers: int) -> Path:
    TuningResult(best=LoaderConfig(num_workers=workers), status="complete").save(path)
    return path


def test_the_variable_comes_before_the_directory_and_the_user(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [write(nowhere / "named.json", 3), write(Path("loader.json"), 2), write(user_file(), 1)]
    monkeypatch.setenv("AUTOTUNE_LOADER_CONFIG", "named.json")
    # WHEN one after the other is taken away THEN the next is found
    assert load_config().num_workers == 3
    places[0].unlink()
    with pytest.raises(ConfigFileError, match=r"AUTOTUNE_LOADER_CONFIG='named\.json' names no file"):
        load_config()
    monkeypatch.delenv("AUTOTUNE_LOADER_CONFIG")
    assert load_config().num_workers == 2
    places[1].unlink()
    assert load_config().num_workers == 1
    places[2].unlink()
    # AND at last an error names every place
    with pytest.raises(ConfigFileError) as caught:
        load_config()
    for place in ("AUTOTUNE_LOADER_CONFIG", str(places[1].absolute()), str(places[2])):
        assert place in str(caught.value)


@pytest.mark.process
def test_reading_a_file_needs_the_standard_library_alone(nowhere: Path) -> None:
    # GIVEN a machine without torch and without what tuning needs
    write(Path("loader.json"), 3)
    blocked = "torch numpy pandas msgspec optuna click rich psutil pynvml matplotlib platformdirs jinja2"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()}))\n"
        "from autotune_loader import load_config; print(load_config('loader.json').to_kwargs()['num_workers'])"
    )
    # WHEN THEN a training job reads its configuration
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")
