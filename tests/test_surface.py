from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

# What costs start-up time and is needed only by those who tune.
LAZY = ("optuna", "pandas", "psutil", "pynvml", "rich", "matplotlib")
PUBLIC = {
    "AutoLoader",
    "DevicePrefetcher",
    "LoaderConfig",
    "TunerError",
    "TuningResult",
    "__version__",
    "enable",
    "load_config",
    "tune",
}


def modules_after(statement: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter that ran `statement`."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return set(json.loads(output))


@pytest.mark.process
def test_importing_the_package_leaves_heavy_dependencies_alone() -> None:
    # GIVEN what torch itself imports (which may change with its version)
    by_torch = modules_after("import torch")
    # WHEN the package is imported in a fresh interpreter
    imported = modules_after("import autotune_loader") - by_torch
    # THEN none of the heavy ones is there
    assert imported.isdisjoint(LAZY)


def test_all_names_exactly_the_public_surface() -> None:
    import autotune_loader

    assert set(autotune_loader.__all__) == PUBLIC


def test_every_name_in_all_can_be_imported() -> None:
    import autotune_loader

    missing = [name for name in autotune_loader.__all__ if getattr(autotune_loader, name, None) is None]
    assert missing == []


def test_version_is_the_installed_one() -> None:
    import autotune_loader

    assert autotune_loader.__version__ == importlib.metadata.version("autotune-loader")


def test_gpu_metrics_come_from_nvidia_ml_py_and_not_from_the_deprecated_pynvml() -> None:
    # GIVEN the names the installed package depends on, extras included
    requirements = importlib.metadata.requires("autotune-loader") or []
    names = {re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in requirements}
    # THEN the maintained distribution of the module pynvml is there and the deprecated one is not
    assert "nvidia-ml-py" in names
    assert "pynvml" not in names
