"""Which resource binds the best configuration, with its evidence in one sentence.

The first that holds is the verdict. Each rests on a clock or a count that shows it; where two of them disagree, or nothing
shows it, the verdict is `unknown`, with both figures.

    start-up    an epoch is so short that starting workers is a good part of it
    step        the rate is the cached batch's rate, or the loop hardly ever waits and steps as fast as alone
    memory      more workers would be faster, and ran out of memory, or would by what they were measured to take
    in memory   no worker is the best number of workers, and fetching costs next to nothing
    pinning     one thread copies into page-locked memory, and is always busy
    transport   taking a batch over costs a good part of the loop
    cpu         a fetch has the CPU for most of its time, or our processes keep the cores full
    wait        a fetch does without the CPU for most of its time while cores are idle: storage, network, sleep; a loop that
                waits for a tenth of its time or less does not show it, nor one that is no faster with more workers and ready
                batches
"""

from __future__ import annotations

import math

from autotune_loader.decision.race import NEAR_CEILING
from autotune_loader.report.advice.evidence import Evidence, receive_s
from autotune_loader.report.units import bytes_text, gain_words, rate_text, seconds_text, share_text
from autotune_loader.results.loader_file import Binding, Verdict
from autotune_loader.values.statistics import FOREIGN_CPU_LIMIT

COMPUTING_SHARE = 0.6
"""A fetch that has the CPU for more than this share of its time computes; below, it waits for storage or the network."""
CORES_FULL_SHARE = 0.85
"""Above this share of the usable cores in use there is no core left to gain with."""
TRANSPORT_SHARE = 0.3
"""Receiving a batch costs more than this share of the loop: transport binds."""
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
"""A stage that takes more than this share of a worker is worth naming in one sentence."""
LARGE_BATCH_BYTES = 1 << 20
"""Below this size the fixed cost of a hand-over counts, not the bytes."""


def judge(evidence: Evidence) -> Verdict:
    """The verdict on the best configuration."""
    found, gain = _binding(evidence), evidence.ceiling_gain
    headroom = None if gain is None else max(0.0, gain)
    return Verdict(binding=found, sentence=_sentence(found, evidence, headroom), headroom=headroom)


def _binding(evidence: Evidence) -> Binding:
    measured, best = evidence.measurement, evidence.best
    if evidence.startup_share > 0.1:
        return "startup"
    if evidence.ceiling is not None and evidence.rate.value >= NEAR_CEILING * evidence.ceiling.value:
        return "step" if measured.wait_share <= 2 * HARDLY_WAITS else "unknown"
    if measured.wait_share < HARDLY_WAITS:
        return _never_waiting(evidence)
    if evidence.shortage() is not None:
        return "memory"
    if best.num_workers == 0:  # a batch or its samples may come so fast that nothing is read or computed
        return "in_memory" if measured.service_s < max(0.002, 50e-6 * measured.batch_size) else _cpu_or_wait(evidence)
    if best.pin_memory and evidence.twin is not None and evidence.twin.predict_all([best])[0].binding == "pinning":
        return "pinning"
    if receive_s(measured) > TRANSPORT_SHARE * evidence.period_s or _only_moves_bytes(evidence):
        return "transport"
    return _cpu_or_wait(evidence)


def _never_waiting(evidence: Evidence) -> Binding:
    """What slows a step that has its batches in time: nothing, or workers that share its cores."""
    own, foreign = evidence.measurement.cpu_share, evidence.measurement.foreign_cpu_share or 0.0
    if evidence.ceiling is None:
        return "step" if evidence.ceiling_doubt is None else "unknown"
    if evidence.on_accelerator or (own is not None and own < 0.5):
        # With half of the cores idle, workers take none from it.
        alone_s = evidence.measurement.batch_size / evidence.ceiling.value + (evidence.measurement.gpu.copy_s or 0.0)
        return "step" if alone_s >= MUCH_SLOWER * evidence.period_s else "unknown"
    return "unknown" if foreign > FOREIGN_CPU_LIMIT else "cpu"


