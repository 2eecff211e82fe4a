"""How soon is AutoLoader as fast as the best fixed configuration, and what does finding it cost?

    python -m studies.live.convergence wait_light_tail ...         # 150 to 240 s each; prints a row of the table
    python -m studies.live.convergence text --step-threads         # it may also try fewer threads for the step
    python -m studies.live.convergence --disturb                   # samples turn four times slower half-way

Of each workload, in one go and in processes of their own: a survey of fixed configurations by a plain DataLoader with a
stopwatch (`studies.regret.oracle`); a cold AutoLoader; `tune()`; then paired rounds of what each chose, torch's default,
workers = cores and the best of the survey. "Best fixed" is the fastest of these rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Round, log_ratios, paired_ratio
from studies.regret.bench import ROOT, Bench, StudyJob, regret_workload
from studies.regret.oracle import config_of, key, leader_of, race, survey
from studies.regret.strategies import lattice_of

ROUNDS, FIRST_SEED = 3, 20_000
LIVE_S, HORIZON_S = 60.0, 120.0
SETTLED_SHARE = 0.95
COLD = {**os.environ, "AUTOTUNE_LOADER_CACHE": "off"}
"""Nothing is known from an earlier run."""
SLOWER = 4.0
"""How many times longer samples take after the disturbance."""
FIXED = (1, 2, 3, 4, 6, 8, 10, 12)
HEAD = """\
| workload | best fixed | AutoLoader's | share of the best once settled (goal 98 %; 95 % interval) | first 60 s (90 %) \
| settled after | samples after 2 minutes, of the best fixed (95 %): AutoLoader | tune() + train | default | workers = cores |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--disturb", action="store_true")
    parser.add_argument("--step-threads", action="store_true")
    parser.add_argument("--seconds", type=float, default=LIVE_S)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.seconds)))
    elif options.disturb:
        print(disturbed(options.seconds))
    else:
        print(HEAD)
        for name in options.workloads:
            print(study(name, options.seconds, step_threads=options.step_threads), flush=True)
    return 0


def study(name: str, seconds: float, *, step_threads: bool = False) -> str:
    """All that is measured of one workload, as a row of the table."""
    cores, job = usable_cores().usable, regret_workload(name)
    with Bench(name) as bench:
        known = survey(bench, lattice_of(cores, on_cpu=job.model is not None and job.train_step is None))
    live = in_child(f"{'threads' if step_threads else 'live'}:{name}", seconds)
    tuned = in_child(f"tune:{name}", seconds)
    arms = {
        "live": key(LoaderConfig.from_dict(live["config"])),
        "tune": key(LoaderConfig.from_dict(tuned["config"])),
        "default": key(LoaderConfig()),
        "cores": key(LoaderConfig(num_workers=cores)),
    }
    top = sorted(known, key=lambda each: -known[each])[:2]
    with Bench(name) as bench:
        rounds = race(bench, list(dict.fromkeys([*arms.values(), *top])), ROUNDS, FIRST_SEED)
    return row(f"{name}, step_threads" if step_threads else name, live, tuned, arms, rounds)


def row(name: str, live: dict[str, Any], tuned: dict[str, Any], arms: dict[str, str], rounds: Sequence[Round]) -> str:
    best = leader_of(rounds)
    rate = {arm: statistics.median(r.rates[arm] for r in rounds if arm in r.rates) for arm in {*arms.values(), best}}
    paired = paired_ratio(rounds, arms["live"], best) if log_ratios(rounds, arms["live"], best) else None
    share = (
        "is it"
        if arms["live"] == best or paired is None
        else f"{paired.value:.1%} ({paired.low:.0%} to {paired.high:.0%})"
    )
    settled = reached_s(live["per_s"], rate[arms["live"]])
    tune_s = min(tuned["seconds"], HORIZON_S)
    after = (
        live["samples"] + (HORIZON_S - live["seconds"]) * rate[arms["live"]],
        (HORIZON_S - tune_s) * rate[arms["tune"]],
        HORIZON_S * rate[arms["default"]],
        HORIZON_S * rate[arms["cores"]],
    )
    shares = " | ".join(f"{samples / (HORIZON_S * rate[best]):.0%}" for samples in after)
    return (
        f"| `{name}` | {short(config_of(best))} | {short(config_of(arms['live']))} | {share} "
        f"| {live['samples'] / live['seconds'] / rate[best]:.0%} "
        f"| {'not in time' if settled is None else f'{settled} s'} | {shares} |"
    )


