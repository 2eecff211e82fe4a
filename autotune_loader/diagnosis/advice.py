"""What to do next: rules by bottleneck, each with its measured reason and, where arithmetic bounds it, the most it can bring.

No gain exceeds that of a loader without any cost. A rule that names a configuration looks at what was measured of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autotune_loader.diagnosis.bottleneck import (
    CORES_FULL_SHARE,
    LARGE_BATCH_BYTES,
    LARGE_STAGE,
    cores_words,
)
from autotune_loader.diagnosis.evidence import SAME_RATE, Evidence
from autotune_loader.diagnosis.tables import Advice, Bottleneck, Fact, all_of
from autotune_loader.diagnosis.units import counted
from autotune_loader.results.record import Finding
from autotune_loader.values.stages import HAND_OVER

WORTH_S_TIME = 0.05
"""A gain below this is not worth anybody's time."""
PYTHON_SAMPLE_S = 200e-6
"""Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves."""
BATCHED_FETCH_COLLATES = 2.5
"""A batched fetch and its collating take this many times the collating alone: gathering copies the same bytes, and the rows
are handed on one by one (2.6 and 3.5, in small and large batches)."""
MANY_TENSORS = 8
"""Each tensor travels by itself: more than this in a batch is worth fewer."""
THREADED_CORES = 1.3
"""A worker that keeps more cores than this busy starts threads of its own."""
HEAVY_TAIL = 4.0
"""The slowest batches take more than this many times the median."""
CROWDED_STEP = 1.3
"""A step on a CPU that takes more than this many times as long beside workers as alone is short of cores."""
CHEAPER = {
    "decode": ": smaller source images, a faster decoder, or decoded once and kept",
    "read": ": larger pieces, or files that need no parsing",
    "collate": ": fewer and larger tensors",
}
NO_LINES = (HAND_OVER, "other threads", "rest")
"""Stages that are no lines of the user's."""
Rule = Callable[[Evidence], Iterator[Finding]]
"""Advice where the measurements call for it; nothing where they do not."""


def advise(evidence: Evidence, bottleneck: Finding) -> tuple[Finding, ...]:
    """Concrete next steps: what the bottleneck calls for first, then what else the measurements show."""
    if bottleneck.kind in PLAIN:
        return (PLAIN[bottleneck.kind](),)
    rules = (*RULES[bottleneck.kind], *ALWAYS) if bottleneck.kind in RULES else ()
    return tuple(dict.fromkeys(advice for rule in rules for advice in rule(evidence)))


def _cheaper_fetching(evidence: Evidence) -> Iterator[Finding]:
    """The stages that take much of a worker's CPU, the largest first; the transforms as a whole where none is known."""
    large = [each for each in evidence.stages if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES]
    for each in sorted(large, key=lambda stage: -stage.cpu_share):
        found = Advice.CHEAPER_STAGE(
            stage=each.stage,
            where=each.where,
            how=CHEAPER.get(each.stage, ""),
            share=each.cpu_share,
            cpu=each.cpu_s,
        )
        yield _half_of(evidence, found, each.cpu_s * evidence.batch_size)
    if not large and evidence.fetch_cpu_s:
        found = Advice.CHEAPER_TRANSFORMS(cpu=evidence.fetch_cpu_s / evidence.batch_size)
        yield _half_of(evidence, found, evidence.fetch_cpu_s)


def _half_of(evidence: Evidence, found: Finding, cpu_s: float) -> Finding:
    """The advice with what half of these CPU seconds of a batch would bring at most."""
    gain = _gain_without(evidence, cpu_s / 2, (evidence.fetch_cpu_s or 0.0) + _step_on_cpu_s(evidence))
    return found if gain is None else all_of(found, Fact.HALF_OF_IT(gain=gain), gain=gain)


