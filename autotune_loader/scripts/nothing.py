"""What is said where no loader was seen, without importing torch, which the script may not have done either."""

from __future__ import annotations

import contextlib
import json
import sys

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.scripts.plan import Plan

FOREIGN = {
    "nvidia.dali": "NVIDIA DALI",
    "ray.data": "Ray Data",
    "ffcv": "FFCV",
    "spdl": "SPDL",
    "grain": "Grain",
    "tensorflow": "tf.data",
}
"""Libraries with loaders that are not torch's."""


def foreign_notes() -> list[str]:
    """Who loads without torch's loaders, and is left alone."""
    names = [name for module, name in FOREIGN.items() if module in sys.modules]
    return [f"Left alone, as its loaders are not torch's: {', '.join(names)}."] if names else []


def tell_nothing(plan: Plan, more: tuple[str, ...] = ()) -> None:
    """Say so, and `more` sentences why; ranks other than 0, for which rank 0 may load, are silent."""
    if rank_of_environment()[0]:
        return
    notes = ["Nothing can be told: no PyTorch DataLoader gave a batch.", *foreign_notes(), *more]
    report = {"verb": plan.verb, "loaders": [], "notes": notes}
    say(json.dumps(report) if plan.as_json else f"\nautotune-loader {plan.verb}: {' '.join(notes)}")


def say(text: str) -> None:
    """Print a report on stderr, after what the script printed; a stream that is closed already is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # else what it holds back would make Python's exit code 120
    except (ValueError, AttributeError):
        pass
