"""What people are told on stderr, so that stdout stays the script's own."""

from __future__ import annotations

import contextlib
import sys


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
