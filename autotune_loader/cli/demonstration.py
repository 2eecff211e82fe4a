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

    The second process is one of its own, as your training job will be.

    1,200 JPEG files are made once, in a cache folder; they are decoded, augmented and train a small CNN.

    \b
    Examples:
      autotune-loader demo
      autotune-loader demo -o loader.json --budget 30s
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader import demo
    from autotune_loader.report.tables import stage_lines
    from autotune_loader.tuning import tune as tuner

    click.echo(
        f"The training job: JPEG files in {demo.cache_folder()}, decoded and augmented, and a small CNN.", err=True
    )
    result = tuner.tune(**demo.demo_factory(), budget=budget, output=output, reuse=False, progress="on")
    click.echo(result.report())
    click.echo(f"\nWritten to {output}. Now a second process loads it and trains, as a training job would:\n")
    sys.stdout.flush()  # or the other process' lines would come first
    code = exit_code_of(result)
    if code != FINE:
        return code
    code = run_training_job(output)
    lines = stage_lines(result.stage_times, most=3)
    click.echo("\n".join(["\nWhat would make it faster still, the largest first:", *lines]) if lines else "")
    return code


def run_training_job(path: str) -> int:
    """Train with the file in a process of its own, whose output is ours; its exit code."""
    return subprocess.run([sys.executable, "-m", "autotune_loader.demo", path], check=False).returncode
