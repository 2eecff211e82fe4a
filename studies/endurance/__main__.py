"""How much breaks in 1,000 trials of which most are in trouble: hangs, leftovers, lost studies, growth of the parent?

    python -m studies.endurance --trials 1000 --seed 0

Every trial goes the way of a real one: asked from a study with a journal, vetoed or burst in the real probe process, told.
Bursts last some hundredths of a second and deadlines a second, so that the trouble is what takes the time. A study has 50
trials; at its end it is opened anew, as a resumed run would, and must hold all of them.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe

from autotune_loader.decision.space import BatchCost, Limits, Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.processes import process_group_members
from autotune_loader.tuning.study import OptunaStudy
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial
from studies.endurance.faults import MIX, workload

TRIALS_PER_STUDY = 50
HEALTHY = BurstPlan(min_s=0.05, max_s=0.05, relative_error=0.5, deadline_s=20.0)
STUCK = BurstPlan(min_s=0.05, max_s=0.05, relative_error=0.5, deadline_s=1.5)
HOARDING = BurstPlan(min_s=15.0, max_s=15.0, relative_error=1e-6, deadline_s=30.0)
# So long may a trial take beyond its deadline: ending the old probe process and starting a new one on a busy machine.
RESTART_S = 40.0
MEMORY_BUDGET_BYTES = 1500 << 20
# A configuration that no shared memory holds: 64 workers with 64 batches each of a planned 64 MiB.
TOO_LARGE = LoaderConfig(num_workers=64, prefetch_factor=64)
SPACE = Space(max_workers=64, limits=Limits(shm_bytes=8 << 30), batch=BatchCost(bytes=64 << 20, tensors=1))

Drawn = tuple[str, frozenset[str], LoaderConfig]


class Tally:
    """What happened, over all studies."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.hangs = self.escaped = self.lost_trials = self.lost_studies = self.unhealthy = self.trials = 0
        self.leftovers: list[str] = []
        self.surprises: list[str] = []
        self.rss_bytes: dict[int, int] = {}
        self.slowest_s = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally, begun = Tally(), time.monotonic()
    for study in range(-(-options.trials // TRIALS_PER_STUDY)):
        count = min(TRIALS_PER_STUDY, options.trials - study * TRIALS_PER_STUDY)
        run_study(random.Random(f"{options.seed}-{study}"), count, tally)
    print_report(tally, options, time.monotonic() - begun)
    return 1 if tally.hangs or tally.leftovers or tally.lost_studies or tally.escaped else 0


def run_study(rng: random.Random, count: int, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fault, journal = Path(folder, "fault"), Path(folder, "study.journal")
        fault.write_text("none")
        before = leavings()
        payload = Payload.of(workload(fault), 1 << 30)
        probe = ProcessProbe(payload, inspect_machine(), memory_budget_bytes=MEMORY_BUDGET_BYTES)
        book = open_ledger(journal)
        pids: set[int] = set()
        for number in range(count):
            run_trial(number, draw(rng), probe, book, fault, tally)
            pids |= {probe._child.pid} if probe._child else set()
            tally.trials += 1
            tally.rss_bytes[tally.trials] = psutil.Process().memory_info().rss
        fault.write_text("none")
        tally.unhealthy += not isinstance(probe.burst(LoaderConfig(num_workers=1), HEALTHY), Measurement)
        probe.close()
        payload.close()
        book.close()
        told = len(open_ledger(journal).restored())
        tally.lost_trials += count - told
        tally.lost_studies += told != count
        tally.leftovers += left_behind(before, pids)


def run_trial(number: int, drawn: Drawn, probe: ProcessProbe, book: OptunaStudy, fault: Path, tally: Tally) -> None:
    name, right, config = drawn
    fault.write_text(name)
    claim = book.ask(config)
    plan = HOARDING if "hoard" in name else STUCK if "hang" in name else HEALTHY
    begun = time.monotonic()
    print(f"trial {tally.trials}: {name} with {config}", file=sys.stderr)
    faulthandler.dump_traceback_later(plan.deadline_s + 3 * RESTART_S, exit=True)  # a trial that never comes back
    try:
        outcome: Measurement | Failure = SPACE.veto(config) or probe.burst(config, plan)
    except WorkloadError as error:  # the third sample that raises ends a run
        outcome = Failure(kind="user_exception", phase="batches", message=error.message)
    except Exception as error:
        tally.escaped += 1
        outcome = Failure(kind="crashed", phase="plan", message=f"escaped: {error!r}")
    faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - begun
    tally.slowest_s = max(tally.slowest_s, seconds)
    tally.hangs += seconds > plan.deadline_s + RESTART_S
    kind = outcome.kind if isinstance(outcome, Failure) else "ok"
    tally.outcomes[name, kind] += 1
    if kind not in right:
        said = str(outcome.traceback or outcome.message)[-600:] if isinstance(outcome, Failure) else "it worked"
        tally.surprises.append(f"{name} with {config.num_workers} workers: {kind}: {said}")
    failure, measured = (outcome, None) if isinstance(outcome, Failure) else (None, outcome)
    book.tell(
        claim,
        Trial(number=number, config=config, failure=failure, measurement=measured, seconds=seconds),
    )


def draw(rng: random.Random) -> Drawn:
    """A fault, the outcomes that are right for it, and a configuration in which it shows."""
    if rng.random() < 0.06:
        return "too large", frozenset({"infeasible"}), TOO_LARGE
    name, _, right = rng.choices(MIX, weights=[weight for _, weight, _ in MIX])[0]
    needs_worker = "-worker" in name or name.startswith("start")
    workers = rng.choice([1, 2, 3] if needs_worker else [0, 0, 1, 2, 3])
    if "hoard" in name:
        workers = 1
    return name, right, LoaderConfig(num_workers=workers, prefetch_factor=rng.choice([1, 2, 4]) if workers else None)


def open_ledger(journal: Path) -> OptunaStudy:
    return OptunaStudy(storage=str(journal), name="endurance", space=SPACE, search="random", seed=0)


def leavings() -> dict[str, set[str]]:
    """What of ours there is: descendants, descriptors, and segments whose process is gone."""
    children = {f"{each.pid} {each.name()}" for each in psutil.Process().children(recursive=True)}
    orphans = {
        path.name for path in Path("/dev/shm").glob("torch_*") if not Path("/proc", path.name.split("_")[1]).exists()
    }
    descriptors = {path.name for path in Path("/proc/self/fd").iterdir()}
    return {"process": children, "segment": orphans, "descriptor": descriptors}


def left_behind(before: dict[str, set[str]], pids: set[int]) -> list[str]:
    """What is there now and was not before; what was killed gets a moment to vanish."""
    deadline = time.monotonic() + 5
    while True:
        now = leavings()
        found = [f"{kind} {name}" for kind, names in now.items() for name in sorted(names - before[kind])]
        found += [f"group member {pid}" for leader in pids for pid in process_group_members(leader)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def print_report(tally: Tally, options: argparse.Namespace, seconds: float) -> None:
    print(f"{tally.trials} trials (seed {options.seed}) in {seconds:.0f} s; the slowest took {tally.slowest_s:.1f} s\n")
    print(f"hangs                    {tally.hangs}")
    print(f"leftovers                {len(tally.leftovers)} {' '.join(tally.leftovers[:9])}")
    print(f"lost studies             {tally.lost_studies} ({tally.lost_trials} trials)")
    print(f"studies not well at end  {tally.unhealthy}")
    print(f"escaped exceptions       {tally.escaped}")
    for number in (100, 200, 500, 1000):
        if number in tally.rss_bytes:
            print(f"parent RSS at {number:>5}      {tally.rss_bytes[number] / 2**20:.1f} MiB")
    print(f"outcomes not as expected {len(tally.surprises)}")
    print("".join(f"    {line}\n" for line in tally.surprises[:20]))
    print("| fault | outcome | times |\n|---|---|---|")
    for (name, kind), times in sorted(tally.outcomes.items()):
        print(f"| {name} | {kind} | {times} |")


if __name__ == "__main__":
    sys.exit(main())
