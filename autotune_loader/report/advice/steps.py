"""What to do next: a table of rules, each with its action, its measured reason and, if one can be made, an estimated gain.

An estimate is a prediction, or what is left when a measured cost is taken away; it never exceeds the next ceiling. Where
neither can be said, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.pipeline.stages import OTHER_THREADS, REST
from autotune_loader.report.advice.evidence import Evidence, collate_share, receive_s, tail
from autotune_loader.report.advice.memory import shortage
from autotune_loader.report.advice.verdict import LARGE_BATCH_BYTES, LARGE_STAGE, TRANSPORT_SHARE, gain_words
from autotune_loader.report.units import rate_text, share_text
from autotune_loader.results.loader_file import Advice, Binding, Verdict
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
Found = Mapping[str, Any]
"""What a rule's sentences are filled with; `gain` is the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of advice."""

    bindings: tuple[Binding, ...]
    """Verdicts that it belongs to; empty for all but those that leave nothing to say."""
    when: Callable[[Evidence], Iterator[Found]]
    """Nothing where it does not apply."""
    action: str
    reason: str

    def advice(self, evidence: Evidence) -> Iterator[Advice]:
        for found in self.when(evidence):
            values = {"rise": _rise(found.get("gain")), **found}
            action, reason = self.action.format(**values), self.reason.format(**values)
            yield Advice(action=action, reason=reason, expected_gain=found.get("gain"))


def advise(evidence: Evidence, verdict: Verdict) -> tuple[Advice, ...]:
    """Concrete next steps: what the verdict calls for first, then what else the measurements show."""
    first = [each for rule in RULES if verdict.binding in rule.bindings for each in rule.advice(evidence)]
    rules = ALWAYS[-1:] if verdict.binding in ("step", "unknown") else ALWAYS
    also = [each for rule in rules for each in rule.advice(evidence)]
    return tuple(dict.fromkeys([*first, *also]))


def _rise(gain: float | None) -> str:
    if gain is None:
        return ""
    return f"; with half of that the rate would rise {'by' if gain < 1 else 'to'} about {gain_words(gain)}"


def _waits(evidence: Evidence) -> str:
    return share_text(max(0.0, 1 - evidence.computing_share()))


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def _step(evidence: Evidence) -> Iterator[Found]:
    yield {"waits": share_text(evidence.measurement.wait_share)}


def _cheaper_stages(evidence: Evidence) -> Iterator[Found]:
    """The stages that take much of a worker's CPU, the one worth most first."""
    found: list[tuple[float, Found]] = []
    for each in evidence.stage_times:
        if each.cpu_share >= LARGE_STAGE and each.stage not in NO_LINES:
            values = {"stage": each.stage, "where": each.where, "how": CHEAPER.get(each.stage, "")}
            values |= {"share": share_text(each.cpu_share), "ms": f"{each.cpu_s * 1e3:.2g}"}
            gain = _believable(evidence, evidence.stage_gain(each, 0.5))
            found.append((-(gain or 0.0), {**values, "gain": gain}))
    yield from (values for _, values in sorted(found, key=lambda pair: pair[0]))


def _cheaper_transforms(evidence: Evidence) -> Iterator[Found]:
    measured = evidence.measurement
    if measured.service_cpu_s > 0 and not any(_cheaper_stages(evidence)):
        whole_s = measured.service_cpu_s + _step_on_cpu_s(evidence)
        gain = _gain_without(evidence, measured.service_cpu_s / 2, of=whole_s)
        yield {"ms": f"{measured.service_cpu_s / measured.batch_size * 1e3:.2g}", "gain": gain}


def _more_cores(evidence: Evidence) -> Iterator[Found]:
    """Twice the cores with up to twice the workers."""
    if evidence.twin is None or evidence.best.num_workers == 0:
        return
    cores = 2 * evidence.usable_cores
    asked = [replace(evidence.best, num_workers=count) for count in (evidence.best.num_workers, cores)]
    then = max(evidence.twin.predict_all(asked, cores=cores), key=lambda answer: answer.samples_per_s.value)
    gain = _believable(evidence, evidence.predicted_gain(then.config, cores))
    if gain is not None:
        rates = {"then": rate_text(evidence.rate.value * (1 + gain)), "now": rate_text(evidence.rate.value)}
        yield {
            "cores": cores,
            "workers": then.config.num_workers,
            "usable": evidence.usable_cores,
            "gain": gain,
            **rates,
        }


def _more_workers(evidence: Evidence) -> Iterator[Found]:
    more = replace(evidence.best, num_workers=2 * max(1, evidence.best.num_workers))
    gain = _believable(evidence, evidence.predicted_gain(more))
    is_allowed = evidence.space is not None and more.num_workers <= evidence.space.max_workers
    if gain is not None and not is_allowed and not _is_crowded(evidence):
        then = rate_text(evidence.rate.value * (1 + gain))
        yield {"workers": more.num_workers, "waits": _waits(evidence), "then": then, "gain": gain}


