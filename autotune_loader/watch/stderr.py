"""What people are told on stderr, so that stdout stays the script's own. Torch is not imported: the script may not have."""

from __future__ import annotations

import contextlib
import sys

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.watch.plan import Plan

NOTHING = "Nothing can be told: no PyTorch DataLoader gave a batch in this process."


def say(text: str) -> None:
    """Print a text after what the script has printed; a stream that is closed already is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None  # else what it holds back would make Python's exit code 120
    except (ValueError, AttributeError):
        pass


def tell_nothing(plan: Plan) -> None:
    """Say that no loader was seen; ranks other than 0, for which rank 0 may load, are silent."""
    if not rank_of_environment()[0]:
        say(f"\nautotune-loader {plan.verb}: {NOTHING}")
