from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

# What costs start-up time and is needed only by those who tune.
LAZY = ("optuna", "pandas", "psutil", "pynvml", "rich", "matplotlib")
PUBLIC = {
    *("AutoLoader", "Comparison", "DevicePrefetcher", "LoaderConfig", "TunerError", "TuningResult", "TwinSampler"),
    *("__version__", "compare", "enable", "load_config", "tune", "ConfigFileError", "MachineMismatchError"),
    *("MissingExtraError", "PlatformError", "WorkloadError"),
}


def modules_after(statement: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter that ran `statement`."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return set(json.loads(output))


@pytest.mark.process
def test_importing_the_package_leaves_heavy_dependencies_alone() -> None:
    by_torch = modules_after("import torch")  # which may change with its version
    assert (modules_after("import autotune_loader") - by_torch).isdisjoint(LAZY)


def test_all_names_exactly_the_public_surface_and_every_name_can_be_imported() -> None:
    import autotune_loader

    assert set(autotune_loader.__all__) == PUBLIC
    assert [name for name in PUBLIC if getattr(autotune_loader, name, None) is None] == []
    assert autotune_loader.__version__ == importlib.metadata.version("autotune-loader")
