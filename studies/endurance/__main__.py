"""How much breaks in 1,000 bursts of which most are in trouble: hangs, leftovers, changed files, growth of the parent?

    python -m studies.endurance --trials 1000 --seed 0

Every burst is run by the real probe, in the process of the one before unless that was lost. Bursts last some hundredths of a
second and deadlines a second or two, so that the trouble is what takes the time. A probe has 50 of them; at its end it must
still be well.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from autotune_loader.bursts import parent
from autotune_loader.bursts.packing import packed
from autotune_loader.bursts.parent import ProcessProbe
from autotune_loader.bursts.settings import Settings
from autotune_loader.pipeline.workload import Workload
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, Measurement, WorkloadError
from studies.endurance.faults import MIX, workload
from tests.support.bursts import orphaned_segments

BURSTS_PER_PROBE = 50
HEALTHY = BurstPlan(min_s=0.05, max_s=0.05, relative_error=0.5, deadline_s=20.0)
STUCK = BurstPlan(min_s=0.05, max_s=0.05, relative_error=0.5, deadline_s=1.5)
HOARDING = BurstPlan(min_s=15.0, max_s=15.0, relative_error=1e-6, deadline_s=30.0)
# So long may a burst take beyond its deadline: ending the old process and starting a new one on a busy machine.
RESTART_S = 40.0
MEMORY_BUDGET_BYTES = 1500 << 20


@dataclass
class Tally:
    """What happened, over all probes."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """How often what has to be 0: hangs, changed files, probes not well at the end, escaped exceptions."""
    leftovers: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """Of the parent, after each burst."""
    slowest_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally, begun = Tally(), time.monotonic()
    for first in range(0, options.trials, BURSTS_PER_PROBE):
        rng = random.Random(f"{options.seed}-{first // BURSTS_PER_PROBE}")
        run_probe(rng, min(BURSTS_PER_PROBE, options.trials - first), tally)
    print_report(tally, time.monotonic() - begun)
    return 1 if tally.leftovers or tally.failed.total() else 0


@contextlib.contextmanager
def probe_of(what: Workload) -> Iterator[ProcessProbe]:
    with packed(what, Settings.read(what), 1 << 30) as files:
        probe = ProcessProbe(files, MEMORY_BUDGET_BYTES, parent.START_DEADLINE_S)
        try:
            yield probe
        finally:
            probe.close()


def run_probe(rng: random.Random, count: int, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fault = Path(folder, "fault")
        fault.write_text("none")
        before, pids = leavings(), set[int]()
        with probe_of(workload(fault)) as probe:
            for _ in range(count):
                run_burst(rng, probe, fault, tally)
                pids |= {probe._child.pid} if probe._child else set()
                tally.rss_bytes.append(psutil.Process().memory_info().rss)
            fault.write_text("none")
            is_well = isinstance(probe.burst(LoaderConfig(num_workers=1), HEALTHY), Measurement)
        tally.leftovers += left_behind(before, pids)
        tally.failed["probes not well at the end"] += not is_well
        tally.failed["changed files"] += len({path.name for path in Path(folder).iterdir()} - {"fault"})


def run_burst(rng: random.Random, probe: ProcessProbe, fault: Path, tally: Tally) -> None:
    """A fault, in a configuration in which it shows, and whether its outcome is one of those that are right for it."""
    name, _, right = rng.choices(MIX, weights=[weight for _, weight, _ in MIX])[0]
    needs_worker = "-worker" in name or name.startswith("start")
    workers = 1 if "hoard" in name else rng.choice([1, 2, 3] if needs_worker else [0, 0, 1, 2, 3])
    config = LoaderConfig(num_workers=workers, prefetch_factor=rng.choice([1, 2, 4]) if workers else None)
    fault.write_text(name)
    plan = HOARDING if "hoard" in name else STUCK if "hang" in name else HEALTHY
    begun = time.monotonic()
    print(f"burst {len(tally.rss_bytes)}: {name} with {config}", file=sys.stderr)
    faulthandler.dump_traceback_later(plan.deadline_s + 3 * RESTART_S, exit=True)  # a burst that never comes back
    try:
        outcome: Measurement | Failure = probe.burst(config, plan)
        kind = outcome.kind if isinstance(outcome, Failure) else "ok"
        said = str(outcome.traceback or outcome.message)[-600:] if isinstance(outcome, Failure) else "it worked"
    except WorkloadError as error:  # a sample or the step that raises ends a run
        kind, said = "writes" if " writes last.pt, " in error.message else "user_exception", error.message
    except Exception as error:
        kind, said = "escaped", repr(error)
    faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - begun
    tally.slowest_s = max(tally.slowest_s, seconds)
    tally.failed["hangs"] += seconds > plan.deadline_s + RESTART_S
    tally.failed["escaped exceptions"] += kind == "escaped"
    tally.outcomes[name, kind] += 1
    if kind not in right:
        tally.surprises.append(f"{name} with {workers} workers: {kind}: {said}")


def leavings() -> dict[str, set[str]]:
    """What of ours there is: descendants, descriptors, folders, and segments whose process is gone."""
    return {
        "process": {f"{each.pid} {each.name()}" for each in psutil.Process().children(recursive=True)},
        "segment": orphaned_segments(),
        "descriptor": {path.name for path in Path("/proc/self/fd").iterdir()},
        "folder": {path.name for path in Path(tempfile.gettempdir()).glob("autotune-loader-*")},
    }


def left_behind(before: dict[str, set[str]], pids: set[int]) -> list[str]:
    """What is there now and was not before; what was killed gets a moment to vanish."""
    deadline = time.monotonic() + 5
    while True:
        now = leavings()
        found = [f"{kind} {name}" for kind, names in now.items() for name in sorted(names - before[kind])]
        found += [f"group member {pid}" for pid in psutil.pids() if _group_of(pid) in pids]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _group_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return 0


def print_report(tally: Tally, seconds: float) -> None:
    bursts = len(tally.rss_bytes)
    print(f"{bursts} bursts in {seconds:.0f} s; the slowest took {tally.slowest_s:.1f} s\n\n| figure | |\n|---|---|")
    print("".join(f"| {name} | {times} |\n" for name, times in tally.failed.items()), end="")
    print(f"| leftovers | {len(tally.leftovers)} {' '.join(tally.leftovers[:9])} |")
    for number in (each for each in (100, 1000) if each <= bursts):
        print(f"| parent RSS at {number} | {tally.rss_bytes[number - 1] / 2**20:.1f} MiB |")
    print(f"| outcomes not as expected | {len(tally.surprises)} |\n")
    print("".join(f"    {line}\n" for line in tally.surprises[:20]))
    print("| fault | outcome | times |\n|---|---|---|")
    for (name, kind), times in sorted(tally.outcomes.items()):
        print(f"| {name} | {kind} | {times} |")


if __name__ == "__main__":
    sys.exit(main())
