"""What to do next: rules by verdict, each with its action, its measured reason and, if one can be made, an estimated gain.

An estimate is a prediction, or what is left when a measured cost is taken away; it never exceeds the next ceiling. Where
neither can be said, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autotune_loader.pipeline.stages import OTHER_THREADS, REST
from autotune_loader.report.advice.evidence import Evidence, receive_s
from autotune_loader.report.advice.verdict import LARGE_BATCH_BYTES, LARGE_STAGE, TRANSPORT_SHARE
from autotune_loader.report.units import bytes_text, counted, rate_text, seconds_text, share_text
from autotune_loader.results.loader_file import Advice, Binding, Verdict
from autotune_loader.twin.what_if import with_stages, without_waiting
from autotune_loader.values.stages import HAND_OVER

WORTH_S_TIME = 0.05
"""A gain below this is not worth anybody's time."""
BELIEVABLE_GAIN = 9.0
"""An estimate above this says that something else will bind long before; it is not printed."""
PYTHON_SAMPLE_S = 200e-6
"""Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves."""
BATCHED_FETCH_COLLATES = 2.5
"""A batched fetch and its collating take this many times the collating alone: gathering copies the same bytes, and the rows
are handed on one by one (2.6 and 3.5, in small and large batches)."""
MANY_TENSORS = 8
"""A segment and a descriptor for each tensor: more than this in a batch is worth fewer."""
THREADED_CORES = 1.3
"""A worker that keeps more cores than this busy starts threads of its own."""
HEAVY_TAIL, TAIL_BATCHES = 4, 20
"""The slowest batches take more than this many times the median; of fewer batches none is a tail."""
CHEAPER = {
    "decode": ": smaller source images, a faster decoder, or decoded once and kept",
    "read": ": larger pieces, or files that need no parsing",
    "collate": ": fewer and larger tensors",
}
NO_LINES = (HAND_OVER, OTHER_THREADS, REST)
"""Stages that are no lines of the user's."""
Steps = Iterator[Advice]
Rule = Callable[[Evidence], Steps]
"""Advice where the measurements call for it, each with its measured reason; nothing where they do not."""


def advise(evidence: Evidence, verdict: Verdict) -> tuple[Advice, ...]:
    """Concrete next steps: what the verdict calls for first, then what else the measurements show."""
    also = () if verdict.binding in ("step", "unknown") else ALWAYS
    rules = (*RULES.get(verdict.binding, ()), *also)
    return tuple(dict.fromkeys(advice for rule in rules for advice in rule(evidence)))


def _step(evidence: Evidence) -> Steps:
    yield Advice(
        action="Speed up the step itself (torch.compile, mixed precision, a larger batch) or leave it as it is.",
        reason=f"the loop waits for data only {share_text(evidence.measurement.wait_share)} of the time",
    )


def _cheaper_fetching(evidence: Evidence) -> Steps:
    """The stages that take much of a worker's CPU, the one worth most first; the transforms as a whole where none is known."""
    found, measured = [], evidence.measurement
    for each in evidence.stage_times:
        if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES:
            cheaper = evidence.twin and with_stages(evidence.twin, evidence.stage_times, {each.stage: 0.5})
            gain = _believable(evidence, evidence.predicted_gain(twin=cheaper))
            action = f"Make {each.stage!r} cheaper ({each.where}){CHEAPER.get(each.stage, '')}."
            takes = (
                f"it takes {share_text(each.cpu_share)} of a worker's CPU, {seconds_text(each.cpu_s)} for each sample"
            )
            found.append(Advice(action=action, reason=f"{takes}{_for_half(gain)}", expected_gain=gain))
    yield from sorted(found, key=lambda advice: -(advice.expected_gain or 0.0))
    if not found and measured.service_cpu_s > 0:
        gain = _gain_without(evidence, measured.service_cpu_s / 2, measured.service_cpu_s + _step_on_cpu_s(evidence))
        takes = f"each sample takes {seconds_text(measured.service_cpu_s / measured.batch_size)} of CPU"
        yield Advice(
            action="Make the transforms cheaper: smaller source images, a faster decoder, work moved out of the epoch.",
            reason=f"{takes}{_for_half(gain)}",
            expected_gain=gain,
        )


def _for_half(gain: float | None) -> str:
    return "" if gain is None else "; the gain is for half of that"