def _larger_reads(evidence: Evidence) -> Iterator[Found]:
    measured = evidence.measurement
    longest = max(evidence.stage_times, key=lambda each: each.waited_s, default=None)
    line = "" if longest is None or not longest.waited_s else f", most of it in {longest.stage!r} ({longest.where})"
    crowded = "; it waits longer the more workers there are" if _is_crowded(evidence) else ""
    gain = (
        _believable(evidence, evidence.gain_without_waiting())
        if evidence.twin is not None
        else _gain_without(evidence, max(0.0, measured.service_s - measured.service_cpu_s))
    )
    yield {"waits": _waits(evidence), "line": line, "crowded": crowded, "gain": gain}


def _is_crowded(evidence: Evidence) -> bool:
    now = evidence.predicted(evidence.best)
    return now is not None and now.binding == "storage"


def _fewer_bytes(evidence: Evidence) -> Iterator[Found]:
    measured, seconds = evidence.measurement, _receiving_s(evidence)
    if measured.batch_bytes < LARGE_BATCH_BYTES:
        return
    in_loop = seconds > TRANSPORT_SHARE * evidence.period_s
    whole_s, moved_s = (evidence.period_s, seconds) if in_loop else (measured.service_s, measured.service_s)
    whole_s = whole_s if evidence.best.num_workers else evidence.period_s
    yield {"mib": _mib(measured.batch_bytes), "gain": _gain_without(evidence, 0.75 * moved_s, of=whole_s)}


def _fewer_batches(evidence: Evidence) -> Iterator[Found]:
    seconds = _receiving_s(evidence)
    if evidence.measurement.batch_bytes < LARGE_BATCH_BYTES:
        gain = _gain_without(evidence, seconds / 2, of=evidence.period_s)
        yield {"ms": f"{(seconds or evidence.hand_over_s()) * 1e3:.2g}", "gain": gain}


def _receiving_s(evidence: Evidence) -> float:
    return receive_s(evidence.measurement) if evidence.best.num_workers else 0.0


def _fewer_tensors(evidence: Evidence) -> Iterator[Found]:
    if evidence.measurement.batch_tensors > MANY_TENSORS:
        yield {"tensors": evidence.measurement.batch_tensors}


def _pinning(evidence: Evidence) -> Iterator[Found]:
    yield {"mib": _mib(evidence.measurement.batch_bytes)}


def _missed(evidence: Evidence) -> tuple[bool, float | None]:
    """Whether it is shared memory that lacks, and what room for more workers would bring."""
    failed, short = evidence.stopped_by_memory(), shortage(evidence)
    gains = [gain for trial in failed if (gain := evidence.missed_gain(trial)) is not None]
    gain = _believable(evidence, max(gains, default=None))
    if gain is None and short is not None:
        gain = _believable(evidence, short.gain)
    kinds = [trial.failure.kind for trial in failed if trial.failure is not None]
    lacks_shm = "shared_memory" in kinds if failed else short is not None and short.resource == "shared memory"
    return lacks_shm, gain


def _shared_memory(evidence: Evidence) -> Iterator[Found]:
    lacks_shm, gain = _missed(evidence)
    if lacks_shm:
        yield {"mib": _mib(evidence.measurement.batch_bytes), "gain": gain}


def _host_memory(evidence: Evidence) -> Iterator[Found]:
    (lacks_shm, gain), each = _missed(evidence), evidence.worker_bytes()
    if not lacks_shm:
        what = "ran out of memory" if evidence.stopped_by_memory() else "would not fit into memory"
        size = "" if each is None else f"; each takes {each / 2**20:,.0f} MiB"
        room = "" if gain is None else f"{evidence.rate.value * (1 + gain):,.0f}/s"
        yield {
            "what": what,
            "size": size,
            "room": room and f"; with room for them the twin predicts {room}",
            "gain": gain,
        }


def _startup(evidence: Evidence) -> Iterator[Found]:
    share = evidence.startup_share()
    yield {"share": share_text(share), "gain": _believable(evidence, share / (1 - share))}


def _batched_fetch(evidence: Evidence) -> Iterator[Found]:
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
        yield {"share": share_text(1 - share), "us": f"{sample_s * 1e6:.0f}", "gain": gain}


def _threaded_workers(evidence: Evidence) -> Iterator[Found]:
    cores = evidence.cores_per_worker()
    if cores > THREADED_CORES:
        yield {"cores": f"{cores:.1f}", "usable": evidence.usable_cores}


def _heavy_tail(evidence: Evidence) -> Iterator[Found]:
    heavy = tail(evidence.measurement)
    if heavy <= HEAVY_TAIL or not evidence.best.in_order or evidence.best.num_workers < 2:
        return
    gain = evidence.predicted_gain(replace(evidence.best, in_order=False))
    if gain is None or gain > WORTH_S_TIME:
        yield {"heavy": f"{heavy:.0f}", "gain": _believable(evidence, gain)}


