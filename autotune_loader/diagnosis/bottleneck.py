"""What limits the rate of a loader, with the figures that show it.

The first row of `_row` that holds is the answer (docs/bottleneck.md has them in order). Each rests on a clock or a count; where
two of them disagree, or nothing shows it, the answer is UNCLEAR, with both figures.
"""

from __future__ import annotations

from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.tables import Bottleneck, Fact, all_of
from autotune_loader.diagnosis.units import counted
from autotune_loader.results.record import Finding
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT

FEWEST_BATCHES = 3
"""Of fewer nothing can be said: the first waits for workers, and the last has no step after it."""
LITTLE_GAIN = 0.02
"""What cannot bring more than this is not worth a sentence; also the tolerance of `tune()`."""
LONG_START = 0.1
"""Share of the time in the starts of epochs from which on they are what the loop waits for."""
NEAR_CEILING = 0.95
"""As fast as the step alone, as far as noise lets one tell."""
COMPUTING_SHARE = 0.6
"""A fetch that has the CPU for more than this share of its time computes; below, it waits for storage or the network."""
CORES_FULL_SHARE = 0.85
"""Above this share of the cores in use there is no core left to gain with."""
HAND_OVER_SHARE = 0.3
"""Receiving a batch costs more than this share of the loop: handing over is the bottleneck."""
HARDLY_WAITS = 0.05
"""The loop has its batches in time, as far as clocks tell."""
MUCH_SLOWER = 0.8
"""A step that has its batches in time and is slower than this share of what it does alone is held up by something."""
RARELY_FETCHES = 0.2
"""Workers that fetch for less than this share of their time are not what a loop waits for."""
IDLE_SHARE = 0.15
"""More of the cores idle than this: a fetch that does not compute waits for something else than a core."""
LITTLE_FOREIGN = 0.05
"""Less than this of the cores is what any machine does beside."""
LARGE_STAGE = 0.2
"""A stage that takes more than this share of a worker is worth naming."""
LARGE_BATCH_BYTES = 1 << 20
"""Below this size the fixed cost of a hand-over counts, not the bytes."""
CHEAP_BATCH_S, CHEAP_SAMPLE_S = 0.002, 50e-6
"""A batch that is fetched faster than this costs less than handing it over from a worker."""


def bottleneck_of(evidence: Evidence) -> Finding:
    """The bottleneck with its evidence, and as `gain` what a loader without any cost would bring at most."""
    row = _row(evidence)
    gain = evidence.headroom
    if row in (Bottleneck.TOO_SHORT, Bottleneck.NO_STEP):
        return row(batches=evidence.batches or 0)
    fetch = evidence.fetch_s
    found = row(share=evidence.loader_share if row is Bottleneck.LITTLE else evidence.start_share, fetch=fetch)
    return all_of(found, *_facts(row, evidence), gain=gain)


def _row(evidence: Evidence) -> Bottleneck:
    wait, config = evidence.wait_share, evidence.config
    if evidence.batches is not None and evidence.batches < FEWEST_BATCHES:
        return Bottleneck.TOO_SHORT
    if wait is None:
        return Bottleneck.NO_STEP
    if evidence.loader_share < LITTLE_GAIN and wait >= HARDLY_WAITS:
        return Bottleneck.LITTLE
    if evidence.start_share > LONG_START:
        return Bottleneck.START_UP
    if evidence.ceiling is not None and evidence.samples_per_s >= NEAR_CEILING * evidence.ceiling.value:
        return Bottleneck.STEP if wait <= 2 * HARDLY_WAITS else Bottleneck.UNCLEAR
    if wait < HARDLY_WAITS:
        return _never_waiting(evidence)
    if evidence.ran_out is not None:
        return Bottleneck.MEMORY
    if evidence.fetch_s is None:
        return Bottleneck.UNCLEAR
    if config.num_workers == 0:
        is_cheap = evidence.fetch_s < max(CHEAP_BATCH_S, CHEAP_SAMPLE_S * evidence.batch_size)
        return Bottleneck.IN_MEMORY if is_cheap else _cpu_or_storage(evidence)
    if (evidence.receive_s or 0.0) > HAND_OVER_SHARE * evidence.period_s:
        return Bottleneck.HAND_OVER
    return _cpu_or_storage(evidence)


def _never_waiting(evidence: Evidence) -> Bottleneck:
    """What slows a step that has its batches in time: nothing, or workers that share its cores."""
    own, foreign = evidence.cpu_share, evidence.foreign_cpu_share or 0.0
    if evidence.ceiling is None:
        return Bottleneck.STEP
    if evidence.on_accelerator or (own is not None and own < 0.5):
        # With half of the cores idle, workers take none from it.
        alone_s = evidence.batch_size / evidence.ceiling.value
        return Bottleneck.STEP if alone_s >= MUCH_SLOWER * evidence.period_s else Bottleneck.UNCLEAR
    return Bottleneck.UNCLEAR if foreign > FOREIGN_CPU_LIMIT else Bottleneck.CPU


