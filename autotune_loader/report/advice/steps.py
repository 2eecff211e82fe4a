"""What to do next: concrete steps, each with its measured reason and, where one can be made, an estimate of the gain.

An estimate is what the twin predicts, or what is left when a measured cost is taken away; it never exceeds the next
ceiling. Where neither can be said, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune_loader.pipeline.stages import OTHER_THREADS, REST
from autotune_loader.report.advice.evidence import Evidence, collate_share, receive_s, tail
from autotune_loader.report.advice.memory import shortage
from autotune_loader.report.advice.verdict import LARGE_BATCH_BYTES, LARGE_STAGE, TRANSPORT_SHARE, gain_words
from autotune_loader.report.units import rate_text, share_text
from autotune_loader.results.loader_file import Advice, Verdict
from autotune_loader.values.stages import HAND_OVER

# A gain below this is not worth anybody's time.
WORTH_S_TIME = 0.05
# An estimate above this says that something else will bind long before; it is not printed.
BELIEVABLE_GAIN = 9.0
# Host memory that grows faster than this is no noise (bytes per second).
LEAKING_BYTES_PER_S = 4 << 20
# Fetching a sample faster than this is mostly Python's overhead per sample, which a batched fetch saves.
PYTHON_SAMPLE_S = 200e-6
# A batched fetch and its collating take this many times the collating alone: gathering copies the same bytes, and the rows
# are handed on one by one (studies/verdict: 2.6 and 3.5, in small and large batches).
BATCHED_FETCH_COLLATES = 2.5
CHEAPER = {
    "decode": ": smaller source images, a faster decoder, or decoded once and kept",
    "read": ": larger pieces, or files that need no parsing",
    "collate": ": fewer and larger tensors",
}
NO_LINES = (HAND_OVER, OTHER_THREADS, REST)
"""Stages that are no lines of the user's."""


def advise(evidence: Evidence, verdict: Verdict) -> tuple[Advice, ...]:
    """Concrete next steps: what the verdict calls for first, then what else the measurements show."""
    by_verdict = {
        "step": _on_step,
        "cpu": _on_cpu,
        "wait": _on_wait,
        "transport": _on_transport,
        "pinning": _on_pinning,
        "memory": _on_memory,
        "startup": _on_startup,
        "in_memory": _batched_fetch,
    }
    first = by_verdict[verdict.binding](evidence) if verdict.binding in by_verdict else iter(())
    also = _whatever_binds(evidence) if verdict.binding not in ("step", "unknown") else _memory_growth(evidence)
    return tuple(dict.fromkeys([*first, *also]))


def _on_step(evidence: Evidence) -> Iterator[Advice]:
    yield Advice(
        action="Speed up the step itself (torch.compile, mixed precision, a larger batch) or leave it as it is.",
        reason=f"the loop waits for data only {share_text(evidence.measurement.wait_share)} of the time",
    )


def _on_cpu(evidence: Evidence) -> Iterator[Advice]:
    measured = evidence.measurement
    cheaper = sorted(_cheaper_stages(evidence), key=lambda each: -(each.expected_gain or 0.0))
    yield from cheaper
    if not cheaper and measured.service_cpu_s > 0:
        halved = measured.service_cpu_s / 2
        gain = _gain_without(evidence, halved, of=measured.service_cpu_s + _step_on_cpu_s(evidence))
        yield Advice(
            action="Make the transforms cheaper: smaller source images, a faster decoder, work moved out of the epoch.",
            reason=f"each sample takes {measured.service_cpu_s / measured.batch_size * 1e3:.2g} ms of CPU"
            + ("" if gain is None else f"; with half of that {_rise_words(gain)}"),
            expected_gain=gain,
        )
    yield from _more_cores(evidence)


def _cheaper_stages(evidence: Evidence) -> Iterator[Advice]:
    """The stages that take much of a worker's CPU, each with what half of it would bring by the twin."""
    for each in evidence.stage_times:
        if each.cpu_share < LARGE_STAGE or each.stage in NO_LINES:
            continue
        gain = _believable(evidence, evidence.stage_gain(each, 0.5))
        yield Advice(
            action=f"Make {each.stage!r} cheaper ({each.where}){CHEAPER.get(each.stage, '')}.",
            reason=f"it takes {share_text(each.cpu_share)} of a worker's CPU, {each.cpu_s * 1e3:.2g} ms for each sample"
            + ("" if gain is None else f"; with half of that {_rise_words(gain)}"),
            expected_gain=gain,
        )


def _rise_words(gain: float) -> str:
    return f"the rate would rise {'by' if gain < 1 else 'to'} about {gain_words(gain)}"


def _step_on_cpu_s(evidence: Evidence) -> float:
    return 0.0 if evidence.on_accelerator or not evidence.cached_steps else evidence.measurement.step_s


