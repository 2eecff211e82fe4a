"""Each verdict from a measurement that shows it, with the advice that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.advice import Evidence, advise, judge
from autotune_loader.config import LoaderConfig
from autotune_loader.stats import Interval
from autotune_loader.trial import MAIN_PROCESS, BatchTrace, Failure, Measurement, Memory, Trial

BEST = LoaderConfig(num_workers=4)


def exactly(value):
    return Interval(value=value, low=value, high=value, count=20)


def measured(**changes):
    """A CPU-bound loader: 100 ms of CPU per batch in a worker, and a loop that waits half of its time."""
    values = {
        "samples_per_s": exactly(1000.0),
        "samples": 1000,
        "window_s": 1.0,
        "batch_size": 32.0,
        "first_batch_s": 0.2,
        "wait_share": 0.5,
        "service_s": 0.11,
        "service_cpu_s": 0.10,
        "receive_s": 0.001,
        "step_s": 0.015,
        "batch_bytes": 4 << 20,
        **changes,
    }
    return Measurement(**values)


def evidence(measurement=None, **changes):
    measurement = measurement or measured()
    values = {
        "best": BEST,
        "measurement": measurement,
        "rate": measurement.samples_per_s,
        "ceiling": exactly(2000.0),
        "usable_cores": 4,
        "on_accelerator": False,
        "epoch_batches": 10_000,
        "trials": (),
        "has_batched_fetch": False,
        **changes,
    }
    return Evidence(**values)


def killed(workers):
    failure = Failure(kind="oom_killed", phase="batches", message="killed")
    return Trial(number=0, config=LoaderConfig(num_workers=workers), role="search", failure=failure)


VERDICTS = [
    ("cpu", evidence(), "100 ms of CPU"),
    ("step", evidence(ceiling=exactly(1020.0)), "98% of what the step alone could do"),
    ("step", evidence(measured(wait_share=0.01), on_accelerator=True), "waits for data 1% of the time"),
    ("cpu", evidence(measured(wait_share=0.01, step_s=0.03)), "30 ms of step, and there are 4 cores"),
    ("cpu", evidence(measured(service_cpu_s=0.05, cpu_share=0.97)), "4 cores, 97% in use"),
    ("wait", evidence(measured(service_cpu_s=0.01)), "of 110 ms per batch a worker computes 10 ms"),
    ("transport", evidence(measured(receive_s=0.02)), "receiving one takes 20.0 ms for 4.0 MiB"),
    ("memory", evidence(trials=(killed(6),)), "more workers ran out of it"),
    ("startup", evidence(measured(first_batch_s=5.0), epoch_batches=100), "of an epoch"),
    ("in_memory", evidence(measured(service_s=0.001), best=LoaderConfig()), "no worker is needed"),
]


@pytest.mark.parametrize(("binding", "found", "words"), VERDICTS, ids=[verdict[0] for verdict in VERDICTS])
def test_a_verdict_names_what_binds_and_its_evidence(binding, found, words):
    verdict = judge(found)
    assert verdict.binding == binding
    assert words in verdict.sentence


@pytest.mark.parametrize(("binding", "found", "words"), VERDICTS, ids=[verdict[0] for verdict in VERDICTS])
def test_advice_is_sentences_with_reasons(binding, found, words):
    for advice in advise(found, judge(found)):
        assert advice.action.endswith((".", ")."))
        assert advice.reason


def test_headroom_is_the_ceiling_over_the_rate():
    verdict = judge(evidence(measured(service_cpu_s=0.01)))
    assert verdict.headroom == pytest.approx(1.0)
    assert "another 100%" in verdict.sentence


def test_a_rate_above_the_measured_ceiling_has_no_headroom_and_is_called_all_of_it():
    verdict = judge(evidence(ceiling=exactly(950.0)))
    assert verdict.headroom == 0.0
    assert "100% of what the step alone could do" in verdict.sentence


def test_without_a_ceiling_no_headroom_is_claimed():
    verdict = judge(evidence(ceiling=None))
    assert verdict.headroom is None
    assert "perfect loader" not in verdict.sentence


def test_fewer_workers_failing_is_no_lack_of_memory():
    assert judge(evidence(trials=(killed(2),))).binding == "cpu"


def test_start_up_does_not_bind_where_workers_are_kept():
    kept = evidence(
        measured(first_batch_s=5.0), epoch_batches=100, best=LoaderConfig(num_workers=4, persistent_workers=True)
    )
    assert judge(kept).binding == "cpu"


def test_an_endless_stream_has_no_epoch_to_start_up_for():
    assert judge(evidence(measured(first_batch_s=500.0), epoch_batches=None)).binding == "cpu"


@pytest.mark.parametrize(
    ("binding", "action"),
    [
        ("step", "Speed up the step"),
        ("cpu", "transforms cheaper"),
        ("wait", "Read larger pieces"),
        ("transport", "uint8"),
        ("startup", "persistent_workers=True"),
    ],
)
def test_each_verdict_has_its_advice(binding, action):
    found = next(found for name, found, _ in VERDICTS if name == binding)
    assert action in advise(found, judge(found))[0].action


def traces(services):
    return tuple(
        BatchTrace(
            worker=MAIN_PROCESS,
            fetch_start=0.0,
            fetch_end=service,
            collate_end=service,
            cpu_s=service,
            requested=0.0,
            received=service,
            step_end=service,
            samples=32,
        )
        for service in services
    )


def test_a_heavy_tail_suggests_to_let_batches_be_overtaken():
    found = evidence(measured(traces=traces([0.1] * 48 + [1.0] * 2)))
    assert any("in_order" in advice.action for advice in advise(found, judge(found)))


def test_an_even_loader_is_not_told_about_its_order():
    found = evidence(measured(traces=traces([0.1] * 50)))
    assert not any("in_order" in advice.action for advice in advise(found, judge(found)))


def test_growing_memory_is_named():
    found = evidence(measured(memory=Memory(rss_bytes=1 << 30, pss_slope_bytes_per_s=float(20 << 20))))
    (advice,) = [advice for advice in advise(found, judge(found)) if "numpy" in advice.action]
    assert "20 MiB/s" in advice.reason


def test_a_memory_that_was_not_measured_is_not_named():
    found = evidence(replace(measured(), memory=None))
    assert not any("numpy" in advice.action for advice in advise(found, judge(found)))