def _more_cores(evidence: Evidence) -> Steps:
    """Twice the cores with up to twice the workers."""
    if evidence.twin is None or evidence.best.num_workers == 0:
        return
    cores = 2 * evidence.usable_cores
    asked = [replace(evidence.best, num_workers=count) for count in (evidence.best.num_workers, cores)]
    then = max(evidence.twin.predict_all(asked, cores=cores), key=lambda answer: answer.samples_per_s.value)
    gain = _believable(evidence, evidence.predicted_gain(then.config, cores))
    if gain is not None:
        workers, rate = then.config.num_workers, rate_text(evidence.rate.value * (1 + gain))
        yield Advice(
            action=f"Use more cores: {rate} is predicted for {cores} cores and {counted(workers, 'worker')}.",
            reason=f"on {evidence.usable_cores} cores the best is {rate_text(evidence.rate.value)}",
            expected_gain=gain,
        )


def _more_workers(evidence: Evidence) -> Steps:
    more = replace(evidence.best, num_workers=2 * max(1, evidence.best.num_workers))
    gain = _believable(evidence, evidence.predicted_gain(more))
    is_allowed = evidence.space is not None and more.num_workers <= evidence.space.max_workers
    if gain is not None and not is_allowed:
        yield Advice(
            action=f"Allow more workers: max_workers={more.num_workers}.",
            reason=f"a fetch waits {_waits(evidence)} of its time and leaves its core alone meanwhile; "
            f"{rate_text(evidence.rate.value * (1 + gain))} is predicted for {more.num_workers} workers",
            expected_gain=gain,
        )


def _larger_reads(evidence: Evidence) -> Steps:
    longest = max(evidence.stage_times, key=lambda each: each.waited_s, default=None)
    line = "" if longest is None or not longest.waited_s else f", most of it in {longest.stage!r} ({longest.where})"
    gain = None if evidence.twin is None else evidence.predicted_gain(twin=without_waiting(evidence.twin))
    yield Advice(
        action="Read larger pieces (tar shards, Parquet, memory-mapped arrays) or cache the data on a local disk.",
        reason=f"a fetch waits {_waits(evidence)} of its time{line}",
        expected_gain=_believable(evidence, gain),
    )


def _waits(evidence: Evidence) -> str:
    return share_text(max(0.0, 1 - evidence.computing_share))


def _less_to_hand_over(evidence: Evidence) -> Steps:
    """Fewer bytes where they count, fewer batches where the fixed cost of each does; fewer tensors."""
    measured, period_s = evidence.measurement, evidence.period_s
    receiving_s = receive_s(measured)
    if measured.batch_bytes >= LARGE_BATCH_BYTES:
        in_loop = receiving_s > TRANSPORT_SHARE * period_s
        moved_s = receiving_s if in_loop else measured.service_s
        yield Advice(
            action="Send less per batch: uint8 instead of float32 (normalise in the step), crop in the worker.",
            reason=f"a batch carries {bytes_text(measured.batch_bytes)}",
            expected_gain=_gain_without(evidence, 0.75 * moved_s, period_s if in_loop else moved_s),
        )
    else:
        yield Advice(
            action="Hand over less often: a larger batch_size (tune(allow=('batch_size',)) tries it), or no worker at all.",
            reason=f"handing over takes {seconds_text(receiving_s)} however little a batch carries",
            expected_gain=_gain_without(evidence, receiving_s / 2, period_s),
        )
    if measured.batch_tensors > MANY_TENSORS:
        yield Advice(
            action="Collate into fewer, larger tensors.",
            reason=f"each of the {measured.batch_tensors} tensors of a batch travels in a segment of its own",
        )


def _pinning(evidence: Evidence) -> Steps:
    yield Advice(
        action="Send less per batch (uint8 instead of float32), or pin in the workers with a collate_fn of your own.",
        reason=f"one thread copies {bytes_text(evidence.measurement.batch_bytes)} a batch into page-locked memory",
    )


def _more_memory(evidence: Evidence) -> Steps:
    """Room for more workers, in the memory that lacks."""
    if (short := evidence.shortage()) is None:
        return
    action = (
        "Give the container more shared memory (--shm-size=8g), or make batches smaller."
        if short.is_shared_memory
        else "Make a worker smaller: numpy arrays, Arrow or memory-mapped files instead of lists of Python objects."
    )
    yield Advice(action=action, reason=short.why, expected_gain=_believable(evidence, short.gain))


def _startup(evidence: Evidence) -> Steps:
    share = evidence.startup_share
    yield Advice(
        action="Set persistent_workers=True; tune(allow=('persistent_workers',)) tries it where the dataset knows its epoch.",
        reason=f"starting workers takes {share_text(share)} of an epoch",
        expected_gain=_believable(evidence, share / (1 - share)),
    )


