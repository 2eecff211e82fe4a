"""`autotune-loader demo`."""

from __future__ import annotations

import subprocess
import sys

import click

from autotune_loader.cli.exits import FINE, exit_code_of


@click.command("demo")
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="loader.json", show_default=True)
@click.option("--budget", default="60s", show_default=True, help="Wall time for tuning, such as 60s or 3m.")
def demo_command(output: str, budget: str) -> int:
    """Tune a small real training job, then train with the result.

    1,200 JPEG files are made once, in a cache folder. They are decoded, augmented and train a small CNN. A second
    process then loads the result and trains with it, as your training job will.

    \b
    Examples:
      autotune-loader demo
      autotune-loader demo -o loader.json --budget 30s
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader import demo
    from autotune_loader.tuning import tune as tuner

    folder = demo.cache_folder()
    click.echo(f"The training job: JPEG files in {folder}, decoded and augmented, and a small CNN.", err=True)
    result = tuner.tune(**demo.demo_factory(), budget=budget, output=output, reuse=False, progress="on")
    click.echo(result.report())
    code = exit_code_of(result)
    if code != FINE:
        return code
    click.echo(f"\nWritten to {output}. Now a second process loads it and trains:\n")
    sys.stdout.flush()  # or the other process' lines would come first
    return run_training_job(output)


def run_training_job(path: str) -> int:
    """Train with the file in a process of its own; its exit code."""
    return subprocess.run([sys.executable, "-m", "autotune_loader.demo", path], check=False).returncode
