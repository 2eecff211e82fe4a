"""`python -m studies.jobs [advice] [--only NAMES]`, in the environment of the jobs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from studies.jobs.environment import JOBS as ENVIRONMENT

ROOT = Path(__file__).parents[2]
JOBS_BUDGET = "60s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.jobs", description=__doc__)
    parser.add_argument("what", nargs="?", default="jobs", choices=["jobs", "advice", "table", "python"])
    parser.add_argument("--only", default="", help="names, by commas")
    parser.add_argument("--all", action="store_true", help="follow every advice of a job, and not the first only")
    chosen = parser.parse_args()
    if Path(sys.executable) != Path(ENVIRONMENT.python):
        why_not = ENVIRONMENT.make()
        if why_not is not None:
            raise SystemExit(f"{ENVIRONMENT.library}: {why_not}")
        if chosen.what == "python":
            print(ENVIRONMENT.python)
            return
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(ENVIRONMENT.python, [ENVIRONMENT.python, "-m", "studies.jobs", *sys.argv[1:]])
    from studies.jobs import following

    if chosen.what != "table":
        file = f"{chosen.what}.jsonl"
        cases = _real() if chosen.what == "jobs" else _promises()
        wanted = chosen.only.split(",") if chosen.only else [case.name for case in cases]
        unknown = set(wanted) - {case.name for case in cases}
        if unknown:
            raise SystemExit(f"{', '.join(unknown)}: one of {', '.join(case.name for case in cases)} would work")
        for case in (case for case in cases if case.name in wanted):
            only_first = chosen.what == "jobs" and not chosen.all
            following.keep(file, list(following.follow(case, only_first=only_first)))
    for file in ("jobs.jsonl", "advice.jsonl"):
        print(f"\n{file}\n\n{following.table(following.read(file))}")
    print(
        f"\nall\n\n{following.table([*following.read('jobs.jsonl'), *following.read('advice.jsonl')]).splitlines()[-1]}"
    )


def _real() -> list[following.Case]:  # type: ignore[name-defined]  # noqa: F821
    from studies.jobs.following import Case, Way
    from studies.jobs.jobs import JOBS

    found = []
    for name, factory in JOBS.items():
        job = factory()
        after = {start: Way(make=make) for start, make in job.variants.items()}
        found.append(Case(name=name, before=Way(make=lambda job=job: job.workload), after=after, budget=JOBS_BUDGET))
    return found


def _promises() -> list[following.Case]:  # type: ignore[name-defined]  # noqa: F821
    from studies.jobs.promises import cases

    return cases()


if __name__ == "__main__":
    main()
