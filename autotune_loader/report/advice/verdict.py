"""Which resource binds the best configuration, with its evidence in one sentence.

The first that holds is the verdict:

    start-up    an epoch is so short that starting workers is a good part of it
    step        the rate is the cached batch's rate, or the loop hardly ever waits
    memory      more workers would be faster, and ran out of memory, or would by what they were measured to take
    in memory   no worker is the best number of workers, and fetching costs next to nothing
    pinning     one thread copies into page-locked memory, and is always busy
    transport   taking a batch over costs a good part of the loop
    cpu         a fetch computes, or the cores are full
    wait        what is left: storage, network, sleep
"""

from __future__ import annotations

from collections.abc import Callable

from autotune_loader.report.advice.evidence import Evidence, receive_s
from autotune_loader.report.advice.memory import shortage
from autotune_loader.results.loader_file import Binding, Verdict

# A fetch that has the CPU for more than this share of its time computes; below, it waits for storage or the network.
COMPUTING_SHARE = 0.6
# Above this share of the usable cores in use, or of the rate that they allow, there is no core left to gain with.
CORES_FULL_SHARE = 0.85
# Receiving a batch costs more than this share of the loop: transport binds.
TRANSPORT_SHARE = 0.3
# Below this size the fixed cost of a hand-over counts, not the bytes.
LARGE_BATCH_BYTES = 1 << 20


def judge(evidence: Evidence) -> Verdict:
    """The verdict on the best configuration."""
    found = _binding(evidence)
    headroom = None if evidence.ceiling is None else max(0.0, evidence.ceiling.value / evidence.rate.value - 1)
    return Verdict(binding=found, sentence=_sentence(found, evidence, headroom), headroom=headroom)


def gain_words(gain: float) -> str:
    """A relative gain for a person: "12 %", and from a doubling on "3.2 times the rate"."""
    return f"{gain:.0%}" if gain < 1 else f"{1 + gain:,.{0 if gain >= 9.5 else 1}f} times the rate"


def _binding(evidence: Evidence) -> Binding:
    if evidence.startup_share() > 0.1:
        return "startup"
    if evidence.ceiling is not None and evidence.rate.value >= 0.95 * evidence.ceiling.value:
        return "step"
    if evidence.ceiling is not None and evidence.measurement.wait_share < 0.05:
        # The loop never waits, yet the step runs slower than alone: because workers share its cores, or by chance.
        # With half of the cores idle, workers take none from it.
        share = evidence.measurement.cpu_share
        return "cpu" if not evidence.on_accelerator and (share is None or share >= 0.5) else "step"
    if evidence.stopped_by_memory() or shortage(evidence) is not None:
        return "memory"
    if evidence.best.num_workers == 0:
        return _without_workers(evidence)
    now = evidence.predicted(evidence.best) if evidence.best.pin_memory else None
    if now is not None and now.binding == "pinning":
        return "pinning"
    if receive_s(evidence.measurement) > TRANSPORT_SHARE * evidence.period_s or _only_moves_bytes(evidence):
        return "transport"
    return _cpu_or_wait(evidence)


def _only_moves_bytes(evidence: Evidence) -> bool:
    """Whether workers compute next to nothing and still take CPU: writing large batches into shared memory does."""
    measured = evidence.measurement
    # What comes out faster than 1 GB for each CPU second is hardly computed, only moved.
    moves = measured.batch_bytes >= max(LARGE_BATCH_BYTES, 1e9 * measured.service_cpu_s)
    return moves and evidence.computing_share() > COMPUTING_SHARE


def _without_workers(evidence: Evidence) -> Binding:
    """Why the training process fetches best by itself."""
    measured, extra_s = evidence.measurement, evidence.hand_over_s()
    if measured.batch_bytes >= LARGE_BATCH_BYTES and extra_s > measured.service_s:
        return "transport"  # handing a batch over would be most of what a worker does for it
    if measured.service_s < max(0.002, 50e-6 * measured.batch_size):
        return "in_memory"  # a batch or its samples come so fast that nothing is read or computed
    return _cpu_or_wait(evidence)


