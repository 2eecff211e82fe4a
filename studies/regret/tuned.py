"""One call of `tune()` in a fresh process, timed from call to result: `python -m studies.regret.tuned WORKLOAD SEED BUDGET`.

The package is imported before the clock starts; the probe's own process is started by the call and counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from autotune_loader import TuningResult, tune
from autotune_loader.values.serialization import to_plain
from studies.regret.bench import regret_workload


def summary(result: TuningResult) -> dict[str, Any]:
    """What is needed to understand a choice afterwards: trials, finals, verdict, warnings."""
    trials = [
        {
            "config": str(trial.config),
            "samples_per_s": trial.samples_per_s,
            "predicted": trial.predicted_samples_per_s,
            "seconds": round(trial.seconds, 2),
            "failure": trial.failure.message if trial.failure else None,
        }
        for trial in result.trials
    ]
    return {
        "status": result.status,
        "verdict": result.verdict.binding,
        "sentence": result.verdict.sentence,
        "summary": list(result.summary),
        "warnings": list(result.warnings),
        "bursts": result.spent.bursts,
        "measured": to_plain(result.measured),
        "trials": trials,
        "finals": {"configs": [str(config) for config in result.finals.configs], "rounds": result.finals.rounds},
        "advice": [to_plain(advice) for advice in result.advice],
    }


def main(name: str, seed: str, budget: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = regret_workload(name).to_tune_kwargs()
    begun = time.perf_counter()
    result = tune(**arguments, seed=int(seed), budget=budget, reuse=False, progress=False)
    seconds = time.perf_counter() - begun
    record = {"config": result.best.to_dict(), "seconds": seconds, "detail": summary(result)}
    print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
