"""Which resource binds, how far its ceiling is, and what to do next: sentences from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune_loader.config import LoaderConfig
from autotune_loader.result import Advice, Binding, Verdict
from autotune_loader.stats import Interval
from autotune_loader.trial import Measurement, Trial

# The step binds when the loop waits for data less than this share of its time, or the rate comes this near the ceiling.
STEP_BINDS_WAIT_SHARE = 0.05
STEP_BINDS_CEILING_SHARE = 0.95
# A worker that has the CPU for more than this share of its time computes; below, it waits for storage or the network.
COMPUTING_SHARE = 0.6
# Above this share of the usable cores in use, there is no core left to gain with.
CORES_FULL_SHARE = 0.85
# Receiving a batch costs more than this share of the loop: transport binds.
TRANSPORT_SHARE = 0.3
# Without workers and with fetches shorter than this, the data is practically in memory.
IN_MEMORY_FETCH_S = 0.002
# A slow tail is worth naming when the slowest of a hundred batches takes so many times the median.
HEAVY_TAIL = 4.0
# Start-up is worth naming above this share of an epoch.
STARTUP_SHARE = 0.1
# Host memory that grows faster than this is no noise (bytes per second).
LEAKING_BYTES_PER_S = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a verdict rests on."""

    best: LoaderConfig
    measurement: Measurement
    rate: Interval
    ceiling: Interval | None
    usable_cores: int
    on_accelerator: bool
    epoch_batches: int | None
    trials: Sequence[Trial]
    has_batched_fetch: bool


def judge(evidence: Evidence) -> Verdict:
    """The verdict on the best configuration."""
    binding = _binding(evidence)
    headroom = None if evidence.ceiling is None else max(0.0, evidence.ceiling.value / evidence.rate.value - 1)
    return Verdict(binding=binding, sentence=_sentence(binding, evidence, headroom), headroom=headroom)


def _binding(evidence: Evidence) -> Binding:
    measured, ceiling = evidence.measurement, evidence.ceiling
    if ceiling is not None and evidence.rate.value >= STEP_BINDS_CEILING_SHARE * ceiling.value:
        return "step"
    if ceiling is not None and measured.wait_share < STEP_BINDS_WAIT_SHARE:
        # The loop never waits, yet the step runs slower than alone: workers and step share the cores.
        return "step" if evidence.on_accelerator else "cpu"
    if _startup_share(evidence) > STARTUP_SHARE:
        return "startup"
    if evidence.best.num_workers == 0 and measured.service_s < IN_MEMORY_FETCH_S:
        return "in_memory"
    per_batch_s = measured.batch_size / evidence.rate.value
    if measured.receive_s > TRANSPORT_SHARE * per_batch_s and evidence.best.num_workers:
        return "transport"
    if _memory_stopped_growth(evidence):
        return "memory"
    computing = measured.service_s > 0 and measured.service_cpu_s / measured.service_s > COMPUTING_SHARE
    return "cpu" if computing or (measured.cpu_share or 0.0) > CORES_FULL_SHARE else "wait"


def _startup_share(evidence: Evidence) -> float:
    """Share of an epoch that worker start-up takes, where workers are not kept."""
    if not evidence.epoch_batches or evidence.best.persistent_workers or evidence.best.num_workers == 0:
        return 0.0
    epoch_s = evidence.epoch_batches * evidence.measurement.batch_size / evidence.rate.value
    startup_s = max(0.0, evidence.measurement.first_batch_s - evidence.measurement.service_s)
    return startup_s / (startup_s + epoch_s)


def _memory_stopped_growth(evidence: Evidence) -> bool:
    kinds = ("memory_guard", "oom_killed", "out_of_memory", "shared_memory")
    failed = [t for t in evidence.trials if t.failure is not None and t.failure.kind in kinds]
    return any(trial.config.num_workers > evidence.best.num_workers for trial in failed)


