"""Do the tests notice when a central line is wrong? `python -m tests.mutations [NAME ...]`; no part of `make test`.

Ten lines are changed one at a time (a sign, a comparison, an off by one) in a copy of the tree, and the tests that should
notice run there. Before, the same tests must pass on the copy as it is. The last line says how many were caught.
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
QUEUE = ("twin/queue.py", "tests/twin/test_twin.py")
RACE = ("decision/race.py", "tests/decision/test_race.py")
ORDER = ("live/order.py", "tests/live/test_order.py tests/live/test_loader.py")
TRUST = "tests/live/test_trust.py"


class Mutation(NamedTuple):
    """One change of one line of a file in `autotune_loader`, and the tests that should notice."""

    name: str
    file: str
    tests: str
    right: str
    wrong: str


MUTATIONS = (
    Mutation(
        "queue: one batch more is handed out ahead", *QUEUE,
        "lag = np.where(serial, 1, workers * prefetch)", "lag = np.where(serial, 1, workers * prefetch + 1)",
    ),
    Mutation(
        "queue: a worker need not be free", *QUEUE,
        "np.maximum(ordered, flat_fetched.take(own_last + offset), out=ready)",
        "np.minimum(ordered, flat_fetched.take(own_last + offset), out=ready)",
    ),
    Mutation(
        "race: one failure more before a candidate is out", *RACE,
        "len(failures) >= MAX_FAILURES", "len(failures) > MAX_FAILURES",
    ),
    Mutation(
        "race: a round runs although it does not fit", *RACE,
        "if seconds_left < round_s or is_decided", "if seconds_left > round_s or is_decided",
    ),
    Mutation(
        "race: the weakest rival runs, not the strongest", *RACE,
        "key=lambda config: -sum(", "key=lambda config: sum(",
    ),
    Mutation(
        "order: what is given out again counts twice", *ORDER,
        "return self._number - len(self.in_hand) - len(self._again)",
        "return self._number - len(self.in_hand) + len(self._again)",
    ),
    Mutation(
        "order: a position is off by one", *ORDER,
        "while waiting and waiting[-1] == first - 1:", "while waiting and waiting[-1] == first:",
    ),
    Mutation(
        "trust: one worker's batches are enough", "live/trust.py", TRUST,
        "min(self._same) >= SAME", "max(self._same) >= SAME",
    ),
    Mutation(
        "shadow: every worker has the same seed", "live/shadow.py", TRUST,
        "seed = base_seed + number", "seed = base_seed",
    ),
)  # fmt: skip


def copy_of_tree(folder: Path) -> None:
    """What git knows, as it is in the working tree."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def outcome_of(folder: Path, tests: str) -> str:
    """How the tests end in that tree: "pass", the name of the first that fails, or that there was no answer."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "unit or process", "-p", "no:cacheprovider"]
    command += ["-p", "no:rerunfailures", "-W", "ignore::pytest.PytestUnknownMarkWarning", *tests.split()]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"no answer in {DEADLINE_S:.0f} s"
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        "pass" if done.returncode == 0 else next(iter(failed), f"exit status {done.returncode}: {done.stdout[-300:]}")
    )


def is_caught(folder: Path, mutation: Mutation) -> bool:
    path = folder / "autotune_loader" / mutation.file
    text = path.read_text()
    assert text.count(mutation.right) == 1, mutation
    path.write_text(text.replace(mutation.right, mutation.wrong))
    outcome = outcome_of(folder, mutation.tests)
    path.write_text(text)
    print(f"{mutation.name}: {'NOT CAUGHT' if outcome == 'pass' else outcome}", flush=True)
    return outcome != "pass"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("only", nargs="*", help="beginnings of names, such as queue; all without one")
    only = parser.parse_args().only
    chosen = [each for each in MUTATIONS if not only or each.name.startswith(tuple(only))]
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        copy_of_tree(folder)
        for tests in {each.tests for each in chosen}:
            if (outcome := outcome_of(folder, tests)) != "pass":
                print(f"{tests} do not pass as they are: {outcome}", flush=True)
        caught = sum(is_caught(folder, each) for each in chosen)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
