"""Does a real result contradict itself, beside busy neighbours too? Short runs of `tune()`, each checked.

    python -m studies.verdict.beside                            # 9 workloads x 0, 1, 2 neighbours x 2 seeds, 54 runs
    python -m studies.verdict.beside --neighbours 2 --workloads jpeg,text --seeds 1

A neighbour is a process that keeps one core busy. Each result is checked with `tests.support.invariants`; those that break one
are kept whole beside the records, so that they can be looked into. What was run before is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from autotune_loader import TuningResult, tune
from studies.regret.load import BUSY, beside
from studies.workloads import WORKLOADS
from tests.support.invariants import contradictions

RESULTS = Path(__file__).parent / "results"
RECORDS = RESULTS / "beside.jsonl"


def run(workload: str, neighbours: int, seed: int, budget: str) -> tuple[TuningResult, dict[str, object]]:
    begun = time.monotonic()
    with beside([BUSY] * neighbours):
        job = WORKLOADS[workload]().to_tune_kwargs()
        result = tune(**job, budget=budget, seed=seed, reuse=False, progress=False)
    broken = contradictions(result)
    return result, {
        "workload": workload,
        "neighbours": neighbours,
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 1),
        "status": result.status,
        "best": str(result.best),
        "binding": result.verdict.binding,
        "contradictions": broken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.verdict.beside", description=__doc__)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="by commas")
    parser.add_argument("--neighbours", default="0,1,2", help="how many, by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budget", default="8s", help="of one run")
    parser.add_argument("--most", type=int, default=1000, help="runs, after which it stops; the rest another time")
    parser.add_argument("--records", type=Path, default=RECORDS)
    chosen = parser.parse_args()
    known = [json.loads(line) for line in chosen.records.read_text().splitlines()] if chosen.records.exists() else []
    done = {(each["workload"], each["neighbours"], each["seed"]) for each in known}
    todo = [
        (workload, int(neighbours), seed)
        for seed in range(chosen.seeds)
        for workload in chosen.workloads.split(",")
        for neighbours in chosen.neighbours.split(",")
    ]
    chosen.records.parent.mkdir(parents=True, exist_ok=True)
    for workload, neighbours, seed in [each for each in todo if each not in done][: chosen.most]:
        result, record = run(workload, neighbours, seed, chosen.budget)
        with chosen.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if record["contradictions"]:
            result.save(chosen.records.parent / f"broken-{workload}-{neighbours}-{seed}.json")
        known.append(record)
        print({name: value for name, value in record.items() if value != []}, flush=True)
    whole = [each for each in known if not each["contradictions"]]
    print(f"{len(whole)} of {len(known)} results contradict themselves in nothing")


if __name__ == "__main__":
    main()
