"""How soon is AutoLoader as fast as the best fixed configuration, and what does finding it cost?

    python -m studies.live.convergence wait_light_tail ...         # 150 to 240 s each; prints a row of the table

Of each workload, in one go and in processes of their own: a survey of fixed configurations by a plain DataLoader with a
stopwatch (`studies.regret.oracle`); a cold AutoLoader; `tune()`; then paired rounds of what each chose, torch's default,
workers = cores and the best of the survey. "Best fixed" is the fastest of these rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values import LoaderConfig, Round, log_ratios
from studies.regret import OURS
from studies.regret.bench import ROOT, Bench, StudyJob
from studies.regret.child import choice_in_child
from studies.regret.oracle import config_of, counts_of, key, leader_of, paired_ratio, race, survey

ROUNDS, FIRST_SEED = 3, 20_000
LIVE_S, HORIZON_S = 60.0, 120.0
SETTLED_SHARE = 0.95
HEAD = """\
| workload | best fixed | AutoLoader's | share of the best once settled (goal 97%; 95% interval) | first 60 s (90%) \
| settled after | samples after 2 minutes, of the best fixed (95%): AutoLoader | tune() + train | default | workers = cores |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--seconds", type=float, default=LIVE_S)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train_live(options.child, options.seconds)))
    else:
        print(HEAD)
        for name in options.workloads:
            print(study(name, options.seconds), flush=True)
    return 0


def study(name: str, seconds: float) -> str:
    """All that is measured of one workload, as a row of the table."""
    with Bench(name) as bench:
        known = survey(bench, counts_of(name))
    live = live_in_child(name, seconds)
    tuned, tune_s = choice_in_child(OURS, name, 0)
    arms = {
        "live": key(LoaderConfig.from_dict(live["config"])),
        "tune": key(tuned),
        "default": key(LoaderConfig()),
        "cores": key(LoaderConfig(num_workers=usable_cores().usable)),
    }
    with Bench(name) as bench:
        top = sorted(known, key=lambda each: -known[each])[:2]
        rounds = race(bench, list(dict.fromkeys([*arms.values(), *top])), ROUNDS, FIRST_SEED)
    return row(name, live, min(tune_s, HORIZON_S), arms, rounds)


def row(name: str, live: dict[str, Any], tune_s: float, arms: dict[str, str], rounds: Sequence[Round]) -> str:
    best = leader_of(rounds)
    rate = {arm: statistics.median(r.rates[arm] for r in rounds if arm in r.rates) for arm in {*arms.values(), best}}
    paired = paired_ratio(rounds, arms["live"], best) if log_ratios(rounds, arms["live"], best) else None
    share = "is it"
    if paired is not None and arms["live"] != best:
        share = f"{paired.value:.1%} ({paired.low:.0%} to {paired.high:.0%})"
    settled = reached_s(live["per_s"], rate[arms["live"]])
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


def live_in_child(name: str, seconds: float) -> dict[str, Any]:
    """`train_live()` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "studies.live.convergence", "--child", name]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        timeout=seconds + 240,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def train_live(name: str, seconds: float) -> dict[str, Any]:
    """Train whole epochs from a cold start; what the loader holds at the end, and how many samples each second had."""
    from autotune_loader import AutoLoader

    job, ends = StudyJob(name), list[float]()
    loader, begun = job.loader(AutoLoader), time.perf_counter()
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        job.step.run(batch)
        ends.append(time.perf_counter() - begun)
        if ends[-1] > seconds:
            break
    size = job.workload.batch_size
    return {
        "config": loader.best.to_dict(),
        "samples": len(ends) * size,
        "seconds": ends[-1],
        "per_s": [size * sum(second <= end < second + 1 for end in ends) for second in range(int(seconds))],
    }


if __name__ == "__main__":
    sys.exit(main())