def _only_moves_bytes(evidence: Evidence) -> bool:
    """Whether workers compute next to nothing and still take CPU: writing large batches into shared memory does."""
    measured = evidence.measurement
    # What comes out faster than 1 GB for each CPU second is hardly computed, only moved.
    moves = measured.batch_bytes >= max(LARGE_BATCH_BYTES, 1e9 * measured.service_cpu_s)
    return moves and evidence.computing_share > COMPUTING_SHARE


def _cpu_or_wait(evidence: Evidence) -> Binding:
    waits, gain = evidence.measurement.wait_share, evidence.ceiling_gain
    full = (evidence.measurement.cpu_share or 0.0) > CORES_FULL_SHARE
    if not full and waits > 2 * HARDLY_WAITS and evidence.fetching_share < RARELY_FETCHES:
        return "unknown"
    if full or evidence.computing_share > COMPUTING_SHARE:
        return "cpu"
    if waits <= 2 * HARDLY_WAITS:
        # Nine tenths of the loop are its step, or what slows that: fetches may sleep, and are in time.
        found = _never_waiting(evidence)
        return "unknown" if found == "step" and gain is not None and gain > 2 * HARDLY_WAITS else found
    if evidence.fed_burst is not None:
        return "unknown"
    # A fetch waits for something else than a core where cores were idle, or where it waits longer than others took these.
    own = 1 - (evidence.telling_burst.foreign_cpu_share or 0.0)
    has_core = evidence.idle_share is None or evidence.idle_share > IDLE_SHARE
    return "wait" if has_core or evidence.computing_share <= COMPUTING_SHARE * own else "unknown"


def _sentence(binding: Binding, evidence: Evidence, headroom: float | None) -> str:
    measured, waits = evidence.measurement, _waits_words(evidence)
    fetched, cpu, step = (seconds_text(s) for s in (measured.service_s, measured.service_cpu_s, measured.step_s))
    more = _more(headroom) if evidence.ceiling_doubt is None else "; what the step alone could do is unknown"
    match binding:
        case "step":
            return f"The training step binds: {waits}{_step_words(evidence)}."
        case "cpu":
            needs = f"a batch takes {cpu} of CPU to fetch and {step} of step, and there {_cores(evidence)}"
            return f"The CPU binds: {needs}{_stage_words(evidence)}; {waits}{more}."
        case "wait":
            reads = f"{_fetch_words(evidence)}{_idle_words(evidence)}{_stage_words(evidence)}"
            return f"Waiting for storage, network or sleep binds: {reads}; {waits}{more}."
        case "transport":
            return f"Handing batches over binds: {_hand_over_words(evidence)}{more}."
        case "pinning":
            size = bytes_text(measured.batch_bytes)
            return f"Pinning binds: one thread copies {size} a batch into page-locked memory; {waits}{more}."
        case "memory":
            short = evidence.shortage()
            return f"Memory binds: {'workers lack it' if short is None else short.why}; {waits}{more}."
        case "startup":
            return f"Worker start-up binds: it takes {share_text(evidence.startup_share)} of an epoch."
        case "in_memory":
            less = "less than handing it over from a worker would cost, so no worker is needed"
            return f"The data is in memory: fetching a batch takes {fetched}, {less}."
        case "unknown":
            foreign = measured.foreign_cpu_share or 0.0
            busy = (
                f", and other processes kept {share_text(foreign)} of the cores busy"
                if foreign > LITTLE_FOREIGN
                else ""
            )
            return f"What binds could not be told: {_disagreement(evidence)}{busy}."


