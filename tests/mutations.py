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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 540.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one line."""

    name: str
    file: str
    """In `autotune_loader`."""
    right: str
    wrong: str
    tests: tuple[str, ...]


QUEUE, RACE, ORDER = "twin/queue.py", "decision/race.py", "live/order.py"
TWIN_TESTS, RACE_TESTS = ("tests/twin/test_twin.py",), ("tests/decision/test_race.py",)
ORDER_TESTS, TRUST_TESTS = ("tests/live/test_order.py", "tests/live/test_loader.py"), ("tests/live/test_trust.py",)
MUTATIONS = (
    Mutation(
        name="queue: one batch more is handed out ahead", file=QUEUE, tests=TWIN_TESTS,
        right="lag = np.where(serial, 1, workers * prefetch)", wrong="lag = np.where(serial, 1, workers * prefetch + 1)",
    ),
    Mutation(
        name="queue: a worker need not be free", file=QUEUE, tests=TWIN_TESTS,
        right="np.maximum(ordered, flat_fetched.take(own_last + offset), out=ready)",
        wrong="np.minimum(ordered, flat_fetched.take(own_last + offset), out=ready)",
    ),
    Mutation(
        name="race: one failure more before a candidate is out", file=RACE, tests=RACE_TESTS,
        right="len(failures) >= MAX_FAILURES", wrong="len(failures) > MAX_FAILURES",
    ),
    Mutation(
        name="race: a round runs although it does not fit", file=RACE, tests=RACE_TESTS,
        right="if seconds_left < round_s or is_decided", wrong="if seconds_left > round_s or is_decided",
    ),
    Mutation(
        name="race: the weakest rival runs, not the strongest", file=RACE, tests=RACE_TESTS,
        right="key=lambda config: -sum(", wrong="key=lambda config: sum(",
    ),
    Mutation(
        name="order: what is given out again counts twice", file=ORDER, tests=ORDER_TESTS,
        right="return self._number - len(self.in_hand) - len(self._again)",
        wrong="return self._number - len(self.in_hand) + len(self._again)",
    ),
    Mutation(
        name="order: a position is off by one", file=ORDER, tests=ORDER_TESTS,
        right="while waiting and waiting[-1] == first - 1:", wrong="while waiting and waiting[-1] == first:",
    ),
    Mutation(
        name="trust: one worker's batches are enough", file="live/trust.py", tests=TRUST_TESTS,
        right="min(self._same) >= SAME", wrong="max(self._same) >= SAME",
    ),
    Mutation(
        name="shadow: every worker has the same seed", file="live/shadow.py", tests=TRUST_TESTS,
        right="seed = base_seed + number", wrong="seed = base_seed",
    ),
    Mutation(
        name="loader.json: a rate of zero is one", file="results/loader_file.py", tests=("tests/results/test_result.py",),
        right="not 0 < rate < math.inf", wrong="not 0 <= rate < math.inf",
    ),
)  # fmt: skip


def copy_of_tree(folder: Path) -> None:
    """What git knows, as it is in the working tree."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def outcome_of(folder: Path, tests: Sequence[str]) -> str:
    """How the tests end in that tree: "pass", the name of the first that fails, or that there was no answer."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "unit or process", "-p", "no:cacheprovider"]
    command += ["-p", "no:rerunfailures", "-W", "ignore::pytest.PytestUnknownMarkWarning", *tests]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {DEADLINE_S:.0f} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0:
        return "pass"
    return failed[0].split(" - ")[0] if failed else f"exit status {done.returncode}: {done.stdout[-300:]}"


def caught_by(folder: Path, mutation: Mutation) -> str | None:
    """The test that fails with this change; None where all pass."""
    path = folder / "autotune_loader" / mutation.file
    text = path.read_text()
    if text.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.file} has {mutation.right!r} {text.count(mutation.right)} times")
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        outcome = outcome_of(folder, mutation.tests)
    finally:
        path.write_text(text)
    return None if outcome == "pass" else outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("only", nargs="*", help="beginnings of names, such as queue; all without one")
    only = parser.parse_args().only
    chosen = [each for each in MUTATIONS if not only or each.name.startswith(tuple(only))]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        copy_of_tree(folder)
        for tests in dict.fromkeys(each.tests for each in chosen):
            outcome = outcome_of(folder, tests)
            if outcome != "pass":
                print(f"{' '.join(tests)} do not pass as they are: {outcome}", flush=True)
        for mutation in chosen:
            found = caught_by(folder, mutation)
            caught += found is not None
            print(f"{mutation.name}: {'NOT CAUGHT' if found is None else found}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
