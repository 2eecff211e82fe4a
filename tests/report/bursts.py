"""Bursts of which every part is known."""

from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace

BATCH = 32


def traces(count, *, cpu_s=0.05, wait_s=0.0, receive_s=0.001, worker=0, jitter=0.0):
    made = []
    for i in range(count):
        service = (cpu_s + wait_s) * (1 + jitter * (-1) ** i)
        start = i * 1.0
        made.append(
            BatchTrace(
                worker=worker, fetch_start=start, fetch_end=start + service, collate_end=start + service, cpu_s=cpu_s,
                requested=start + 0.9, received=start + 0.9 + receive_s, step_end=start + 0.95, samples=BATCH,
            )
        )  # fmt: skip
    return tuple(made)


def burst(made=(), **changes):
    fields = {
        "samples_per_s": Interval(value=500.0, low=490.0, high=510.0, count=20), "samples": 640, "window_s": 1.28,
        "batch_size": BATCH, "first_batch_s": 0.1, "wait_share": 0.5, "service_s": 0.05, "service_cpu_s": 0.05,
        "receive_s": 0.001, "step_s": 0.01, "batch_bytes": 1 << 20, "traces": tuple(made),
    }  # fmt: skip
    return Measurement(**{**fields, **changes})


def step_on_a_cached_batch(step_s, *, cores_busy, usable_cores=4):
    rate = BATCH / step_s
    exact = Interval(value=rate, low=0.999 * rate, high=1.001 * rate, count=50)
    return burst(samples_per_s=exact, step_s=step_s, cpu_share=cores_busy / usable_cores, window_s=50 * step_s)