def _batched_fetch(evidence: Evidence) -> Steps:
    """`__getitems__`, its gain from the collating that was measured: gathering copies the same bytes to one place."""
    measured, sample_s = evidence.measurement, evidence.measurement.service_s / evidence.measurement.batch_size
    whole_s = sum(trace.service_s for trace in measured.traces)
    is_python = 0 < sample_s <= PYTHON_SAMPLE_S and evidence.computing_share >= 0.5
    if evidence.has_batched_fetch or whole_s <= 0 or not is_python:
        return
    collating = sum(trace.collate_end - trace.fetch_end for trace in measured.traces) / whole_s
    # What binds is one process without workers, and the cores with them.
    with_workers = measured.service_s + _step_on_cpu_s(evidence)
    busy_s = with_workers if evidence.best.num_workers else evidence.period_s
    gain = _gain_without(evidence, measured.service_s * max(0.0, 1 - BATCHED_FETCH_COLLATES * collating), busy_s)
    if gain is not None:
        yield Advice(
            action="Give the dataset a __getitems__(indices) that fetches a whole batch at once.",
            reason=f"{share_text(1 - collating)} of a fetch goes into single samples of {sample_s * 1e6:.0f} us each; "
            "gathering them at once should take little longer than collating does",
            expected_gain=gain,
        )


def _threaded_workers(evidence: Evidence) -> Steps:
    busy = (
        each.service_cpu_s / each.service_s for config, each in evidence.bursts if config.num_workers and each.service_s
    )
    if (cores := max(busy, default=0.0)) > THREADED_CORES:
        yield Advice(
            action="Keep libraries in workers to one thread: cv2.setNumThreads(0) in worker_init_fn, OMP_NUM_THREADS=1 in "
            "the environment.",
            reason=f"a worker keeps {cores:.1f} cores busy while it fetches, and there are {evidence.usable_cores}",
        )


def _heavy_tail(evidence: Evidence) -> Steps:
    """That a slow batch holds up those behind it: the slowest of a hundred against the median."""
    times = sorted(trace.service_s for trace in evidence.measurement.traces)
    is_ordered = evidence.best.in_order and evidence.best.num_workers > 1
    if len(times) < TAIL_BATCHES or evidence.measurement.wait_share <= WORTH_S_TIME or not is_ordered:
        return
    slowest, median = times[int(len(times) * 0.99)], times[len(times) // 2]
    if slowest > HEAVY_TAIL * median > 0:
        yield Advice(
            action="If the order of batches does not matter, tune(allow=('in_order',)) lets a slow batch be overtaken.",
            reason=f"the slowest batches take {slowest / median:.0f} times the median",
        )


def _step_on_cpu_s(evidence: Evidence) -> float:
    return 0.0 if evidence.on_accelerator else evidence.measurement.step_s


def _gain_without(evidence: Evidence, saved_s: float, of_s: float) -> float | None:
    """Relative gain when `saved_s` of a batch's `of_s` seconds go away; None as in `_believable`."""
    if of_s <= 0 or saved_s <= 0:
        return None
    return _believable(evidence, of_s / (of_s - saved_s) - 1 if of_s > saved_s else float("inf"))


def _believable(evidence: Evidence, gain: float | None) -> float | None:
    """The gain, as far as the step allows it; None where that leaves little, or next to no bound."""
    if gain is None:
        return None
    waits = evidence.measurement.wait_share
    # Without a ceiling the loop's own clock bounds it: more than its waiting cannot be saved.
    bound = evidence.ceiling_gain if evidence.ceiling is not None else 1 / (1 - waits) - 1 if waits < 1 else None
    gain = gain if bound is None else min(gain, bound)
    return gain if WORTH_S_TIME <= gain <= BELIEVABLE_GAIN else None


RULES: dict[Binding, tuple[Rule, ...]] = {
    "step": (_step,),
    "cpu": (_cheaper_fetching, _more_cores),
    "wait": (_more_workers, _larger_reads),
    "transport": (_less_to_hand_over,),
    "pinning": (_pinning,),
    "memory": (_more_memory,),
    "startup": (_startup,),
}
"""What a verdict calls for, in this order."""
ALWAYS: tuple[Rule, ...] = (_batched_fetch, _threaded_workers, _heavy_tail)
"""What may be said whatever binds; only the last where the step binds, or nothing is known."""
