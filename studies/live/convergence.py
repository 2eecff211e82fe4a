"""How soon is AutoLoader as fast as the best fixed configuration, and what does finding it cost?

    python -m studies.live.convergence wait_light_tail ...     # 150 s each; adds to results/convergence.jsonl
    python -m studies.live.convergence --disturb               # samples turn four times slower half-way
    python -m studies.live.convergence wait_light_tail --neighbours --seconds 90   # two busy processes from 30 s to 60 s
    python -m studies.live.convergence wait_light_tail --hyperloader /tmp/hyperloader/python    # with it as a rival
    python -m studies.live.convergence wait_light_tail --two-loaders               # training and validation in turn
    python -m studies.live.convergence wait_light_tail --seconds 300               # five minutes
    python -m studies.live.convergence text --step-threads                         # it may also try fewer threads for the step
    python -m studies.live.convergence --table                 # the table, from what was kept; no measuring
    python -m studies.live.convergence --plots                 # the pictures

Of each workload, in one go and in processes of their own: a survey of fixed configurations by a plain DataLoader with a
stopwatch (`studies.regret.bench`); a cold AutoLoader; `tune()`; then paired rounds of what each chose, torch's default,
workers = cores and the best of the survey. "Best fixed" is the fastest of these rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from autotune_loader.values.config import LoaderConfig
from studies.regret.bench import ROOT, Bench, BenchError, Timing
from studies.regret.load import BUSY, beside
from studies.regret.oracle import config_of, key

RESULTS = Path(__file__).parent / "results"
RECORDS = RESULTS / "convergence.jsonl"
SURVEYED = (0, 1, 2, 4, 7, 10, 14, 18)
SURVEY_S, ROUND_S, ROUNDS = 0.8, 1.5, 3
LIVE_S, HORIZON_S = 60.0, 120.0
SETTLED_SHARE = 0.95
COLD = {**os.environ, "AUTOTUNE_LOADER_CACHE": "off"}
"""Nothing is known from an earlier run."""
SLOWER = 4.0
"""How many times longer samples take after the disturbance."""
NEIGHBOURS, COME_S, GO_S = 2, 30.0, 60.0
"""Busy processes, and when they come and go."""
TRAINED_S, VALIDATED_S = 8.0, 3.0
"""Of two loaders, how long each is iterated in turn."""
FIXED = (1, 2, 3, 4, 6, 8, 10, 12)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--disturb", action="store_true")
    parser.add_argument("--neighbours", action="store_true")
    parser.add_argument("--two-loaders", action="store_true")
    parser.add_argument("--step-threads", action="store_true")
    parser.add_argument("--hyperloader", help="folder of its Python package, such as `python` of a clone")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plots", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=LIVE_S)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.seconds)))
        return 0
    for name in options.workloads:
        if options.neighbours:
            keep(in_child(f"neighbours:{name}", options.seconds))
        if options.two_loaders:
            keep(in_child(f"two:{name}", options.seconds))
        if not (options.neighbours or options.two_loaders):
            keep(study(name, options.seconds, options.hyperloader, step_threads=options.step_threads))
    if options.disturb:
        keep(disturbed(options.seconds))
    if options.plots:
        from studies.live.plots import draw

        draw(records(), RESULTS)
    if options.table or options.workloads:
        print(table(records()))
    return 0


def study(name: str, seconds: float, hyperloader: str | None = None, *, step_threads: bool = False) -> dict[str, Any]:
    """All that is measured of one workload."""
    with Bench(name) as bench:
        known = survey(bench)
    live = in_child(f"{'threads' if step_threads else 'live'}:{name}", seconds)
    tuned = in_child(f"tune:{name}", seconds)
    rival = {} if hyperloader is None else {"hyperloader": in_child(f"hyper:{name}", seconds, path=hyperloader)}
    cores = live["cores"]
    arms = {
        "live": key(LoaderConfig.from_dict(live["config"])),
        "tune": key(LoaderConfig.from_dict(tuned["config"])),
        "default": key(LoaderConfig()),
        "cores": key(LoaderConfig(num_workers=cores)),
    }
    top = sorted(known, key=lambda each: -known[each])[:2]
    arms |= {f"survey {place}": each for place, each in enumerate(top)}
    with Bench(name) as bench:
        rounds = race(bench, list(dict.fromkeys(arms.values())))
    workload = f"{name}_step_threads" if step_threads else name
    return {"workload": workload, "survey": known, "live": live, "tune": tuned, "arms": arms, "rounds": rounds, **rival}


def survey(bench: Bench) -> dict[str, float]:
    """Samples/s of fixed configurations, one burst each; deeper queues of the best three."""
    known: dict[str, float] = {}

    def burst(config: LoaderConfig) -> None:
        try:
            timing = Timing(clock="steady", seconds=SURVEY_S, seed=10_000 + len(known))
            known[key(config)] = bench.time(config, timing).samples_per_s
        except BenchError:
            known[key(config)] = 0.0

    for workers in random.Random(0).sample(SURVEYED, len(SURVEYED)):
        burst(kept(workers, 2))
    for each in sorted(known, key=lambda each: -known[each])[:3]:
        config = config_of(each)
        if config.num_workers:
            burst(kept(config.num_workers, 8))
    return known


def kept(workers: int, prefetch: int) -> LoaderConfig:
    """A person who tunes keeps workers between epochs."""
    if not workers:
        return LoaderConfig()
    return LoaderConfig(num_workers=workers, prefetch_factor=prefetch, persistent_workers=True)


def race(bench: Bench, arms: Sequence[str]) -> list[dict[str, float]]:
    """Each once a round, in an order that is drawn, over the same samples."""
    rounds = []
    for number in range(ROUNDS):
        rates = {}
        for each in random.Random(number).sample(list(arms), len(arms)):
            try:
                timing = Timing(clock="steady", seconds=ROUND_S, seed=20_000 + number)
                rates[each] = bench.time(config_of(each), timing).samples_per_s
            except BenchError:
                continue
        rounds.append(rates)
    return rounds


def in_child(what: str, seconds: float, path: str = "") -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "studies.live.convergence", "--child", what]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds + 240,
        env={**COLD, "PYTHONPATH": os.pathsep.join(filter(None, [COLD.get("PYTHONPATH"), path]))},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def child(what: str, seconds: float) -> dict[str, Any]:
    kind, _, name = what.partition(":")
    if kind == "tune":
        return tune_once(name)
    if kind == "hyper":
        return train_hyperloader(Job(name), seconds)
    if kind == "neighbours":
        return beside_neighbours(name, seconds)
    if kind == "two":
        return two_loaders(name, seconds)
    return train_live(Job(name), seconds, step_threads="auto" if kind == "threads" else None)


class Job:
    """A workload of the regret study and its step."""

    def __init__(self, name: str) -> None:
        from autotune_loader.pipeline.workload import TrainingSide
        from autotune_loader.probe.step import build_step
        from studies.regret.bench import regret_workload

        self.study = regret_workload(name)
        side = TrainingSide(model=self.study.model, train_step=self.study.train_step)
        first = next(iter(self._plain()))
        self.step = build_step(side, first)
        for _ in range(3):
            self.step.run(first)

    def _plain(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(self.study.dataset, batch_size=self.study.batch_size, shuffle=True)

    def auto(self, **options: Any) -> Any:
        from autotune_loader import AutoLoader

        sampler = self.study.sampler
        order: dict[str, Any] = {"sampler": sampler} if sampler is not None else {"shuffle": True}
        return AutoLoader(self.study.dataset, batch_size=self.study.batch_size, drop_last=True, **order, **options)


def train_live(
    job: Job,
    seconds: float,
    events: Sequence[tuple[float, Callable[[], None]]] = (),
    step_threads: Literal["auto"] | None = None,
) -> dict[str, Any]:
    """Train from a cold start; when each batch was done, and what the loader decided.

    Args:
        job: what is trained.
        seconds: how long.
        events: what is called in its midst, and after how many seconds.
        step_threads: of the loader.
    """
    from autotune_loader.machine.limits import usable_cores

    loader = job.auto(step_threads=step_threads)
    begun = time.perf_counter()
    origin = time.monotonic()
    ends: list[float] = []
    todo = list(events)
    for batch in epochs(loader):
        job.step.run(batch)
        ends.append(time.perf_counter() - begun)
        while todo and ends[-1] > todo[0][0]:
            todo.pop(0)[1]()
        if ends[-1] > seconds:
            break
    size = job.study.batch_size
    history = loader.history
    return {
        "config": loader.config.to_dict(),
        "cores": usable_cores().usable,
        "samples": len(ends) * size,
        "seconds": ends[-1],
        "per_s": per_second(ends, size, seconds),
        "changes": changes(loader, origin),
        "settled": [float(each) for each in history[history["event"] == "settled"]["seconds"]],
        "blocks": int((history["event"] == "block").sum()),
    }


def train_hyperloader(job: Job, seconds: float) -> dict[str, Any]:
    """The same with hyperloader, which is not installed here: its folder is on the path of this process."""
    from hyperloader import DataLoader  # type: ignore[import-not-found]

    loader = DataLoader(job.study.dataset, batch_size=job.study.batch_size, shuffle=True, drop_last=True, num_workers=2)
    begun, ends = time.perf_counter(), list[float]()
    for batch in epochs(loader):
        job.step.run(batch)
        ends.append(time.perf_counter() - begun)
        if ends[-1] > seconds:
            break
    loader.close()
    size = job.study.batch_size
    return {"samples": len(ends) * size, "seconds": ends[-1], "per_s": per_second(ends, size, seconds)}


def per_second(ends: Sequence[float], size: int, seconds: float) -> list[int]:
    return [size * sum(second <= end < second + 1 for end in ends) for second in range(int(seconds))]


def changes(loader: Any, origin: float) -> list[list[Any]]:
    return [
        [change.begun - origin, change.config.num_workers, change.config.prefetch_factor, change.blocked_s]
        for change in loader.traces.changes
        if change.reason != "epoch"
    ]


def beside_neighbours(name: str, seconds: float) -> dict[str, Any]:
    """A workload beside two busy processes that come and go, and the best fixed rates without and with them."""
    job = Job(name)
    with contextlib.ExitStack() as there:

        def come() -> None:
            there.enter_context(beside([BUSY] * NEIGHBOURS))

        live = train_live(job, seconds, [(COME_S, come), (GO_S, there.close)])
    rates = {"alone": {workers: fixed_rate(job, workers) for workers in FIXED}}
    with beside([BUSY] * NEIGHBOURS):
        rates["beside neighbours"] = {workers: fixed_rate(job, workers) for workers in FIXED}
    spans = [(0.0, COME_S, "alone"), (COME_S, GO_S, "beside neighbours"), (GO_S, seconds, "alone")]
    return {"workload": f"{name}_neighbours", "live": live, "fixed": rates, "spans": spans}


def two_loaders(name: str, seconds: float) -> dict[str, Any]:
    """Training and validation in turn, each by an AutoLoader of its own, which is broken off after its time."""
    job, begun, origin = Job(name), time.perf_counter(), time.monotonic()
    loaders = {"training": job.auto(), "validation": job.auto()}
    ends: dict[str, list[float]] = {each: [] for each in loaders}
    while time.perf_counter() - begun < seconds:
        for each, loader in loaders.items():
            until = time.perf_counter() - begun + (TRAINED_S if each == "training" else VALIDATED_S)
            for batch in epochs(loader):
                if each == "training":
                    job.step.run(batch)
                ends[each].append(time.perf_counter() - begun)
                if ends[each][-1] > min(until, seconds):
                    break
    size = job.study.batch_size
    two = {
        each: {"per_s": per_second(ends[each], size, seconds), "changes": changes(loader, origin)}
        for each, loader in loaders.items()
    }
    return {"workload": f"{name}_two_loaders", "two": two}


def epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def tune_once(name: str) -> dict[str, Any]:
    from autotune_loader import tune
    from autotune_loader.machine.limits import usable_cores
    from studies.regret.bench import regret_workload

    begun = time.perf_counter()
    result = tune(**regret_workload(name).to_tune_kwargs(), budget="60s", progress=False, reuse=False)
    return {
        "config": result.best.to_dict(),
        "seconds": time.perf_counter() - begun,
        "cores": usable_cores().usable,
    }


SPEED = multiprocessing.Value("d", 1.0)


def disturbed(seconds: float) -> dict[str, Any]:
    """A job with samples of 1 ms that take four times as long from half-way on, and the best fixed rates before and after."""
    from torch import nn

    from studies.workloads import AccelStep, SleepDataset, StudyWorkload

    class Shifting(SleepDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(self.waits_s[index] * (SPEED.value - 1.0))
            return super().__getitem__(index)

    job = Job.__new__(Job)
    job.study = StudyWorkload(
        name="storage_shift",
        dataset=Shifting(65_536, median_s=0.001),
        model=nn.Identity(),
        train_step=AccelStep(0.010),
        batch_size=16,
        description="samples of 1 ms that take four times as long from half-way on, 10 ms accelerator step",
        kind="wait",
    )
    from autotune_loader.pipeline.workload import TrainingSide
    from autotune_loader.probe.step import build_step

    job.step = build_step(TrainingSide(model=job.study.model, train_step=job.study.train_step), None)

    def slower() -> None:
        SPEED.value = SLOWER

    live = train_live(job, seconds, [(seconds / 2, slower)])
    rates = {}
    for factor in (1.0, SLOWER):
        SPEED.value = factor
        rates[str(factor)] = {workers: fixed_rate(job, workers) for workers in FIXED}
    spans = [(0.0, seconds / 2, "1.0"), (seconds / 2, seconds, str(SLOWER))]
    return {"workload": "storage_shift", "live": live, "fixed": rates, "spans": spans}


def fixed_rate(job: Job, workers: int, seconds: float = 2.5) -> float:
    from torch.utils.data import DataLoader

    ends: list[float] = []
    for batch in epochs(
        DataLoader(
            job.study.dataset, batch_size=job.study.batch_size, shuffle=True, num_workers=workers, prefetch_factor=4
        )
    ):
        job.step.run(batch)
        ends.append(time.perf_counter())
        if ends[-1] - ends[0] > seconds + 1.0:
            break
    late = [end for end in ends if end - ends[0] > 1.0]
    return job.study.batch_size * (len(late) - 1) / (late[-1] - late[0])


def keep(record: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with RECORDS.open("a") as file:
        file.write(json.dumps({**record, "at": time.strftime("%Y-%m-%d %H:%M")}) + "\n")


def records() -> list[dict[str, Any]]:
    """The latest of each workload."""
    latest = {each["workload"]: each for each in map(json.loads, RECORDS.read_text().splitlines())}
    return list(latest.values())


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says beside the goals of the table."""
    live, tuned, arms, rounds = (record[name] for name in ("live", "tune", "arms", "rounds"))
    rate = {each: statistics.median([r[each] for r in rounds if each in r]) for each in dict.fromkeys(arms.values())}
    best = max(rate, key=lambda each: rate[each])
    ratios = [r[arms["live"]] / r[best] for r in rounds if best in r and arms["live"] in r]
    share = statistics.median(ratios)
    first = live["samples"] / live["seconds"] / rate[best]
    late_s = HORIZON_S - live["seconds"]
    tune_s = min(tuned["seconds"], HORIZON_S)
    after = {
        "live": live["samples"] + late_s * rate[arms["live"]],
        "tune": (HORIZON_S - tune_s) * rate[arms["tune"]],
        "default": HORIZON_S * rate[arms["default"]],
        "cores": HORIZON_S * rate[arms["cores"]],
    }
    if (hyper := record.get("hyperloader")) is not None:
        late = hyper["per_s"][len(hyper["per_s"]) // 2 :]
        after["hyperloader"] = hyper["samples"] + (HORIZON_S - hyper["seconds"]) * statistics.fmean(late)
    return {
        "best": config_of(best),
        "share": share,
        "spread": (min(ratios), max(ratios)),
        "first": first,
        "reached_s": reached_s(live["per_s"], rate[arms["live"]]),
        "settled_s": live["settled"][0] if live["settled"] else None,
        "after": {name: value / (HORIZON_S * rate[best]) for name, value in after.items()},
        "tune_s": tuned["seconds"],
    }


def reached_s(per_s: Sequence[float], rate: float) -> float | None:
    """The first second from which on five seconds together reach the share that counts as settled."""
    for second in range(len(per_s) - 4):
        if sum(per_s[second : second + 5]) >= 5 * SETTLED_SHARE * rate:
            return float(second)
    return None


def table(kept_records: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| workload | best fixed | AutoLoader's | share of the best once settled (goal 98 %; least to most of the rounds) "
        "| first 60 s (90 %) | settled after | samples after 2 minutes, of the best fixed (95 %): AutoLoader | tune() + train "
        "| default | workers = cores | hyperloader 0.1 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in kept_records:
        if "rounds" not in record:
            continue
        f = figures(record)
        low, high = f["spread"]
        settled = "not in 60 s" if f["settled_s"] is None else f"{f['settled_s']:.0f} s"
        rivals = ("live", "tune", "default", "cores", "hyperloader")
        after = " | ".join(f"{f['after'][name]:.0%}" if name in f["after"] else "-" for name in rivals)
        lines.append(
            f"| `{record['workload']}` | {short(f['best'])} | {short(LoaderConfig.from_dict(record['live']['config']))} | "
            f"{f['share']:.1%} ({low:.0%} to {high:.0%}) | {f['first']:.0%} | {settled} | {after} |"
        )
    return "\n".join(lines)


def short(config: LoaderConfig) -> str:
    return f"{config.num_workers} x {config.prefetch_factor}" if config.num_workers else "0"


if __name__ == "__main__":
    sys.exit(main())