def _stage_words(evidence: Evidence) -> str:
    """The stage that takes the largest part of what binds, and its line."""
    waits = evidence.computing_share <= COMPUTING_SHARE
    seconds = {each: each.waited_s if waits else each.cpu_s for each in evidence.stage_times}
    stage, whole_s = max(seconds, key=lambda each: seconds[each], default=None), sum(seconds.values())
    if stage is None or seconds[stage] < LARGE_STAGE * whole_s:
        return ""
    what = "waiting" if waits else "CPU"
    return f"; {stage.stage} takes {share_text(seconds[stage] / whole_s)} of a worker's {what} ({stage.where})"


def _disagreement(evidence: Evidence) -> str:
    """Two figures of which one must be wrong, or of which each would explain the other."""
    waits, fed, limit = _waits_words(evidence), evidence.fed_burst, evidence.ceiling
    if evidence.measurement.wait_share <= 2 * HARDLY_WAITS or evidence.rate.value >= NEAR_CEILING * (
        math.inf if limit is None else limit.value
    ):
        return f"{waits}, yet {evidence.ceiling_doubt or _of_ceiling(evidence)}"
    if evidence.fetching_share < RARELY_FETCHES:
        return f"{waits}, yet a worker fetches for {share_text(evidence.fetching_share)} of its time only"
    if fed is not None:
        step, receiving = seconds_text(fed.step_s), seconds_text(receive_s(fed))
        return (
            f"{waits}, yet with more workers, whose batches lay ready, the rate is no higher "
            f"({rate_text(fed.samples_per_s.value)}): a batch takes {step} of step and {receiving} to receive"
        )
    return (
        f"{_fetch_words(evidence)}, yet no core was idle for it meanwhile ({share_text(evidence.idle_share)}), so that it "
        f"may have waited for a core as well as for data; {waits}"
    )


def _waits_words(evidence: Evidence) -> str:
    return f"the loop waits for data {share_text(evidence.measurement.wait_share)} of the time"


def _fetch_words(evidence: Evidence) -> str:
    burst = evidence.telling_burst
    return f"of {seconds_text(burst.service_s)} per batch a fetch computes {seconds_text(burst.service_cpu_s)}"


def _idle_words(evidence: Evidence) -> str:
    is_idle = evidence.idle_share is not None and evidence.idle_share > IDLE_SHARE
    return f" while {share_text(evidence.idle_share)} of the cores are idle" if is_idle else ""


def _more(headroom: float | None) -> str:
    """What a loader that costs nothing would gain. Ten times and more only says that the step is next to nothing."""
    if headroom is None:
        return ""
    if headroom >= 9:
        return "; the step takes next to nothing, so the loader alone sets the rate"
    verb = "reach" if headroom >= 1 else "gain another"
    return f"; a loader that took neither time nor cores would {verb} {gain_words(headroom)}"


def _cores(evidence: Evidence) -> str:
    count, share = evidence.usable_cores, evidence.measurement.cpu_share
    used = "" if share is None else f", {share_text(min(1.0, share))} in use"
    return ("is 1 core" if count == 1 else f"are {count} cores") + used


def _step_words(evidence: Evidence) -> str:
    waits = evidence.measurement.wait_share
    if evidence.ceiling is None and evidence.ceiling_doubt is None and waits >= HARDLY_WAITS:
        return f"; another loader would gain {share_text(waits / (1 - waits))} at most"
    alone = "" if evidence.ceiling is None else f", and {_of_ceiling(evidence)}"
    return f"{alone}; the loader is not the place to gain"


def _of_ceiling(evidence: Evidence) -> str:
    if evidence.ceiling is None:
        return "what the step alone could do is unknown"
    return (
        f"it reaches {rate_text(evidence.rate.value)} where the step alone reaches {rate_text(evidence.ceiling.value)}"
    )


def _hand_over_words(evidence: Evidence) -> str:
    measured = evidence.measurement
    size = bytes_text(measured.batch_bytes)
    if _only_moves_bytes(evidence):
        cpu = seconds_text(measured.service_cpu_s)
        return f"a worker takes {cpu} of CPU for {size}, which is what writing them takes"
    return f"receiving one takes {seconds_text(receive_s(measured))} for {size}"
