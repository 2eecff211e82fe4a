"""`python -m studies.verdict simulated | real`: right verdicts, and what following the advice gains."""

from __future__ import annotations

import argparse
import multiprocessing

from studies.verdict import outcomes, simulated
from studies.verdict.outcomes import SCALES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.verdict", description=__doc__)
    parser.add_argument("part", choices=("simulated", "real"))
    parser.add_argument("--processes", type=int, default=2, help="of the simulated part")
    parser.add_argument("--size", choices=tuple(SCALES), help="of the real part; small and large without it")
    parser.add_argument("--only", default="", help="bottlenecks of the real part, by commas")
    parser.add_argument("--budget", default="12s", help="of one real tuning run")
    parser.add_argument(
        "--label", default="", help="ends the name of the file that keeps the real part, such as confirmed"
    )
    chosen = parser.parse_args()
    if chosen.part == "simulated":
        with multiprocessing.Pool(chosen.processes) as pool:
            found = pool.starmap(simulated.study, simulated.jobs(), chunksize=4)
        outcomes.save(found, "simulated.jsonl")
    else:
        from studies.verdict import real

        sizes = (chosen.size,) if chosen.size else real.SIZES
        wanted = chosen.only.split(",") if chosen.only else real.INJECTED
        found = [real.study(injected, size, chosen.budget) for size in sizes for injected in wanted]
        outcomes.save(found, "-".join(filter(None, ["real", chosen.size or "all", chosen.label])) + ".jsonl")
    print(outcomes.table(found))


if __name__ == "__main__":
    main()
