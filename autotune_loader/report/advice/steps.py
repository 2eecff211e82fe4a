"""What to do next: rules by verdict, each with its action, its measured reason and, if one can be made, an estimated gain.

An estimate is a prediction, or what is left when a measured cost is taken away; it never exceeds the next ceiling. Where
neither can be said, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autotune_loader.pipeline.stages import OTHER_THREADS, REST
from autotune_loader.report.advice.evidence import Evidence, collate_share, receive_s, tail
from autotune_loader.report.advice.memory import shortage
from autotune_loader.report.advice.verdict import LARGE_BATCH_BYTES, LARGE_STAGE, TRANSPORT_SHARE
from autotune_loader.report.units import bytes_text, rate_text, seconds_text, share_text
from autotune_loader.results.loader_file import Advice, Binding, Verdict
from autotune_loader.twin.what_if import with_stages, without_waiting
from autotune_loader.values.stages import HAND_OVER

# A gain below this is not worth anybody's time.
WORTH_S_TIME = 0.05
# An estimate above this says that something else will bind long before; it is not printed.
BELIEVABLE_GAIN = 9.0
# Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves.
PYTHON_SAMPLE_S = 200e-6
# A batched fetch and its collating take this many times the collating alone: gathering copies the same bytes, and the rows
# are handed on one by one (studies/verdict: 2.6 and 3.5, in small and large batches).
BATCHED_FETCH_COLLATES = 2.5
# A segment and a descriptor for each tensor: more than this in a batch is worth fewer.
MANY_TENSORS = 8
# A worker that keeps more cores than this busy starts threads of its own.
THREADED_CORES = 1.3
# The slowest batches take more than this many times the median.
HEAVY_TAIL = 4
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
    also = (_lists_of_objects,) if verdict.binding in ("step", "unknown") else ALWAYS
    rules = (*RULES.get(verdict.binding, ()), *also)
    return tuple(dict.fromkeys(advice for rule in rules for advice in rule(evidence)))


def _step(evidence: Evidence) -> Steps:
    yield Advice(
        action="Speed up the step itself (torch.compile, mixed precision, a larger batch) or leave it as it is.",
        reason=f"the loop waits for data only {share_text(evidence.measurement.wait_share)} of the time",
    )


def _cheaper_fetching(evidence: Evidence) -> Steps:
    """The stages that take much of a worker's CPU, the one worth most first; the transforms as a whole where none is known."""
    found = []
    for each in evidence.stage_times:
        if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES:
            cheaper = evidence.twin and with_stages(evidence.twin, evidence.stage_times, {each.stage: 0.5})
            gain = _believable(evidence, evidence.predicted_gain(twin=cheaper))
            action = f"Make {each.stage!r} cheaper ({each.where}){CHEAPER.get(each.stage, '')}."
            takes = f"{share_text(each.cpu_share)} of a worker's CPU, {seconds_text(each.cpu_s)} for each sample"
            found.append(Advice(action=action, reason=f"it takes {takes}{_for_half(gain)}", expected_gain=gain))
    yield from sorted(found, key=lambda advice: -(advice.expected_gain or 0.0))
    measured = evidence.measurement
    if not found and measured.service_cpu_s > 0:
        whole_s = measured.service_cpu_s + _step_on_cpu_s(evidence)
        gain = _gain_without(evidence, measured.service_cpu_s / 2, of=whole_s)
        sample_s = measured.service_cpu_s / measured.batch_size
        yield Advice(
            action="Make the transforms cheaper: smaller source images, a faster decoder, work moved out of the epoch.",
            reason=f"each sample takes {seconds_text(sample_s)} of CPU{_for_half(gain)}",
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
            action=f"Use more cores: {rate} is predicted for {cores} cores and {workers} workers.",
            reason=f"on {evidence.usable_cores} cores the best is {rate_text(evidence.rate.value)}",
            expected_gain=gain,
        )


