"""Make every attempt, each in a process of its own with a deadline, and keep what came out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from studies.libraries.attempt import Attempt, Outcome
from studies.libraries.environments import ENVIRONMENTS, Environment
from studies.libraries.page import HEAD, RESULTS, row, rows_by_library, write_page

MODULES = ("structures", "streams", "pictures", "frameworks")
# tune() has 8 s; importing a library, and an epoch, may take some more. What takes longer hangs.
DEADLINE_S = 120.0
ROOT = Path(__file__).parents[2]


def attempts_of(library: str) -> list[tuple[str, str, Attempt]]:
    found = []
    for module in MODULES:
        attempts: dict[str, Attempt] = importlib.import_module(f"studies.libraries.{module}").ATTEMPTS
        found += [(module, name, each) for name, each in attempts.items() if each.library == library]
    return found


def run_attempt(environment: Environment, module: str, name: str, attempt: Attempt) -> Outcome:
    """Make it in a process group of its own, which is gone afterwards."""
    process = subprocess.Popen(
        [environment.python, "-m", "studies.libraries.attempt", module, name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    begun = time.monotonic()
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
        return Outcome(**json.loads(out.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        sentence = f"no answer within {DEADLINE_S:.0f} s"
    except (IndexError, json.JSONDecodeError):
        sentence = next(iter(err.strip().splitlines()[-1:]), f"exit status {process.returncode}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
    return Outcome(
        library=attempt.library, version="?", what=attempt.what, outcome="wrong", sentence=sentence,
        seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip


def outcomes_of(environment: Environment) -> list[Outcome]:
    attempts = attempts_of(environment.library)
    why_not = environment.make()
    if why_not is None and attempts:
        return [run_attempt(environment, *each) for each in attempts]
    sentence = why_not or "no attempt yet"
    return [Outcome(library=environment.library, version="-", what="-", outcome="not tried", sentence=sentence)]


def main() -> None:
    asked = sys.argv[1:]
    unknown = set(asked) - {each.library for each in ENVIRONMENTS}
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: one of {', '.join(each.library for each in ENVIRONMENTS)} would work")
    kept = rows_by_library() if asked else {}
    wrong = 0
    for environment in ENVIRONMENTS:
        if asked and environment.library not in asked:
            continue
        kept[environment.library] = []
        for each in outcomes_of(environment):
            print(f"{each.library}: {each.what}: {each.outcome}: {each.config or each.sentence}", flush=True)
            wrong += each.outcome == "wrong"
            kept[environment.library].append(row(each))
        rows = [each for known in ENVIRONMENTS for each in kept.get(known.library, [])]
        RESULTS.write_text(HEAD + "".join(f"{each}\n" for each in rows))
        write_page()
    print(f"{sum(map(len, kept.values()))} rows, {wrong} wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
