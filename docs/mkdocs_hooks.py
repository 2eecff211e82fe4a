"""MkDocs hooks: the version at the foot of each page; the commands' own help, and the table of libraries of its study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MARK = "<!-- autotune-loader --help, and that of every command -->"

LIBRARIES = "<!-- studies.libraries -->"
sys.path.insert(0, str(Path(__file__).parents[1]))  # for `studies`, which is installed nowhere


def on_config(config: Any) -> Any:
    """The version that the pages describe, at the foot of each."""
    from autotune_loader.version import __version__

    config.copyright = f"autotune_loader {__version__}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text, a mark in it replaced by what is generated."""
    if LIBRARIES in markdown:
        from studies.libraries.page import table

        return markdown.replace(LIBRARIES, table())
    return markdown.replace(MARK, _help()) if MARK in markdown else markdown


def _help() -> str:
    import click

    from autotune_loader.cli.app import cli

    whole = click.Context(cli, info_name="autotune-loader", max_content_width=100)
    parts = [f"```text\n{cli.get_help(whole)}\n```"]
    parts += _help_of_commands(cli, whole, "")
    return "\n\n".join(parts)


def _help_of_commands(group: Any, parent: Any, prefix: str) -> list[str]:
    import click

    parts = []
    for name, command in sorted(group.commands.items()):
        context = click.Context(command, info_name=name, parent=parent, max_content_width=100)
        parts.append(f"## {prefix}{name}\n\n```text\n{command.get_help(context)}\n```")
        if isinstance(command, click.Group):
            parts += _help_of_commands(command, context, f"{prefix}{name} ")
    return parts
