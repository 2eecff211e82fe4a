"""`python -m studies.fidelity`: the twin's predictions from three bursts against sustained runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from studies.fidelity.analysis import DESIGN, cells, load, report
from studies.fidelity.grid import tasks
from studies.fidelity.measure import measure
from studies.fidelity.plots import draw
from studies.fidelity.records import RESULTS
from studies.quiet import QuietTurns

FILES = {
    "scout": RESULTS / "scouts.jsonl.gz",
    "ceiling": RESULTS / "sustained.jsonl",
    "sustained": RESULTS / "sustained.jsonl",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a sustained run; 20 is the full mode")
    parser.add_argument("--full", action="store_true", help="workers 0..12 instead of the thinned grid")
    parser.add_argument("--scout-repeats", type=int, default=2, help="sets of scouts, each with its own samples")
    parser.add_argument(
        "--again", type=int, default=2, help="repetitions of a few cells, to see the noise of the truth"
    )
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    if not chosen.report:
        wanted = tasks(full=chosen.full, scout_repeats=chosen.scout_repeats, again=chosen.again)
        quiet = QuietTurns(chosen.lock)
        mode = f"{'full' if chosen.full else 'thinned'} grid, {chosen.seconds:g} s"
        measure(wanted, FILES, seconds=chosen.seconds, quiet=quiet, mode=mode)
        print(f"the machine was ours for {quiet.held_s / 60:.1f} minutes")
    if not load(FILES).sustained:
        raise SystemExit("nothing has been measured here yet: the records are not committed; run it without --report")
    print(report(FILES))
    draw(cells(load(FILES), DESIGN), RESULTS)


if __name__ == "__main__":
    main()