def _memory_growth(evidence: Evidence) -> Iterator[Found]:
    memory, held = evidence.measurement.memory, evidence.held
    slope = None if memory is None else memory.pss_slope_bytes_per_s
    if slope is not None and slope > LEAKING_BYTES_PER_S and evidence.best.num_workers:
        where, what = ("", "") if held is None else (f": {held.code()}", f"; {held}")
        yield {"slope": f"{slope / 2**20:.0f}", "where": where, "what": what}


def _step_on_cpu_s(evidence: Evidence) -> float:
    return 0.0 if evidence.on_accelerator or not evidence.cached_steps else evidence.measurement.step_s


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


RULES = (
    Rule(
        bindings=("step",),
        when=_step,
        action="Speed up the step itself (torch.compile, mixed precision, a larger batch) or leave it as it is.",
        reason="the loop waits for data only {waits} of the time",
    ),
    Rule(
        bindings=("cpu",),
        when=_cheaper_stages,
        action="Make {stage!r} cheaper ({where}){how}.",
        reason="it takes {share} of a worker's CPU, {ms} ms for each sample{rise}",
    ),
    Rule(
        bindings=("cpu",),
        when=_cheaper_transforms,
        action="Make the transforms cheaper: smaller source images, a faster decoder, work moved out of the epoch.",
        reason="each sample takes {ms} ms of CPU{rise}",
    ),
    Rule(
        bindings=("cpu",),
        when=_more_cores,
        action="Use more cores: with {cores} cores and {workers} workers the twin predicts {then}.",
        reason="on {usable} cores the best is {now}",
    ),
    Rule(
        bindings=("wait",),
        when=_more_workers,
        action="Allow more workers than cores: max_workers={workers}.",
        reason="a fetch waits {waits} of its time and leaves its core alone meanwhile; the twin predicts {then} with "
        "{workers} workers",
    ),
    Rule(
        bindings=("wait",),
        when=_larger_reads,
        action="Read larger pieces (tar shards, Parquet, memory-mapped arrays) or cache the data on a local disk.",
        reason="a fetch waits {waits} of its time{line}{crowded}",
    ),
    Rule(
        bindings=("transport",),
        when=_fewer_bytes,
        action="Send less per batch: uint8 instead of float32 (normalise in the step), crop in the worker.",
        reason="a batch carries {mib} MiB",
    ),
    Rule(
        bindings=("transport",),
        when=_fewer_batches,
        action="Hand over less often: a larger batch_size (allow=('batch_size',)), or no worker at all.",
        reason="handing over takes {ms} ms however little a batch carries",
    ),
    Rule(
        bindings=("transport",),
        when=_fewer_tensors,
        action="Collate into fewer, larger tensors.",
        reason="each of the {tensors} tensors of a batch travels in a segment of its own",
    ),
    Rule(
        bindings=("pinning",),
        when=_pinning,
        action="Send less per batch (uint8 instead of float32), or pin in the workers with a collate_fn of your own.",
        reason="one thread copies {mib} MiB a batch into page-locked memory",
    ),
    Rule(
        bindings=("memory",),
        when=_shared_memory,
        action="Give the container more shared memory (--shm-size=8g), or make batches smaller.",
        reason="a batch of {mib} MiB waits in /dev/shm for each place in a queue",
    ),
    Rule(
        bindings=("memory",),
        when=_host_memory,
        action="Make a worker smaller: numpy arrays, Arrow or memory-mapped files instead of lists of Python objects.",
        reason="more workers {what}{size}{room}",
    ),
    Rule(
        bindings=("startup",),
        when=_startup,
        action="Set persistent_workers=True (allow=('persistent_workers',) if the dataset knows its epoch).",
        reason="starting workers takes {share} of an epoch",
    ),
)
"""What a verdict calls for, in this order."""
ALWAYS = (
    Rule(
        bindings=(),
        when=_batched_fetch,
        action="Give the dataset a __getitems__(indices) that fetches a whole batch at once.",
        reason="{share} of a fetch goes into single samples of {us} us each; gathering them at once should take little "
        "longer than collating does",
    ),
    Rule(
        bindings=(),
        when=_threaded_workers,
        action="Keep libraries in workers to one thread: cv2.setNumThreads(0) in worker_init_fn, OMP_NUM_THREADS=1 in "
        "the environment.",
        reason="a worker keeps {cores} cores busy while it fetches, and there are {usable}",
    ),
    Rule(
        bindings=(),
        when=_heavy_tail,
        action="If the order of batches does not matter, allow=('in_order',) lets a slow batch be overtaken.",
        reason="the slowest batches take {heavy} times the median",
    ),
    Rule(
        bindings=(),
        when=_memory_growth,
        action="Keep samples in numpy arrays or tensors instead of lists of Python objects{where}.",
        reason="the processes' memory grows by {slope} MiB/s while they read: counting references copies the pages that "
        "workers share{what}",
    ),
)
"""What may be said whatever binds; only the last where the step binds, or nothing is known."""
