"""`autotune-loader demo`."""

from __future__ import annotations

import click

from autotune_loader.cli.exits import exit_code_of


@click.command("demo")
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="loader.json", show_default=True)
@click.option("--budget", default="60s", show_default=True, help="Wall time for tuning, such as 60s or 3m.")
def demo_command(output: str, budget: str) -> int:
    """Tune a small real training job.

    1,200 JPEG files are made once, in a cache folder. They are decoded, augmented and train a small CNN.

    \b
    Examples:
      autotune-loader demo
      autotune-loader demo -o loader.json --budget 30s
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader import demo
    from autotune_loader.tuning import tune as tuner

    click.echo(
        f"The training job: JPEG files in {demo.cache_folder()}, decoded and augmented, and a small CNN.", err=True
    )
    result = tuner.tune(**demo.demo_factory(), budget=budget, output=output, reuse=False, progress="on")
    click.echo(f"{result.report()}\n\nWritten to {output}. Use it: autotune-loader apply {output} --to snippet")
    return exit_code_of(result)