def _more_workers(evidence: Evidence) -> Steps:
    more = replace(evidence.best, num_workers=2 * max(1, evidence.best.num_workers))
    gain = _believable(evidence, evidence.predicted_gain(more))
    is_allowed = evidence.space is not None and more.num_workers <= evidence.space.max_workers
    if gain is not None and not is_allowed and not _is_crowded(evidence):
        yield Advice(
            action=f"Allow more workers than cores: max_workers={more.num_workers}.",
            reason=f"a fetch waits {_waits(evidence)} of its time and leaves its core alone meanwhile; "
            f"{rate_text(evidence.rate.value * (1 + gain))} is predicted for {more.num_workers} workers",
            expected_gain=gain,
        )


def _larger_reads(evidence: Evidence) -> Steps:
    measured = evidence.measurement
    longest = max(evidence.stage_times, key=lambda each: each.waited_s, default=None)
    line = "" if longest is None or not longest.waited_s else f", most of it in {longest.stage!r} ({longest.where})"
    crowded = "; it waits longer the more workers there are" if _is_crowded(evidence) else ""
    yield Advice(
        action="Read larger pieces (tar shards, Parquet, memory-mapped arrays) or cache the data on a local disk.",
        reason=f"a fetch waits {_waits(evidence)} of its time{line}{crowded}",
        expected_gain=_gain_without(evidence, max(0.0, measured.service_s - measured.service_cpu_s))
        if evidence.twin is None
        else _believable(evidence, evidence.predicted_gain(twin=without_waiting(evidence.twin))),
    )


def _waits(evidence: Evidence) -> str:
    return share_text(max(0.0, 1 - evidence.computing_share()))


def _is_crowded(evidence: Evidence) -> bool:
    now = evidence.predicted(evidence.best)
    return now is not None and now.binding == "storage"


