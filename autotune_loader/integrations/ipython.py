"""Notebooks: `%load_ext autotune_loader`, then `%%watch` at the top of a cell, or `%%watch run`."""

from __future__ import annotations

from typing import Any

from autotune_loader import enable


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext autotune_loader`."""

    def watch(line: str, cell: str) -> None:
        """Report how long a cell waits for data. `%%watch run` tunes its loaders; `--allow-workers` those without, too."""
        verb: Any
        verb, *options = words if (words := line.split())[:1] in (["watch"], ["run"]) else ("watch", *words)
        if options not in ([], ["--allow-workers"][verb == "watch" :]):
            raise ValueError(f"%%watch {line} is not known. Try %%watch run --allow-workers.")
        if not cell.startswith("%%"):
            cell = f"# %%watch\n{cell}"  # so that lines have the numbers that the notebook shows
        with enable(verb, allow_workers=bool(options)):
            ran = shell.run_cell(cell)
        if (error := ran.error_before_exec or ran.error_in_exec) is not None:
            error._render_traceback_ = list  # it has been shown; raised again, it ends a notebook that runs by itself
            raise error

    shell.register_magic_function(watch, magic_kind="cell", magic_name="watch")