def reached_s(per_s: Sequence[int], rate: float) -> int | None:
    """The first second from which on five seconds together reach the share that counts as settled."""
    starts = range(len(per_s) - 4)
    return next((at for at in starts if sum(per_s[at : at + 5]) >= 5 * SETTLED_SHARE * rate), None)


def short(config: LoaderConfig) -> str:
    return f"{config.num_workers} x {config.prefetch_factor}" if config.num_workers else "0"


def in_child(what: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "studies.live.convergence", "--child", what]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds + 240,
        env=COLD,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def child(what: str, seconds: float) -> dict[str, Any]:
    kind, _, name = what.partition(":")
    if kind == "tune":
        return tune_once(name)
    return train_live(Job(regret_workload(name)), seconds, step_threads="auto" if kind == "threads" else None)


class Job(StudyJob):
    """A workload that is trained for a time."""

    def ends(self, loader: Any, seconds: float) -> Iterator[float]:
        """Train for so long, whole epochs one after the other; seconds after which each batch was done."""
        begun = time.perf_counter()
        while True:
            for batch in loader:
                self.step.run(batch)
                yield (end := time.perf_counter() - begun)
                if end > seconds:
                    return


def train_live(
    job: Job, seconds: float, *, at_half: Callable[[], None] | None = None, **options: Any
) -> dict[str, Any]:
    """Train from a cold start; what the loader holds at the end, and how many samples each second had."""
    from autotune_loader import AutoLoader

    loader, ends = job.loader(AutoLoader, **options), list[float]()
    for end in job.ends(loader, seconds):
        ends.append(end)
        if at_half is not None and end > seconds / 2:
            at_half()
    size = job.workload.batch_size
    return {
        "config": loader.config.to_dict(),
        "samples": len(ends) * size,
        "seconds": ends[-1],
        "per_s": [size * sum(second <= end < second + 1 for end in ends) for second in range(int(seconds))],
    }


def tune_once(name: str) -> dict[str, Any]:
    from autotune_loader import tune

    begun = time.perf_counter()
    result = tune(**regret_workload(name).to_tune_kwargs(), budget="60s", progress=False, reuse=False)
    return {"config": result.best.to_dict(), "seconds": time.perf_counter() - begun}


SPEED = multiprocessing.Value("d", 1.0)


def disturbed(seconds: float) -> str:
    """A job with samples of 1 ms that take four times as long from half-way on: how soon it is at the new best."""
    from torch import nn

    from studies.workloads import AccelStep, SleepDataset, StudyWorkload

    class Shifting(SleepDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(self.waits_s[index] * (SPEED.value - 1.0))
            return super().__getitem__(index)

    def slower() -> None:
        SPEED.value = SLOWER

    job = Job(
        StudyWorkload(
            name="storage_shift",
            dataset=Shifting(65_536, median_s=0.001),
            model=nn.Identity(),
            train_step=AccelStep(0.010),
            batch_size=16,
            description="samples of 1 ms that take four times as long from half-way on, 10 ms accelerator step",
            kind="wait",
        )
    )
    # From 2 workers: what processes share is no proof that workers give the same, so that none would be started.
    per_s = train_live(job, seconds, at_half=slower, num_workers=2)["per_s"]
    best = max(fixed_rate(job, workers) for workers in FIXED)
    after = per_s[int(seconds / 2) :]
    reached, late = reached_s(after, best), statistics.median(after[len(after) // 2 :])
    when = "never" if reached is None else f"{reached} s after the change"
    return f"95 % of the new best: {when} (goal 20 s); the last quarter runs at {late / best:.0%} of it"


def fixed_rate(job: Job, workers: int, seconds: float = 2.5, warm_s: float = 1.0) -> float:
    from torch.utils.data import DataLoader

    loader = job.loader(DataLoader, num_workers=workers, prefetch_factor=4)
    late = [end for end in job.ends(loader, seconds + warm_s) if end > warm_s]
    return float(job.workload.batch_size * (len(late) - 1) / (late[-1] - late[0]))


if __name__ == "__main__":
    sys.exit(main())
