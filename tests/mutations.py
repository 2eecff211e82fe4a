"""Do the tests notice when a central line is wrong? `python -m tests.mutations [NAME ...]`; no part of `make test`.

Some lines are changed one at a time (a sign, a comparison, an off by one) in a copy of the tree, and the tests that should
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
QUEUE = ("search/queue.py", "tests/search/test_twin.py")
ROUNDS = ("search/rounds.py", "tests/search/test_rounds.py")


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
        "rounds: one failure more before a side is out", *ROUNDS,
        "self._failed[side] < MAX_FAILURES", "self._failed[side] <= MAX_FAILURES",
    ),
    Mutation(
        "rounds: a round runs although it does not fit", *ROUNDS,
        "end is None and seconds_left < round_s", "end is None and seconds_left > round_s",
    ),
    Mutation(
        "rounds: they end before the choice is safe", *ROUNDS,
        "if probability >= CERTAIN", "if probability < CERTAIN",
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
