"""MkDocs hooks: the version at the foot of each page, and links to files that are no pages."""

from __future__ import annotations

from typing import Any


def on_config(config: Any) -> Any:
    """The version that the pages describe, at the foot of each."""
    from autotune_loader.version import __version__

    config.copyright = f"autotune_loader {__version__}"
    return config


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """A link to a file outside of docs/ leads to the repository."""
    return markdown.replace("](../", f"]({config.extra['source']}/blob/main/")
