"""One training loop that is tuned as it runs, until it has settled, in a fresh process.

    python -m studies.regret.running_loop WORKLOAD

What `tune()` would choose, and how soon, if it changed the loader of one loop in its midst instead of running bursts. Trying
is free, as nothing is lost in a probe. The package is imported before the clock starts, and the step is built within it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any
from unittest import mock

from autotune_loader.live import spending
from studies.live.convergence import Job, epochs

LONGEST_S = 60.0
UNLIMITED_S = 1e9


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begun = time.perf_counter()
    settled: list[Any] = []
    with mock.patch.object(spending, "CREDIT_S", UNLIMITED_S):
        job = Job(name)
        loader = job.auto(on_change=settled.append)
        for batch in epochs(loader):
            job.step.run(batch)
            if settled or time.perf_counter() - begun > LONGEST_S:
                break
    seconds = time.perf_counter() - begun
    seen = loader.history[["seconds", "event", "num_workers", "prefetch_factor", "samples_per_s"]]
    detail = {"is_settled": bool(settled), "history": json.loads(seen.to_json(orient="values", double_precision=2))}
    record = {"config": loader.config.to_dict(), "seconds": seconds, "detail": detail}
    print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
