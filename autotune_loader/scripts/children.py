"""Processes that a script starts are looked at as the script itself is: `sitecustomize` calls `begin` in each."""

from __future__ import annotations

from autotune_loader.scripts.hook import Hook
from autotune_loader.scripts.plan import Plan


def begin() -> None:
    """Find this process' loaders, as the plan that was handed on says."""
    plan = Plan.handed_on()
    if plan is not None:
        Hook(plan).install()
