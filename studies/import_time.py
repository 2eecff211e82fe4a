"""What does `import autotune_loader` add to `import torch`?

    python -m studies.import_time            # from the repository's root

Fresh interpreters take turns, so that a busy moment hits all alike: one imports the package, one the name that a training
job needs, one the name that tunes. The package loads its names when they are first used, so the bare import alone would
say little; the goal is asked of all three.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

ROUNDS = 11
GOAL_S = 0.050
TIMED = (
    "import autotune_loader",
    "from autotune_loader import load_config",
    "from autotune_loader import tune, load_config",
)
# What a training script has imported before; and the pass of the garbage collector that torch's many objects have made due
# (60 ms here), which otherwise falls to whatever is imported next.
WARM = "import gc, torch.utils.data; gc.collect()"
WATCHED = ("optuna", "pandas", "psutil", "pynvml", "rich", "matplotlib", "msgspec", "click")

SCRIPT = """
import json, sys, time
{before}
start = time.perf_counter()
{timed}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {watched} if name in sys.modules]]))
"""


def import_once(before: str, timed: str) -> tuple[float, list[str]]:
    """Seconds that `timed` took in a fresh interpreter after `before`, and which watched modules are loaded then."""
    script = SCRIPT.format(before=before, timed=timed, watched=WATCHED)
    # As pip installs it, the package is there in compiled form; so let it be compiled here too.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environ
    ).stdout
    seconds, loaded = json.loads(output)
    return seconds, loaded


def describe(seconds: Sequence[float]) -> str:
    """Median, quartiles and range in milliseconds."""
    millis = sorted(value * 1e3 for value in seconds)
    low, median, high = statistics.quantiles(millis, n=4, method="inclusive")
    return f"{median:7.1f} ms   quartiles {low:.1f} to {high:.1f}, range {millis[0]:.1f} to {millis[-1]:.1f}"


def main() -> int:
    for timed in TIMED:
        import_once("import torch", timed)  # compiles .pyc files and warms the page cache
    added_s: dict[str, list[float]] = {timed: [] for timed in TIMED}
    loaded: dict[str, list[str]] = {}
    for _ in range(ROUNDS):
        for timed in TIMED:
            seconds, loaded[timed] = import_once(f"import torch; {WARM}", timed)
            added_s[timed].append(seconds)
    by_torch = import_once("import torch", WARM)[1]

    print(f"{ROUNDS} interleaved rounds, Python {sys.version.split()[0]}, after `import torch; {WARM}`")
    for timed, seconds_of in added_s.items():
        new = [name for name in loaded[timed] if name not in by_torch]
        print(f"{timed:46} {describe(seconds_of)}   loads {', '.join(new) or 'none of the heavy ones'}")
    slowest = max(statistics.median(seconds_of) for seconds_of in added_s.values())
    print(f"goal {GOAL_S * 1e3:.0f} ms, for each of them: {'met' if slowest <= GOAL_S else 'MISSED'}")
    return 0 if slowest <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