def _more_cores(evidence: Evidence) -> Iterator[Advice]:
    """Twice the cores with up to twice the workers, predicted by the twin."""
    if evidence.twin is None or evidence.best.num_workers == 0:
        return
    cores = 2 * evidence.usable_cores
    asked = [replace(evidence.best, num_workers=count) for count in (evidence.best.num_workers, cores)]
    then = max(evidence.twin.predict_all(asked, cores=cores), key=lambda answer: answer.samples_per_s.value)
    gain = _believable(evidence, evidence.predicted_gain(then.config, cores))
    if gain is not None:
        yield Advice(
            action=f"Use more cores: with {cores} cores and {then.config.num_workers} workers the twin predicts "
            f"{rate_text(evidence.rate.value * (1 + gain))}.",
            reason=f"on {evidence.usable_cores} cores the best is {rate_text(evidence.rate.value)}",
            expected_gain=gain,
        )


def _on_wait(evidence: Evidence) -> Iterator[Advice]:
    measured = evidence.measurement
    now = evidence.predicted(evidence.best)
    share = max(0.0, 1 - evidence.computing_share())
    more = replace(evidence.best, num_workers=2 * max(1, evidence.best.num_workers))
    gain = _believable(evidence, evidence.predicted_gain(more))
    is_allowed = evidence.space is not None and more.num_workers <= evidence.space.max_workers
    if gain is not None and not is_allowed and (now is None or now.binding != "storage"):
        yield Advice(
            action=f"Allow more workers than cores: max_workers={more.num_workers}.",
            reason=f"a fetch waits {share_text(share)} of its time and leaves its core alone meanwhile; the twin predicts "
            f"{rate_text(evidence.rate.value * (1 + gain))} with {more.num_workers} workers",
            expected_gain=gain,
        )
    longest = max(evidence.stage_times, key=lambda each: each.waited_s, default=None)
    line = "" if longest is None or not longest.waited_s else f", most of it in {longest.stage!r} ({longest.where})"
    crowded = "; it waits longer the more workers there are" if now is not None and now.binding == "storage" else ""
    yield Advice(
        action="Read larger pieces (tar shards, Parquet, memory-mapped arrays) or cache the data on a local disk.",
        reason=f"a fetch waits {share_text(share)} of its time{line}{crowded}",
        expected_gain=_believable(evidence, evidence.gain_without_waiting())
        if evidence.twin is not None
        else _gain_without(evidence, max(0.0, measured.service_s - measured.service_cpu_s)),
    )


def _on_transport(evidence: Evidence) -> Iterator[Advice]:
    measured = evidence.measurement
    seconds = receive_s(measured) if evidence.best.num_workers else 0.0
    if measured.batch_bytes >= LARGE_BATCH_BYTES:
        in_loop = seconds > TRANSPORT_SHARE * evidence.period_s
        whole_s, moved_s = (evidence.period_s, seconds) if in_loop else (measured.service_s, measured.service_s)
        yield Advice(
            action="Send less per batch: uint8 instead of float32 (normalise in the step), crop in the worker.",
            reason=f"a batch carries {measured.batch_bytes / 2**20:.1f} MiB",
            expected_gain=_gain_without(
                evidence, 0.75 * moved_s, of=whole_s if evidence.best.num_workers else evidence.period_s
            ),
        )
    elif measured.batch_bytes < LARGE_BATCH_BYTES:
        yield Advice(
            action="Hand over less often: a larger batch_size (allow=('batch_size',)), or no worker at all.",
            reason=f"handing over takes {(seconds or evidence.hand_over_s()) * 1e3:.2g} ms however little a batch carries",
            expected_gain=_gain_without(evidence, seconds / 2, of=evidence.period_s),
        )
    if measured.batch_tensors > 8:  # each has its own descriptor and segment
        yield Advice(
            action="Collate into fewer, larger tensors.",
            reason=f"each of the {measured.batch_tensors} tensors of a batch travels in a segment of its own",
        )


def _on_pinning(evidence: Evidence) -> Iterator[Advice]:
    yield Advice(
        action="Send less per batch (uint8 instead of float32), or pin in the workers with a collate_fn of your own.",
        reason=f"one thread copies {evidence.measurement.batch_bytes / 2**20:.1f} MiB a batch into page-locked memory",
    )


def _on_memory(evidence: Evidence) -> Iterator[Advice]:
    failed = evidence.stopped_by_memory()
    each, short = evidence.worker_bytes(), shortage(evidence)
    gains = [gain for trial in failed if (gain := evidence.missed_gain(trial)) is not None]
    gain = _believable(evidence, max(gains, default=None))
    if gain is None and short is not None:
        gain = _believable(evidence, short.gain)
    lacks_shm = short is not None and short.resource == "shared memory"
    if failed:
        lacks_shm = any(trial.failure is not None and trial.failure.kind == "shared_memory" for trial in failed)
    if lacks_shm:
        yield Advice(
            action="Give the container more shared memory (--shm-size=8g), or make batches smaller.",
            reason=f"a batch of {evidence.measurement.batch_bytes / 2**20:.1f} MiB waits in /dev/shm for each place in a queue",
            expected_gain=gain,
        )
        return
    yield Advice(
        action="Make a worker smaller: numpy arrays, Arrow or memory-mapped files instead of lists of Python objects.",
        reason=("more workers ran out of memory" if failed else "more workers would not fit into memory")
        + ("" if each is None else f"; each takes {each / 2**20:,.0f} MiB")
        + ("" if gain is None else f"; with room for them the twin predicts {evidence.rate.value * (1 + gain):,.0f}/s"),
        expected_gain=gain,
    )