def _sentence(binding: Binding, evidence: Evidence, headroom: float | None) -> str:
    measured = evidence.measurement
    cores = f"{evidence.usable_cores} core" + ("" if evidence.usable_cores == 1 else "s")
    waits = f"the loop waits for data {measured.wait_share:.0%} of the time"
    more = "" if headroom is None else f"; a perfect loader would gain another {headroom:.0%}"
    sentences: dict[Binding, str] = {
        "step": f"The training step binds: {waits}, and {_of_ceiling(evidence)}; the loader is not the place to gain.",
        "cpu": f"The CPU binds: a batch takes {measured.service_cpu_s * 1e3:.0f} ms of CPU in a worker and "
        f"{measured.step_s * 1e3:.0f} ms of step, and there are {cores}{_in_use(measured)}; {waits}.",
        "wait": f"Waiting for storage, network or sleep binds: of {measured.service_s * 1e3:.0f} ms per batch a worker "
        f"computes {measured.service_cpu_s * 1e3:.0f} ms; {waits}{more}.",
        "transport": f"Handing batches over binds: receiving one takes {measured.receive_s * 1e3:.1f} ms for "
        f"{measured.batch_bytes / 2**20:.1f} MiB{more}.",
        "memory": f"Memory binds: more workers ran out of it; {waits}{more}.",
        "startup": f"Worker start-up binds: it takes {_startup_share(evidence):.0%} of an epoch.",
        "in_memory": f"The data is in memory: fetching a batch takes {measured.service_s * 1e3:.2f} ms, less than "
        "handing it over from a worker would cost, so no worker is needed.",
        "unknown": "Nothing was measured, so nothing can be said.",
    }
    return sentences[binding]


def _in_use(measured: Measurement) -> str:
    return "" if measured.cpu_share is None else f", {min(1.0, measured.cpu_share):.0%} in use"


def _of_ceiling(evidence: Evidence) -> str:
    if evidence.ceiling is None:
        return "there is no ceiling to compare with"
    return f"the rate is {min(1.0, evidence.rate.value / evidence.ceiling.value):.0%} of what the step alone could do"


def advise(evidence: Evidence, verdict: Verdict) -> tuple[Advice, ...]:
    """Concrete next steps, the most promising first."""
    measured = evidence.measurement
    found: list[Advice] = []
    if verdict.binding == "step":
        found.append(
            Advice(
                action="Speed up the step itself (torch.compile, mixed precision, a larger batch) or leave it as it is.",
                reason=f"the loop waits for data only {measured.wait_share:.0%} of the time",
            )
        )
    if verdict.binding == "cpu":
        found.append(
            Advice(
                action="Make the transforms cheaper (smaller source images, a faster decoder) or use more cores.",
                reason=f"each sample takes {measured.service_cpu_s / measured.batch_size * 1e3:.1f} ms of CPU",
                expected_gain=verdict.headroom,
            )
        )
    if verdict.binding == "wait":
        found.append(
            Advice(
                action="Read larger pieces, cache on a local disk, or allow more workers than cores (max_workers).",
                reason=f"a worker waits {1 - measured.service_cpu_s / max(measured.service_s, 1e-9):.0%} of its time",
                expected_gain=verdict.headroom,
            )
        )
    if verdict.binding == "transport":
        found.append(
            Advice(
                action="Send less per batch (uint8 instead of float32, normalise in the step).",
                reason=f"a batch carries {measured.batch_bytes / 2**20:.1f} MiB",
                expected_gain=verdict.headroom,
            )
        )
    if verdict.binding == "startup":
        found.append(
            Advice(
                action="Set persistent_workers=True (allow=('persistent_workers',) if the dataset knows its epoch).",
                reason=f"starting workers takes {_startup_share(evidence):.0%} of an epoch",
            )
        )
    if _tail(measured) > HEAVY_TAIL and evidence.best.in_order and verdict.binding in ("cpu", "wait"):
        found.append(
            Advice(
                action="If the order of batches does not matter, allow=('in_order',) lets a slow batch be overtaken.",
                reason=f"the slowest batches take {_tail(measured):.0f} times the median",
            )
        )
    slope = measured.memory.pss_slope_bytes_per_s if measured.memory else None
    if slope is not None and slope > LEAKING_BYTES_PER_S:
        found.append(
            Advice(
                action="Keep samples in numpy arrays or tensors instead of lists of Python objects.",
                reason=f"the workers' memory grows by {slope / 2**20:.0f} MiB/s while they read",
            )
        )
    return tuple(found)


def _tail(measured: Measurement) -> float:
    """Slowest of a hundred batches over the median one."""
    services = sorted(trace.service_s for trace in measured.traces)
    if len(services) < 20 or services[len(services) // 2] <= 0:
        return 1.0
    return services[min(len(services) - 1, int(len(services) * 0.99))] / services[len(services) // 2]
