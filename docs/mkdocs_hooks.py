"""MkDocs hook: the version at the foot of each page."""

from __future__ import annotations

from typing import Any


def on_config(config: Any) -> Any:
    """The version that the pages describe, at the foot of each."""
    from autotune_loader.version import __version__

    config.copyright = f"autotune_loader {__version__}"
    return config
