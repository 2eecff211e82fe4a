"""What does `import autotune_loader` add to `import torch`?

    python -m studies.import_time            # from the repository's root

Three kinds of fresh interpreter take turns, so that a busy moment hits all alike: one imports torch, one imports both
and times the whole, one imports both and times autotune_loader alone. The last gives the cost as a training job meets
it, and is judged; the difference of the first two checks it, more noisily.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

PAIRS = 11
GOAL_S = 0.050
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
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    seconds, loaded = json.loads(output)
    return seconds, loaded


def describe(seconds: Sequence[float]) -> str:
    """Median, quartiles and range in milliseconds."""
    millis = sorted(value * 1e3 for value in seconds)
    low, median, high = statistics.quantiles(millis, n=4, method="inclusive")
    return f"{median:7.1f} ms   quartiles {low:.1f} to {high:.1f}, range {millis[0]:.1f} to {millis[-1]:.1f}"


def main() -> int:
    import_once("import torch", "import autotune_loader")  # compiles .pyc files and warms the page cache
    torch_s, ours_s, added_s = [], [], []
    for _ in range(PAIRS):
        torch_s.append(import_once("", "import torch")[0])
        ours_s.append(import_once("", "import torch, autotune_loader")[0])
        seconds, loaded = import_once("import torch", "import autotune_loader")
        added_s.append(seconds)
    by_torch = import_once("", "import torch")[1]

    median_s = statistics.median(added_s)
    print(f"{PAIRS} interleaved rounds, Python {sys.version.split()[0]}")
    print(f"import torch                        {describe(torch_s)}")
    print(f"import torch, autotune_loader       {describe(ours_s)}")
    print(f"  paired difference                 {describe([b - a for a, b in zip(torch_s, ours_s, strict=True)])}")
    print(f"import autotune_loader after torch  {describe(added_s)}")
    print(f"goal {GOAL_S * 1e3:.0f} ms: {'met' if median_s <= GOAL_S else 'MISSED'}")
    print(f"loaded by torch: {', '.join(by_torch) or 'none'}; with autotune_loader: {', '.join(loaded) or 'none'}")
    return 0 if median_s <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