def _on_startup(evidence: Evidence) -> Iterator[Advice]:
    share = evidence.startup_share()
    yield Advice(
        action="Set persistent_workers=True (allow=('persistent_workers',) if the dataset knows its epoch).",
        reason=f"starting workers takes {share_text(share)} of an epoch",
        expected_gain=_believable(evidence, share / (1 - share)),
    )


def _whatever_binds(evidence: Evidence) -> Iterator[Advice]:
    yield from _batched_fetch(evidence)
    yield from _threaded_workers(evidence)
    yield from _heavy_tail(evidence)
    yield from _memory_growth(evidence)


def _batched_fetch(evidence: Evidence) -> Iterator[Advice]:
    """`__getitems__`, its gain from the collating that was measured: gathering copies the same bytes to one place."""
    measured = evidence.measurement
    share = collate_share(measured)
    if evidence.has_batched_fetch or share is None or measured.service_s <= 0:
        return
    sample_s = measured.service_s / measured.batch_size
    saved_s = measured.service_s * max(0.0, 1 - BATCHED_FETCH_COLLATES * share)
    if sample_s > PYTHON_SAMPLE_S or evidence.computing_share() < 0.5:
        return
    gain = _gain_without(evidence, saved_s, of=_busy_s(evidence))
    if gain is not None:
        yield Advice(
            action="Give the dataset a __getitems__(indices) that fetches a whole batch at once.",
            reason=f"{share_text(1 - share)} of a fetch goes into single samples of {sample_s * 1e6:.0f} us each; gathering "
            "them at once should take little longer than collating does",
            expected_gain=gain,
        )


def _threaded_workers(evidence: Evidence) -> Iterator[Advice]:
    cores = evidence.cores_per_worker()
    if cores > 1.3:  # more than one: it starts threads of its own
        yield Advice(
            action="Keep libraries in workers to one thread: cv2.setNumThreads(0) in worker_init_fn, OMP_NUM_THREADS=1 in "
            "the environment.",
            reason=f"a worker keeps {cores:.1f} cores busy while it fetches, and there are {evidence.usable_cores}",
        )


def _heavy_tail(evidence: Evidence) -> Iterator[Advice]:
    heavy = tail(evidence.measurement)
    if heavy <= 4 or not evidence.best.in_order or evidence.best.num_workers < 2:
        return
    gain = evidence.predicted_gain(replace(evidence.best, in_order=False))
    if gain is None or gain > WORTH_S_TIME:
        yield Advice(
            action="If the order of batches does not matter, allow=('in_order',) lets a slow batch be overtaken.",
            reason=f"the slowest batches take {heavy:.0f} times the median",
            expected_gain=_believable(evidence, gain),
        )


def _memory_growth(evidence: Evidence) -> Iterator[Advice]:
    memory = evidence.measurement.memory
    slope = None if memory is None else memory.pss_slope_bytes_per_s
    if slope is not None and slope > LEAKING_BYTES_PER_S and evidence.best.num_workers:
        held = evidence.held
        where = "" if held is None else f": {held.code()}"
        yield Advice(
            action=f"Keep samples in numpy arrays or tensors instead of lists of Python objects{where}.",
            reason=f"the processes' memory grows by {slope / 2**20:.0f} MiB/s while they read: counting references copies "
            f"the pages that workers share{'' if held is None else f'; {held}'}",
        )


def _busy_s(evidence: Evidence) -> float:
    """Seconds in which a batch keeps what binds busy: one process without workers, the cores with them."""
    measured = evidence.measurement
    if evidence.best.num_workers == 0:
        return evidence.period_s
    return measured.service_s + _step_on_cpu_s(evidence)


def _gain_without(evidence: Evidence, saved_s: float, of: float | None = None) -> float | None:
    """Relative gain when `saved_s` of a batch's `of` seconds (its fetch if None) go away; None as in `_believable`."""
    whole_s = evidence.measurement.service_s if of is None else of
    if whole_s <= 0 or saved_s <= 0:
        return None
    left = max(0.0, 1 - saved_s / whole_s)
    return _believable(evidence, 1 / left - 1 if left > 0 else float("inf"))


def _believable(evidence: Evidence, gain: float | None) -> float | None:
    """The gain, as far as step and cores allow it; None where that leaves little, or next to no bound."""
    if gain is None:
        return None
    limit = evidence.cores_limit() if evidence.computing_share() < 0.5 else None
    allowed = [bound.value / evidence.rate.value - 1 for bound in (evidence.ceiling, limit) if bound is not None]
    if evidence.ceiling is None and evidence.measurement.wait_share < 1:
        # Without a ceiling the loop's own clock bounds it: more than its waiting cannot be saved.
        allowed.append(1 / (1 - evidence.measurement.wait_share) - 1)
    gain = min([gain, *allowed])
    return gain if WORTH_S_TIME <= gain <= BELIEVABLE_GAIN else None
