"""What looks and the shadow make of each kind of dataset, and what that costs the loop: `python -m studies.live.trust`.

The kinds are the tables of tests/live/test_trust.py. A good one that is refused, and a bad one that is trusted, is marked.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune_loader.live.trust import TRUSTED, Trust

TESTS = Path(__file__).parents[2] / "tests" / "live" / "test_trust.py"


class TimedTrust(Trust):
    spent_s = 0.0
    last: TimedTrust

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        TimedTrust.last, begun = self, time.perf_counter()
        try:
            return super()._guarded(function, *arguments)
        finally:
            self.spent_s += time.perf_counter() - begun


def main() -> None:
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location("test_trust", TESTS)
    assert spec is not None
    assert spec.loader is not None
    kinds = sys.modules["test_trust"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kinds)
    kinds.Trust = TimedTrust  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds.make_data(folder)
        looked, shadowed = (
            {kind: lambda make=make: make(folder) for kind, (make, _) in table.items()}
            for table in (kinds.LOOKED, kinds.SHADOWED)
        )
        good = {kind: lambda make=make: make(folder) for kind, make in kinds.GOOD.items()}
        groups: dict[str, dict[str, Callable[[], Any]]] = {"looked": looked, "shadowed": shadowed, "good": good}
        print("| group | kind | found by | ms in the loop | reason |\n|---|---|---|---|---|")
        for group, rows in groups.items():
            for kind, make in rows.items():
                plain = group == "shadowed" and kind in ("closure", "lossy", "sentinel")
                verdict = kinds.prove(make(), kinds.as_it_is if plain else kinds.default_collate)
                trust = TimedTrust.last
                by = "shadow" if trust._comparison._starts else "look"
                wrong = "" if (verdict == TRUSTED) is (group == "good") else " **wrong**"
                words = verdict if verdict in (TRUSTED, None) else verdict.reason
                print(f"| {group} | {kind} | {by}{wrong} | {1e3 * trust.spent_s:.0f} | {words} |", flush=True)


if __name__ == "__main__":
    main()
