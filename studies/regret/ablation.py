"""Does every rule earn its place? `python -m studies.regret.ablation [--machines 300] [--first 30000]`.

Each rule of search, finals and twin is switched off in turn, on the same simulated machines of 2 to 128 cores; the truth is the
machine's own. A rule stays if without it the share within 2 % falls by 0.5 points or more, or the seconds rise by 5 % or more.
Machines are taken one after the other and results appended, so that a run that is broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from autotune_loader.decision import belief, policy, posterior, race, sufficiency
from autotune_loader.decision.race import Race
from autotune_loader.decision.sufficiency import Sufficiency
from autotune_loader.pipeline import throughput
from autotune_loader.tuning import burst_source, schedule
from autotune_loader.twin import calibration, model, smoothing
from studies.regret import PLAIN_RULE
from studies.regret.machines import SMALL_TOO, oracle_of, random_machine, space_of
from studies.regret.over_time import NEAR
from studies.regret.quantiles import at
from studies.regret.simulated import OURS, STRATEGIES

RESULTS = Path(__file__).parent / "results" / "ablation.jsonl"
LEAST_POINTS, LEAST_SECONDS = 0.5, 5.0
AS_IT_IS = "as it is"

Off = tuple[Any, str, Any]
"""What is replaced: a module or class, a name in it, and what stands there instead."""


RULES: dict[str, list[Off]] = {
    # search
    "begin with the plain rule": [(belief.Beliefs, "plain_rule", lambda self: None)],
    "stop at the ceiling": [(policy, "CEILING_TRIALS", 10**9)],
    "windows of some rounds": [(schedule, "ROUNDS_PER_BURST", 0.0)],
    "right-sized by cost": [(posterior, "CHEAPNESS_SHARE", 0.0), (posterior, "SAFE", 2.0)],
    # belief
    "sufficiency": [(Sufficiency, "sufficient", lambda self: []), (Sufficiency, "is_as_fast", lambda *_: False)],
    "slow receipts": [(sufficiency, "_slow_receipt", lambda bursts: 0.0)],
    "refuting sufficiency": [(posterior, "REFUTED", math.inf)],
    "queues slowed by depth": [(posterior, "DEPTH_REFUTED", math.inf)],
    "error of the twin by bursts": [(posterior, "MODEL_SCALES", (1.0,))],
    "disturbed bursts count less": [(posterior, "REWEIGHTINGS", 1)],
    "simulated scatter": [(model.Twin, "burst_scatter", lambda self, bursts: np.zeros(len(bursts)))],
    # race
    "cheapest unbeaten": [(Race, "_cheapest_unbeaten", lambda self, incumbent: incumbent)],
    "five patient rounds": [(race, "PATIENT_ROUNDS", 3)],
    "admission": [(Race, "is_admitting", lambda self: False)],
    "full queues first": [(burst_source, "prefill_s", lambda *_: 0.0)],
    "rounds overrule belief": [(race, "_prove_faster", lambda *_: False)],
    # twin
    "cycles of workers": [(model, "whole_cycles", lambda observations: tuple(observations))],
    "offsets by threads": [(smoothing, "OFFSET_EVIDENCE", math.inf)],
    "variation of who wants a core": [
        (calibration, "busy_beside", lambda at_work, workers, _: np.maximum(at_work, 1.0)),
    ],
    # bursts
    "what is made beside what is consumed": [(throughput, "_pooled", lambda consumed, *_: consumed)],
    "batches that went into queues": [(throughput, "_stocked", lambda *_: 0.0)],
    "order that blocks": [(throughput, "BLOCKED", 0.0)],
}
TOGETHER = "+"
"""Several rules at once: their names with this between."""


@contextlib.contextmanager
def switched_off(rule: str) -> Iterator[None]:
    """The tuner without one rule."""
    with contextlib.ExitStack() as stack:
        for each in rule.split(TOGETHER):
            for where, name, instead in RULES.get(each, []):
                stack.enter_context(patch.object(where, name, instead))
        yield


def study_machine(job: tuple[int, tuple[str, ...], Path | None]) -> list[dict[str, Any]]:
    """Every rule switched off in turn on one machine, beside the tuner as it is and the plain rule."""
    seed, rules, kept = job
    kind, machine = random_machine(seed, SMALL_TOO)
    space = space_of(kind, machine)
    oracle = oracle_of(seed, machine, space, kept)
    outcomes = []
    for rule in rules:
        with switched_off(rule):
            strategy = STRATEGIES[PLAIN_RULE if rule == PLAIN_RULE else OURS]
            chosen = strategy(machine, space, kind, seed, math.inf)
        outcomes.append(
            {"seed": seed, "kind": kind, "cores": machine.cores, "rule": rule, "regret": oracle.regret(chosen.config),
             "seconds": round(chosen.seconds, 3), "workers": chosen.config.num_workers}
        )  # fmt: skip
    return outcomes


def table(records: list[dict[str, Any]]) -> str:
    """What each rule brings, as a Markdown table; only machines on which all were tried count."""
    by_rule: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        by_rule[record["rule"]][record["seed"]] = record
    seeds = set.intersection(*(set(seen) for seen in by_rule.values()))

    def figures(rule: str) -> tuple[float, float, float, float]:
        mine = [by_rule[rule][seed] for seed in sorted(seeds)]
        regrets, seconds = [each["regret"] for each in mine], [each["seconds"] for each in mine]
        within = 100 * sum(regret <= NEAR for regret in regrets) / len(mine)
        return within, 100 * at(regrets, 0.9), at(seconds, 0.5), sum(each["workers"] for each in mine) / len(mine)

    usual = figures(AS_IT_IS)
    lines = [f"| without ({len(seeds)} machines) | within 2 % | regret p90 | seconds p50 | workers | it brings |"]
    lines.append("|---" * 6 + "|")
    for rule in by_rule:
        within, p90, seconds, workers = figures(rule)
        points, slower = usual[0] - within, 100 * (seconds / usual[2] - 1)
        stays = points >= LEAST_POINTS or slower >= LEAST_SECONDS
        brings = "" if rule in (AS_IT_IS, PLAIN_RULE) else f"{points:+.1f} points, {slower:+.0f} % s: "
        brings += "" if not brings else "stays" if stays else "goes"
        lines.append(f"| {rule} | {within:.1f} % | {p90:.1f} % | {seconds:.1f} | {workers:.1f} | {brings} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=30_000, help="seed of the first machine")
    parser.add_argument("--rules", default="", help="only these, with commas between; with + between, together")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--oracles", type=Path, help="folder in which the true rates are kept from run to run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    named = tuple(rule.strip() for rule in arguments.rules.split(",") if rule.strip())
    rules = (AS_IT_IS, PLAIN_RULE, *(named or RULES))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in arguments.output.read_text().splitlines()] if arguments.output.exists() else []
    seen = {(record["seed"], record["rule"]) for record in done}
    jobs = []
    for seed in range(arguments.first, arguments.first + arguments.machines):
        left = tuple(rule for rule in rules if (seed, rule) not in seen)
        jobs += [(seed, left, arguments.oracles)] if left else []
    with multiprocessing.Pool(arguments.processes) as pool, arguments.output.open("a") as stream:
        for outcomes in pool.imap(study_machine, jobs):
            stream.writelines(json.dumps(outcome) + "\n" for outcome in outcomes)
            stream.flush()
    print(table([json.loads(line) for line in arguments.output.read_text().splitlines()]))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