def _less_to_hand_over(evidence: Evidence) -> Steps:
    """Fewer bytes where they count, fewer batches where the fixed cost of each does; fewer tensors."""
    measured = evidence.measurement
    receiving_s = receive_s(measured) if evidence.best.num_workers else 0.0
    if measured.batch_bytes >= LARGE_BATCH_BYTES:
        in_loop = receiving_s > TRANSPORT_SHARE * evidence.period_s
        whole_s, moved_s = (evidence.period_s, receiving_s) if in_loop else (measured.service_s, measured.service_s)
        whole_s = whole_s if evidence.best.num_workers else evidence.period_s
        yield Advice(
            action="Send less per batch: uint8 instead of float32 (normalise in the step), crop in the worker.",
            reason=f"a batch carries {bytes_text(evidence.measurement.batch_bytes)}",
            expected_gain=_gain_without(evidence, 0.75 * moved_s, of=whole_s),
        )
    else:
        hand_over_s = receiving_s or evidence.hand_over_s()
        yield Advice(
            action="Hand over less often: a larger batch_size (allow=('batch_size',)), or no worker at all.",
            reason=f"handing over takes {seconds_text(hand_over_s)} however little a batch carries",
            expected_gain=_gain_without(evidence, receiving_s / 2, of=evidence.period_s),
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
    short = shortage(evidence)
    if short is None:
        return
    gain = _believable(evidence, short.gain)
    if short.is_shared_memory:
        action = "Give the container more shared memory (--shm-size=8g), or make batches smaller."
        reason = (
            f"a batch of {bytes_text(evidence.measurement.batch_bytes)} waits in /dev/shm for each place in a queue"
        )
    else:
        each = evidence.worker_bytes()
        action = "Make a worker smaller: numpy arrays, Arrow or memory-mapped files instead of lists of Python objects."
        reason = f"more workers {'ran out of memory' if short.has_failed else 'would not fit into memory'}"
        reason += "" if each is None else f"; each takes {bytes_text(each)}"
        rate = rate_text(evidence.rate.value * (1 + (gain or 0.0)))
        reason += "" if gain is None else f"; with room for them {rate} is predicted"
    yield Advice(action=action, reason=reason, expected_gain=gain)


def _startup(evidence: Evidence) -> Steps:
    share = evidence.startup_share()
    yield Advice(
        action="Set persistent_workers=True (allow=('persistent_workers',) if the dataset knows its epoch).",
        reason=f"starting workers takes {share_text(share)} of an epoch",
        expected_gain=_believable(evidence, share / (1 - share)),
    )


def _batched_fetch(evidence: Evidence) -> Steps:
    """`__getitems__`, its gain from the collating that was measured: gathering copies the same bytes to one place."""
    measured = evidence.measurement
    share = collate_share(measured)
    if evidence.has_batched_fetch or share is None or measured.service_s <= 0:
        return
    sample_s = measured.service_s / measured.batch_size
    if sample_s > PYTHON_SAMPLE_S or evidence.computing_share() < 0.5:
        return
    saved_s = measured.service_s * max(0.0, 1 - BATCHED_FETCH_COLLATES * share)
    # What binds is one process without workers, and the cores with them.
    with_workers = measured.service_s + _step_on_cpu_s(evidence)
    busy_s = with_workers if evidence.best.num_workers else evidence.period_s
    gain = _gain_without(evidence, saved_s, of=busy_s)
    if gain is not None:
        yield Advice(
            action="Give the dataset a __getitems__(indices) that fetches a whole batch at once.",
            reason=f"{share_text(1 - share)} of a fetch goes into single samples of {sample_s * 1e6:.0f} us each; gathering "
            "them at once should take little longer than collating does",
            expected_gain=gain,
        )


def _threaded_workers(evidence: Evidence) -> Steps:
    cores = evidence.cores_per_worker()
    if cores > THREADED_CORES:
        yield Advice(
            action="Keep libraries in workers to one thread: cv2.setNumThreads(0) in worker_init_fn, OMP_NUM_THREADS=1 in "
            "the environment.",
            reason=f"a worker keeps {cores:.1f} cores busy while it fetches, and there are {evidence.usable_cores}",
        )


def _heavy_tail(evidence: Evidence) -> Steps:
    heavy, waits = tail(evidence.measurement), evidence.measurement.wait_share > WORTH_S_TIME
    if heavy > HEAVY_TAIL and waits and evidence.best.in_order and evidence.best.num_workers > 1:
        yield Advice(
            action="If the order of batches does not matter, allow=('in_order',) lets a slow batch be overtaken.",
            reason=f"the slowest batches take {heavy:.0f} times the median",
        )


def _lists_of_objects(evidence: Evidence) -> Steps:
    held = evidence.held
    if held is not None and evidence.best.num_workers:
        yield Advice(
            action=f"Keep samples in numpy arrays or tensors instead of lists of Python objects: {held.code()}.",
            reason=f"{held}: counting references copies the pages that workers share, until each has a copy of its own",
        )


def _step_on_cpu_s(evidence: Evidence) -> float:
    return 0.0 if evidence.on_accelerator else evidence.measurement.step_s


def _gain_without(evidence: Evidence, saved_s: float, of: float | None = None) -> float | None:
    """Relative gain when `saved_s` of a batch's `of` seconds (its fetch if None) go away; None as in `_believable`."""
    whole_s = evidence.measurement.service_s if of is None else of
    if whole_s <= 0 or saved_s <= 0:
        return None
    left = max(0.0, 1 - saved_s / whole_s)
    return _believable(evidence, 1 / left - 1 if left > 0 else float("inf"))


def _believable(evidence: Evidence, gain: float | None) -> float | None:
    """The gain, as far as the step allows it; None where that leaves little, or next to no bound."""
    if gain is None:
        return None
    if evidence.ceiling is not None:
        gain = min(gain, evidence.ceiling.value / evidence.rate.value - 1)
    elif evidence.measurement.wait_share < 1:
        # Without a ceiling the loop's own clock bounds it: more than its waiting cannot be saved.
        gain = min(gain, 1 / (1 - evidence.measurement.wait_share) - 1)
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
ALWAYS: tuple[Rule, ...] = (_batched_fetch, _threaded_workers, _heavy_tail, _lists_of_objects)
"""What may be said whatever binds; only the last where the step binds, or nothing is known."""