def _cpu_or_storage(evidence: Evidence) -> Bottleneck:
    waits, fetch = evidence.wait_share or 0.0, evidence.undisturbed
    is_full = (evidence.cpu_share or 0.0) > CORES_FULL_SHARE
    if not is_full and waits > 2 * HARDLY_WAITS and evidence.fetching_share < RARELY_FETCHES:
        return Bottleneck.UNCLEAR
    if is_full or fetch.computing_share > COMPUTING_SHARE:
        return Bottleneck.CPU
    if waits <= 2 * HARDLY_WAITS:
        # Nine tenths of the loop are its step, or what slows that: fetches may sleep, and are in time.
        found, gain = _never_waiting(evidence), evidence.headroom or 0.0
        return Bottleneck.UNCLEAR if found is Bottleneck.STEP and gain > 2 * HARDLY_WAITS else found
    # A fetch waits for something else than a core where cores were idle, or where it waits longer than others took these.
    own = 1 - (fetch.foreign_cpu_share or 0.0)
    has_core = fetch.idle_share is None or fetch.idle_share > IDLE_SHARE
    return Bottleneck.STORAGE if has_core or fetch.computing_share <= COMPUTING_SHARE * own else Bottleneck.UNCLEAR


def _facts(row: Bottleneck, evidence: Evidence) -> list[Finding | None]:
    """What shows it, a sentence each."""
    waits, most = Fact.WAITS(wait=evidence.wait_share), _at_most(evidence)
    match row:
        case Bottleneck.STEP:
            return [waits, _of_ceiling(evidence)]
        case Bottleneck.CPU:
            cpu = Fact.CPU_OF_BATCH(cpu=evidence.fetch_cpu_s, step=evidence.step_s)
            return [cpu, _cores(evidence), _stage(evidence, is_waiting=False), waits, most]
        case Bottleneck.STORAGE:
            return [_waited(evidence), _idle(evidence), _stage(evidence, is_waiting=True), waits, most]
        case Bottleneck.HAND_OVER:
            return [Fact.RECEIVING(size=evidence.batch_bytes, receive=evidence.receive_s), waits, most]
        case Bottleneck.MEMORY:
            trial = evidence.ran_out
            assert trial is not None
            assert trial.failure is not None
            return [Fact.RAN_OUT(config=trial.config, kind=trial.failure.kind.replace("_", " ")), waits, most]
        case Bottleneck.UNCLEAR:
            return [waits, *_disagreement(evidence)]
        case Bottleneck.START_UP | Bottleneck.LITTLE:
            return [waits]
        case _:
            return []


def _disagreement(evidence: Evidence) -> list[Finding | None]:
    """Two figures of which one must be wrong, or of which each would explain the other; and who else was busy."""
    foreign, fetch = evidence.foreign_cpu_share or 0.0, evidence.undisturbed
    busy = Fact.BUSY(share=foreign) if foreign > LITTLE_FOREIGN else None
    waits, ceiling = evidence.wait_share or 0.0, evidence.ceiling
    is_near = ceiling is not None and evidence.samples_per_s >= NEAR_CEILING * ceiling.value
    if waits <= 2 * HARDLY_WAITS or is_near:
        return [_of_ceiling(evidence) or Fact.NO_CEILING(), busy]
    if evidence.fetch_s is None:
        return [_at_most(evidence), busy]
    if evidence.fetching_share < RARELY_FETCHES:
        return [Fact.FETCHES_LITTLE(share=evidence.fetching_share), busy]
    return [_waited(evidence), Fact.NO_CORE_IDLE() if fetch.idle_share is not None else None, busy]


def _of_ceiling(evidence: Evidence) -> Finding | None:
    if evidence.ceiling is None:
        return None
    return Fact.OF_CEILING(rate=evidence.samples_per_s, ceiling=evidence.ceiling.value)


def _at_most(evidence: Evidence) -> Finding | None:
    """What a loader without any cost would bring. Ten times and more only says that the step is next to nothing."""
    gain = evidence.headroom
    if gain is None or gain < LITTLE_GAIN:
        return None
    return Fact.LOADER_ALONE() if gain >= 9 else Fact.AT_MOST(gain=gain)


def _waited(evidence: Evidence) -> Finding:
    return Fact.WAITED(fetch=evidence.undisturbed.fetch_s, cpu=evidence.undisturbed.fetch_cpu_s)


def _idle(evidence: Evidence) -> Finding | None:
    idle = evidence.undisturbed.idle_share
    return Fact.IDLE(share=idle) if idle is not None and idle > IDLE_SHARE else None


def _cores(evidence: Evidence) -> Finding | None:
    if evidence.cpu_share is None:
        return None
    return Fact.CORES(cores=cores_words(evidence.cores), share=min(1.0, evidence.cpu_share))


def cores_words(cores: float) -> str:
    """Such as "is 1 core", "are 4 cores"."""
    return f"{'is' if cores == 1 else 'are'} {counted(round(cores), 'core')}"


def _stage(evidence: Evidence, *, is_waiting: bool) -> Finding | None:
    """The stage that takes the largest part of what a worker does, and its line."""
    seconds = {each: each.waited_s if is_waiting else each.cpu_s for each in evidence.stages}
    stage, whole_s = max(seconds, key=lambda each: seconds[each], default=None), sum(seconds.values())
    if stage is None or seconds[stage] < LARGE_STAGE * whole_s or not whole_s:
        return None
    row = Fact.STAGE_WAITS if is_waiting else Fact.STAGE_COMPUTES
    return row(stage=stage.stage, share=seconds[stage] / whole_s, where=stage.where)