def _cpu_or_wait(evidence: Evidence) -> Binding:
    limit = evidence.cores_limit()
    full = (evidence.measurement.cpu_share or 0.0) > CORES_FULL_SHARE
    full = full or (limit is not None and evidence.rate.value >= CORES_FULL_SHARE * limit.value)
    return "cpu" if full or evidence.computing_share() > COMPUTING_SHARE else "wait"


def _sentence(binding: Binding, evidence: Evidence, headroom: float | None) -> str:
    measured = evidence.measurement
    waits = f"the loop waits for data {measured.wait_share:.0%} of the time"
    more = _more(headroom)
    sentences: dict[Binding, Callable[[], str]] = {
        "step": lambda: (
            f"The training step binds: {waits}, and {_of_ceiling(evidence)}; the loader is not the place to gain."
        ),
        "cpu": lambda: (
            f"The CPU binds: a batch takes {_ms(measured.service_cpu_s)} of CPU to fetch and {_ms(measured.step_s)} of "
            f"step, and there {_cores(evidence)}; {waits}{more}."
        ),
        "wait": lambda: (
            f"Waiting for storage, network or sleep binds: of {_ms(measured.service_s)} per batch a worker computes "
            f"{_ms(measured.service_cpu_s)}; {waits}{more}."
        ),
        "transport": lambda: f"Handing batches over binds: {_hand_over_words(evidence)}{more}.",
        "pinning": lambda: (
            f"Pinning binds: one thread copies {_mib(measured.batch_bytes)} a batch into page-locked memory; {waits}{more}."
        ),
        "memory": lambda: f"Memory binds: {_memory_words(evidence)}; {waits}{more}.",
        "startup": lambda: f"Worker start-up binds: it takes {evidence.startup_share():.0%} of an epoch.",
        "in_memory": lambda: (
            f"The data is in memory: fetching a batch takes {_ms(measured.service_s)}, less than handing it over from a "
            "worker would cost, so no worker is needed."
        ),
        "unknown": lambda: "Nothing was measured, so nothing can be said.",
    }
    return sentences[binding]()


def _more(headroom: float | None) -> str:
    """What a loader that costs nothing would gain. Ten times and more only says that the step is next to nothing."""
    if headroom is None:
        return ""
    if headroom >= 9:
        return "; the step takes next to nothing, so the loader alone sets the rate"
    if headroom >= 1:
        return f"; a loader that took neither time nor cores would reach {gain_words(headroom)}"
    return f"; a loader that took neither time nor cores would gain another {gain_words(headroom)}"


def _cores(evidence: Evidence) -> str:
    count, share = evidence.usable_cores, evidence.measurement.cpu_share
    used = "" if share is None else f", {min(1.0, share):.0%} in use"
    return ("is 1 core" if count == 1 else f"are {count} cores") + used


def _of_ceiling(evidence: Evidence) -> str:
    if evidence.ceiling is None:
        return "there is no ceiling to compare with"
    return f"the rate is {min(1.0, evidence.rate.value / evidence.ceiling.value):.0%} of what the step alone could do"


def _hand_over_words(evidence: Evidence) -> str:
    measured = evidence.measurement
    if evidence.best.num_workers == 0:
        return (
            f"fetching {_mib(measured.batch_bytes)} takes {_ms(measured.service_s)} here, and handing it over from a "
            f"worker would cost another {_ms(evidence.hand_over_s())}"
        )
    if _only_moves_bytes(evidence):
        return (
            f"a worker takes {_ms(measured.service_cpu_s)} of CPU for {_mib(measured.batch_bytes)}, which is what writing "
            "them takes"
        )
    return f"receiving one takes {_ms(receive_s(measured))} for {_mib(measured.batch_bytes)}"


def _memory_words(evidence: Evidence) -> str:
    failed = min(evidence.stopped_by_memory(), key=lambda trial: trial.config.num_workers, default=None)
    if failed is None:
        short = shortage(evidence)
        assert short is not None
        return (
            f"{short.config} would take {_mib(round(short.need_bytes))} of {short.resource}, and there are "
            f"{_mib(short.limit_bytes)}"
        )
    assert failed.failure is not None
    return f"{failed.config} ran out of it ({failed.failure.kind.replace('_', ' ')})"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 10 else 1 if milliseconds >= 1 else 2}f} ms"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 100 << 10 else f"{size / 2**10:.1f} KiB"