def _more_cores(evidence: Evidence) -> Iterator[Finding]:
    if (evidence.cpu_share or 0.0) > CORES_FULL_SHARE and evidence.config.num_workers:
        yield Advice.MORE_CORES(cores=counted(round(evidence.cores), "core"))


def _step_threads(evidence: Evidence) -> Iterator[Finding]:
    """A step on the CPU whose threads and the workers take the cores from each other."""
    if evidence.on_accelerator or evidence.ceiling is None or not evidence.config.num_workers or evidence.cores < 2:
        return
    alone_s, step_s = evidence.batch_size / evidence.ceiling.value, evidence.step_s or 0.0
    if step_s > CROWDED_STEP * alone_s and (evidence.cpu_share or 0.0) > CORES_FULL_SHARE:
        threads = max(1, round(evidence.cores) // 2)
        yield Advice.STEP_THREADS(threads=threads, cores=round(evidence.cores), step=step_s, alone=alone_s)


def _more_workers(evidence: Evidence) -> Iterator[Finding]:
    """Where the most workers that were allowed are the fastest, and fetches leave their cores alone."""
    tried, allowed = evidence.config.num_workers, evidence.max_workers
    fewer = [rate for count in range(tried) if (rate := evidence.rate_of(count)) is not None]
    still_rises = all(rate < (1 - SAME_RATE) * evidence.samples_per_s for rate in fewer)
    if allowed is not None and tried and tried >= allowed and still_rises:
        wait = max(0.0, 1 - evidence.undisturbed.computing_share)
        yield Advice.MORE_WORKERS(workers=2 * tried, wait=wait)


def _larger_reads(evidence: Evidence) -> Iterator[Finding]:
    fetch, waits = evidence.undisturbed, max(0.0, 1 - evidence.undisturbed.computing_share)
    longest = max(evidence.stages, key=lambda each: each.waited_s, default=None)
    line = None
    if longest is not None and longest.waited_s:
        whole_s = sum(each.waited_s for each in evidence.stages)
        line = Fact.STAGE_WAITS(stage=longest.stage, share=longest.waited_s / whole_s, where=longest.where)
    gain = _gain_without(evidence, (fetch.fetch_s or 0.0) - (fetch.fetch_cpu_s or 0.0), fetch.fetch_s or 0.0)
    most = None if gain is None else Fact.LESS_OF_IT(gain=gain)
    yield all_of(Advice.LARGER_READS(wait=waits), line, most, gain=gain)


def _less_to_hand_over(evidence: Evidence) -> Iterator[Finding]:
    """Fewer bytes where they count, fewer batches where the fixed cost of each does; fewer tensors; less cost of each."""
    period_s, receiving_s = evidence.period_s, evidence.receive_s or 0.0
    if evidence.batch_bytes >= LARGE_BATCH_BYTES:
        gain = _gain_without(evidence, 0.75 * receiving_s, period_s)
        found = Advice.SEND_LESS(size=evidence.batch_bytes)
    else:
        gain = _gain_without(evidence, receiving_s / 2, period_s)
        found = Advice.HAND_OVER_LESS_OFTEN(receive=receiving_s)
    yield all_of(found, None if gain is None else Fact.LESS_OF_IT(gain=gain), gain=gain)
    if evidence.batch_tensors > MANY_TENSORS:
        yield Advice.FEWER_TENSORS(tensors=counted(evidence.batch_tensors, "tensor"))
    yield Advice.AUTOLOADER_HANDS_OVER(workers=evidence.config.num_workers)


def _more_memory(evidence: Evidence) -> Iterator[Finding]:
    trial = evidence.ran_out
    is_shared = trial is not None and trial.failure is not None and trial.failure.kind == "shared_memory"
    yield Advice.MORE_SHARED_MEMORY() if is_shared else Advice.SMALLER_WORKERS()


def _keep_workers(evidence: Evidence) -> Iterator[Finding]:
    share = evidence.start_share
    if evidence.config.num_workers and not evidence.config.persistent_workers:
        gain = share / (1 - share) if share < 1 else None
        yield all_of(Advice.KEEP_WORKERS(), None if gain is None else Fact.LESS_OF_IT(gain=gain), gain=gain)


def _batched_fetch(evidence: Evidence) -> Iterator[Finding]:
    """`__getitems__`, its gain from the collating that was measured: gathering copies the same bytes to one place."""
    fetch_s, collating = evidence.fetch_s or 0.0, evidence.collate_share
    sample_s = fetch_s / evidence.batch_size
    is_python = 0 < sample_s <= PYTHON_SAMPLE_S and evidence.undisturbed.computing_share >= 0.5
    if evidence.has_batched_fetch or collating is None or not is_python:
        return
    # The bottleneck is one process without workers, and the cores with them.
    busy_s = fetch_s + _step_on_cpu_s(evidence) if evidence.config.num_workers else evidence.period_s
    gain = _gain_without(evidence, fetch_s * max(0.0, 1 - BATCHED_FETCH_COLLATES * collating), busy_s)
    if gain is not None:
        yield all_of(Advice.BATCHED_FETCH(share=1 - collating, sample=sample_s), Fact.LESS_OF_IT(gain=gain), gain=gain)


def _one_thread_workers(evidence: Evidence) -> Iterator[Finding]:
    busy = [
        each.service_cpu_s / each.service_s for config, each in evidence.bursts if config.num_workers and each.service_s
    ]
    if evidence.config.num_workers and evidence.fetch_s:
        busy.append((evidence.fetch_cpu_s or 0.0) / evidence.fetch_s)
    if max(busy, default=0.0) > THREADED_CORES:
        yield Advice.ONE_THREAD_WORKERS(busy=max(busy), cores=cores_words(evidence.cores))


def _out_of_order(evidence: Evidence) -> Iterator[Finding]:
    """That a slow batch holds up those behind it."""
    is_ordered = evidence.config.in_order and evidence.config.num_workers > 1
    is_waited_for = (evidence.wait_share or 0.0) > WORTH_S_TIME
    if is_ordered and is_waited_for and (evidence.slow_times or 0.0) > HEAVY_TAIL:
        yield Advice.OUT_OF_ORDER(times=evidence.slow_times)


def _step_on_cpu_s(evidence: Evidence) -> float:
    return 0.0 if evidence.on_accelerator else evidence.step_s or 0.0


def _gain_without(evidence: Evidence, saved_s: float, of_s: float) -> float | None:
    """Gain at most when `saved_s` of a batch's `of_s` seconds go away; None where it is little, or nothing bounds it."""
    most = evidence.headroom
    if of_s <= 0 or saved_s <= 0 or most is None:
        return None
    gain = min(most, of_s / (of_s - saved_s) - 1 if of_s > saved_s else most)
    return gain if gain >= WORTH_S_TIME else None


PLAIN = {
    Bottleneck.STEP.kind: Advice.SPEED_UP_STEP,
    Bottleneck.LITTLE.kind: Advice.LEAVE_IT,
    Bottleneck.NO_STEP.kind: Advice.KEEP_ITERATOR,
}
"""Bottlenecks that say it all."""
RULES: dict[str, tuple[Rule, ...]] = {
    Bottleneck.CPU.kind: (_cheaper_fetching, _more_cores, _step_threads),
    Bottleneck.STORAGE.kind: (_more_workers, _larger_reads),
    Bottleneck.HAND_OVER.kind: (_less_to_hand_over,),
    Bottleneck.MEMORY.kind: (_more_memory,),
    Bottleneck.START_UP.kind: (_keep_workers,),
    Bottleneck.IN_MEMORY.kind: (),
}
"""What other bottlenecks call for, in this order."""
ALWAYS: tuple[Rule, ...] = (_batched_fetch, _one_thread_workers, _out_of_order)
"""What may be said of any loader that limits."""
