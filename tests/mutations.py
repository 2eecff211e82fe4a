"""Do the tests notice when a central line is wrong? `python -m tests.mutations [NAME ...]`; no part of `make test`.

Some lines are changed one at a time (a sign, a comparison, an off by one) in a copy of the tree, and the tests that should
notice run there. Before, the same tests must pass on the copy as it is. A line is found by a short text, wherever in its room
it stands; one whose text is gone is said so and counts as not caught. The last line says how many were caught.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 540.0


class Mutation(NamedTuple):
    """One change of one line of a room, and the tests that should notice: such as wait for nothing."""

    name: str
    room: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    Mutation(
        "turns: an unsafe choice counts as safe", "search",
        "belief.probability(choice) >= CERTAIN", "belief.probability(choice) <= CERTAIN", "search/test_turns.py -m unit",
    ),
    Mutation(
        "twin: one batch more is handed out ahead", "search",
        "where(serial, 1, workers * prefetch)", "where(serial, 1, workers * prefetch + 1)", "search/test_twin.py -m unit",
    ),
    Mutation(
        "belief: one failure more before a configuration is out", "search",
        "failures >= MAX_FAILURES or", "failures > MAX_FAILURES or", "search/test_turns.py -m unit",
    ),
    Mutation(
        "turns: one round of the choice is enough", "search",
        "stop and ran >= least_rounds", "stop and ran >= least_rounds - 1", "search/test_turns.py -m unit",
    ),
    Mutation(
        "turns: what is far from the ceiling reaches it", "search",
        "means[config.key()] >= (1 - belief.tolerance)", "means[config.key()] <= (1 - belief.tolerance)",
        "search/test_turns.py -m unit",
    ),
    Mutation(
        "loop: the mark behind the copy is laid behind the step", "bursts",
        "copied = timeline.mark()\n        step.train(on_device)", "step.train(on_device)\n        copied = timeline.mark()",
        "system/test_accelerated.py -k has_the_devices_times",
    ),
    Mutation(
        "passages: the host waits for all that the device has", "bursts",
        "self._timeline.wait(self._on_the_way[-most - 1].done)", "self._timeline.synchronize()",
        "system/test_accelerated.py -k has_the_devices_times",
    ),
    Mutation(
        "prefetcher: a step does not wait for its copy", "pipeline",
        "self._module.current_stream(self._device).wait_event(copied)", "copied.query()",
        "system/test_accelerated.py -k copied_ahead",
    ),
    Mutation(
        "prefetcher: a copy does not wait for the step that reads its memory", "pipeline",
        "self.stream.wait_stream(self._module.current_stream(self._device))", "self.stream.query()",
        "system/test_accelerated.py -k copied_ahead",
    ),
    Mutation(
        "elastic: batches of another lost worker are given out again", "autoloader",
        "self._give_again([channel])\n        if len(", "self._give_again([])\n        if len(",
        "autoloader/test_elastic.py -k killed_workers",
    ),
    Mutation(
        "elastic: one batch more is given out ahead", "autoloader",
        "self._send_idx - self._rcvd_idx < self._active", "self._send_idx - self._rcvd_idx <= self._active",
        "autoloader/test_elastic.py -k own_numbers",
    ),
    Mutation(
        "segments: what the loop keeps is used again", "autoloader",
        "own is None or own.is_lent or", "own is None or", "autoloader/test_elastic.py -k loop_keeps",
    ),
    Mutation(
        "ledger: what training has earned is owed", "autoloader",
        "CREDIT_S + SHARE * ", "CREDIT_S - SHARE * ", "autoloader/test_deciding.py -m unit",
    ),
    Mutation(
        "Landlock: files may be removed", "machine",
        "0x1FF0", "0x1FD0", "machine/test_elsewhere.py -k given_places",
    ),
    Mutation(
        "record: a gain that is known is left out", "results",
        "{} if self.gain is None else", "{} if self.gain is not None else", "results/test_result.py -m unit",
    ),
    Mutation(
        "simulated accelerator: a stream does not wait for an event", "../tests/support/accelerator",
        "if (event) end = std::max(end, static_cast<Mark*>(event)->at);", "if (event) end = std::max(end, 0.0);",
        "system/test_accelerated.py -k copied_ahead",
    ),
)  # fmt: skip


def copy_of_tree(folder: Path) -> None:
    """What git knows, as it is in the working tree."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def outcome_of(folder: Path, tests: str) -> str:
    """How the tests end in that tree: "pass", the name of the first that fails, or that there was no answer."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += [
        "-p",
        "no:rerunfailures",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        *f"tests/{tests}".split(),
    ]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {DEADLINE_S:.0f} s"
    if done.returncode in (4, 5):  # pytest's: there is no such file, or no such test in it
        return f"there is no tests/{tests}: mend the table"
    failed = [
        line.split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    unclear = f"exit status {done.returncode}: {done.stdout[-300:]}"
    return "pass" if done.returncode == 0 else next(iter(failed), unclear)


def is_caught(folder: Path, mutation: Mutation) -> bool:
    paths = (folder / "autotune_loader" / mutation.room).rglob("*.[cp]*[py]")
    times = {path: count for path in paths if (count := path.read_text().count(mutation.right))}
    if list(times.values()) != [1]:
        where = f"stands {sum(times.values())} times in {mutation.room}/"
        print(f"{mutation.name}: {mutation.right!r} {where}: mend the table", flush=True)
        return False
    (path,) = times
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    outcome = outcome_of(folder, mutation.tests)
    path.write_text(text)
    print(f"{mutation.name}: {'NOT CAUGHT' if outcome == 'pass' else outcome}", flush=True)
    return outcome != "pass"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "only", nargs="*", help="beginnings of names, such as turns; all without one"
    )
    only = parser.parse_args().only
    chosen = [each for each in MUTATIONS if not only or each.name.startswith(tuple(only))]
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        copy_of_tree(folder)
        broken = set()
        for tests in sorted({each.tests for each in chosen}):
            if (outcome := outcome_of(folder, tests)) != "pass":
                print(f"{tests} does not pass as it is: {outcome}", flush=True)
                broken.add(tests)
        caught = sum(is_caught(folder, each) for each in chosen if each.tests not in broken)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
