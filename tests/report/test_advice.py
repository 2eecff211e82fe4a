"""Each verdict from a measurement that shows it, with the advice that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Limits, Space
from autotune_loader.pipeline.held_objects import HeldObjects
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.report.advice.memory import growth_warning
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, MemoryUse
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BEST = LoaderConfig(num_workers=4)


def observed(trials):
    return [(each.config, each.measurement) for each in trials if each.measurement is not None]


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
    (
        "step",
        evidence(measured(wait_share=0.02), ceiling=exactly(1020.0)),
        "reaches 1,000/s where the step alone",
    ),
    (
        "step",
        evidence(measured(wait_share=0.01), ceiling=None),
        "waits for data 1 % of the time; the loader is not the place to gain.",
    ),
    # Where the step was never timed alone, the loop's own clock says what there is to gain.
    (
        "step",
        evidence(measured(wait_share=0.09, service_cpu_s=0.01, cpu_share=0.3), ceiling=None),
        "waits for data 9 % of the time; another loader would gain 10 % at most.",
    ),
    (
        "unknown",
        evidence(
            measured(
                wait_share=0.12,
                service_s=0.004,
                service_cpu_s=0.003,
                batch_bytes=4000,
                cpu_share=0.27,
                foreign_cpu_share=0.7,
            )
        ),
        "12 % of the time, yet a worker fetches for 3 % of its time only, and other processes kept 70 % of the cores busy",
    ),
    (
        "step",
        evidence(measured(wait_share=0.01, cpu_share=0.2), ceiling=exactly(1100.0)),
        "waits for data 1 % of the time",
    ),
    ("cpu", evidence(measured(wait_share=0.01, step_s=0.03)), "30 ms of step, and there are 4 cores"),
    ("cpu", evidence(measured(service_cpu_s=0.05, cpu_share=0.97)), "4 cores, 97 % in use"),
    ("wait", evidence(measured(service_cpu_s=0.01)), "of 110 ms per batch a fetch computes 10 ms"),
    ("transport", evidence(measured(receive_s=0.02)), "receiving one takes 20 ms for 4 MiB"),
    ("memory", evidence(trials=(killed(6),)), "6 workers, prefetch 2 ran out of it (oom killed)"),
    ("startup", evidence(measured(first_batch_s=5.0), epoch_batches=100), "of an epoch"),
    ("in_memory", evidence(measured(service_s=0.001), best=LoaderConfig()), "no worker is needed"),
    (
        "wait",
        evidence(measured(service_cpu_s=0.01, cpu_share=0.45, foreign_cpu_share=0.5)),
        "computes 10 ms; that other processes kept 50 % of the cores busy does not explain the rest; ",
    ),
    # Fetches sleep, and are in time: a loop that hardly waits does not wait for storage.
    (
        "step",
        evidence(measured(wait_share=0.08, service_cpu_s=0.01, cpu_share=0.3), ceiling=exactly(1090.0)),
        "waits for data 8 % of the time, and it reaches 1,000/s where the step alone reaches 1,090/s",
    ),
    (
        "unknown",
        evidence(measured(wait_share=0.08, service_cpu_s=0.01, cpu_share=0.3), ceiling=exactly(1105.0)),
        "waits for data 8 % of the time, yet it reaches 1,000/s",
    ),
    # Two witnesses that disagree: both are named, and nothing is concluded.
    (
        "unknown",
        evidence(measured(wait_share=0.01, cpu_share=0.2)),
        "yet it reaches 1,000/s where the step alone reaches 2,000/s",
    ),
    (
        "unknown",
        evidence(measured(wait_share=0.01), on_accelerator=True),
        "yet it reaches 1,000/s where the step alone reaches 2,000/s",
    ),
    (
        "unknown",
        evidence(measured(wait_share=0.01, foreign_cpu_share=0.5)),
        "other processes kept 50 % of the cores busy",
    ),
    (
        "unknown",
        evidence(measured(wait_share=0.5), ceiling=exactly(1020.0)),
        "50 % of the time, yet it reaches 1,000/s",
    ),
    (
        "unknown",
        evidence(measured(service_cpu_s=0.04, cpu_share=0.45, foreign_cpu_share=0.5)),
        "of 110 ms per batch a fetch computes 40 ms, yet no core was idle for it meanwhile (5 %)",
    ),
    (
        "unknown",
        evidence(measured(wait_share=0.01), ceiling=None, ceiling_doubt="the step alone was measured at 454/s"),
        "yet the step alone was measured at 454/s",
    ),
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
    assert "would reach 2.0 times the rate" in verdict.sentence


def test_without_a_ceiling_no_headroom_is_claimed():
    verdict = judge(evidence(ceiling=None))
    assert verdict.headroom is None
    assert "neither time nor cores" not in verdict.sentence


def waiting_machine_with(limits, *, worker_bytes=0, batch_bytes=1 << 20):
    """Evidence from a machine whose fetches wait: more workers would be faster, if there were room for them."""
    machine = SimulatedMachine(
        cores=4, cpu_s=0.001, wait_s=0.1, step_s=0.001, worker_bytes=worker_bytes, batch_bytes=batch_bytes, noise_sd=0.0
    )
    probe, trials = SimulatedProbe(machine, FakeClock()), []
    for number, workers in enumerate((0, 1, 4)):
        config = LoaderConfig(num_workers=workers)
        burst = probe.burst(config, BurstPlan())
        trials.append(Trial(number=number, config=config, role="search", measurement=burst))
    twin = fit_twin(observed(trials), TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.001),)))
    space = Space(max_workers=16, limits=limits)
    last = trials[-1].measurement
    return evidence(last, trials=trials, twin=twin, space=space, ceiling=None, on_accelerator=True)


def test_workers_that_would_not_fit_into_memory_by_what_they_were_measured_to_take_are_a_lack_of_memory():
    # GIVEN four workers that were measured to take 500 MiB each, and 4 GiB of which nine tenths may be used
    found = waiting_machine_with(Limits(memory_bytes=4 << 30), worker_bytes=500 << 20)

    # WHEN judged THEN memory binds, though nothing failed, and the advice is to make workers smaller
    verdict = judge(found)
    assert verdict.binding == "memory"
    assert "workers, prefetch 2 would take" in verdict.sentence
    assert "of memory, and there are 4 GiB" in verdict.sentence
    advice = advise(found, verdict)[0]
    assert advice.action.startswith("Make a worker smaller")
    assert (
        "more workers would not fit into memory; each takes 502 MiB" in advice.reason
    )  # two batches in its queue included
    assert advice.expected_gain > 0.05


def test_queues_that_would_not_fit_into_shared_memory_are_a_lack_of_memory():
    found = waiting_machine_with(Limits(shm_bytes=64 << 20), batch_bytes=5 << 20)
    verdict = judge(found)
    assert verdict.binding == "memory"
    assert "of shared memory, and there are 64 MiB" in verdict.sentence
    assert "--shm-size" in advise(found, verdict)[0].action


def test_workers_that_fit_are_no_lack_of_memory():
    assert judge(waiting_machine_with(Limits(memory_bytes=64 << 30), worker_bytes=500 << 20)).binding == "wait"
    assert judge(waiting_machine_with(Limits())).binding == "wait"


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
    found = evidence(measured(memory=MemoryUse(rss_bytes=1 << 30, pss_slope_bytes_per_s=float(20 << 20))))
    (advice,) = [advice for advice in advise(found, judge(found)) if "numpy" in advice.action]
    assert "20 MiB/s" in advice.reason


GIB = 1 << 30


def growing(mib_per_s, *, limit=16 * GIB, epoch_batches=10_000):
    """2 GiB in the training process and 100 MiB in each of 4 workers, and an epoch of 320 s."""
    bursts = {workers: 2 * GIB + workers * (100 << 20) for workers in (1, 2, 4)}
    uses = {
        w: MemoryUse(rss_bytes=size, pss_bytes=size, pss_slope_bytes_per_s=mib_per_s * 2**20)
        for w, size in bursts.items()
    }
    trials = [
        Trial(
            number=workers,
            config=LoaderConfig(num_workers=workers, prefetch_factor=2),
            role="search",
            measurement=measured(memory=use, batch_bytes=0),
        )
        for workers, use in uses.items()
    ]
    return evidence(
        trials[-1].measurement,
        best=trials[-1].config,
        trials=trials,
        epoch_batches=epoch_batches,
        space=Space(max_workers=4, limits=Limits(memory_bytes=limit)),
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (growing(30.0), None),  # 11.8 GiB, which is little enough
        (
            growing(60.0),
            ("60 MiB a second", "5 min 20 s ends with 21.1 GiB", "16 GiB: 3 workers would fit", "pytorch#13246"),
        ),
        (growing(200.0, limit=7 * GIB), ("7 GiB: 2 workers would fit",)),
        (growing(200.0, limit=2 * GIB), ("2 GiB: fewer workers may not help",)),
        (growing(0.0), None),
        (growing(60.0, epoch_batches=None), None),
        (growing(60.0, limit=None), None),
    ],
    ids=["little", "too much", "more", "hopeless", "none", "no epoch", "no limit"],
)
def test_memory_that_would_outgrow_the_machine_within_an_epoch_is_warned_of(found, words):
    warning = growth_warning(found)

    assert (warning is None) is (words is None)
    assert all(each in warning for each in words or ())


def test_a_memory_that_was_not_measured_is_not_named():
    found = evidence(replace(measured(), memory=None))
    assert not any("numpy" in advice.action for advice in advise(found, judge(found)))


def test_a_toy_is_not_told_to_send_less():
    # GIVEN batches of a few bytes that cost more to hand over than to step on
    toy = measured(batch_bytes=800, receive_s=0.0004, service_s=0.0002, service_cpu_s=0.0002, wait_share=0.9)
    found = evidence(
        replace(toy, samples_per_s=exactly(60_000.0)), rate=exactly(60_000.0), ceiling=exactly(1_400_000.0)
    )
    # WHEN it is judged
    verdict = judge(found)
    texts = [advice.action for advice in advise(found, verdict)]
    # THEN neither sentence promises what bytes cannot give
    assert verdict.binding == "transport"
    assert "%" not in verdict.sentence.split(";")[1]
    assert any("Hand over less often" in text for text in texts)
    assert not any("uint8" in text for text in texts)


@pytest.mark.parametrize("found", [found for binding, found, _ in VERDICTS if binding != "startup"])
def test_no_gain_is_promised_beyond_the_ceiling(found):  # start-up is a matter of epochs, the ceiling one of batches
    for advice in advise(found, judge(found)):
        assert advice.expected_gain is None or 0 < advice.expected_gain <= found.ceiling.value / found.rate.value - 1


def test_start_up_comes_with_what_keeping_workers_gains():
    found = evidence(measured(first_batch_s=3.31), epoch_batches=300)  # 3.2 s of starting, 9.6 s of an epoch
    (advice,) = [advice for advice in advise(found, judge(found)) if "persistent_workers" in advice.action]
    assert advice.expected_gain == pytest.approx(1 / 3, rel=0.01)


def test_workers_that_start_threads_are_told_to_keep_to_one():
    found = evidence(measured(service_cpu_s=0.25))
    (advice,) = [advice for advice in advise(found, judge(found)) if "cv2.setNumThreads(0)" in advice.action]
    assert "2.3 cores" in advice.reason


def in_memory(**changes):
    """A worker-less loader of 64 samples in 1 ms, nine tenths of it for single samples."""
    fetched = [
        replace(each, fetch_end=0.0009, collate_end=0.001, received=0.001, step_end=0.0011)
        for each in traces([0.001] * 30)
    ]
    values = {"batch_size": 64.0, "service_s": 0.001, "service_cpu_s": 0.001, "step_s": 0.0001, "receive_s": 0.0}
    burst = measured(**values, samples_per_s=exactly(58_000.0), traces=tuple(fetched))
    return evidence(burst, best=LoaderConfig(), ceiling=exactly(640_000.0), **changes)


def test_single_samples_from_memory_are_better_fetched_together():
    # a loop of 1.1 ms, of which collating shows that 0.75 ms can go
    found = in_memory()
    assert judge(found).binding == "in_memory"
    (advice,) = advise(found, judge(found))
    assert "__getitems__" in advice.action
    assert advice.expected_gain == pytest.approx(1.1035 / (1.1035 - 0.75) - 1, rel=0.01)


def test_who_fetches_batches_already_is_not_told_to():
    found = in_memory(has_batched_fetch=True)
    assert advise(found, judge(found)) == ()


def simulated(best, others=(), *, failed=(), **machine):
    """Evidence from bursts on a simulated machine of four cores, with the twin that they make."""
    machine = SimulatedMachine(**machine)
    probe = SimulatedProbe(machine, FakeClock())
    plan = BurstPlan(max_s=1.0)
    tried = [LoaderConfig(), LoaderConfig(num_workers=1), LoaderConfig(num_workers=4), *others, best]
    trials = [
        Trial(number=number, config=config, role="search", measurement=probe.burst(config, plan))
        for number, config in enumerate(dict.fromkeys(tried))
    ]
    step = probe.step_ceiling(None, plan)
    context = TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, step.step_s),))
    burst = trials[-1].measurement
    return evidence(
        burst,
        best=best,
        ceiling=step.samples_per_s,
        on_accelerator=True,
        trials=(*trials, *failed),
        twin=fit_twin(observed(trials), context),
        cached_steps=(step,),
    )


def test_computing_workers_are_told_what_more_cores_would_bring():
    found = simulated(BEST, cpu_s=0.1, step_s=0.004)
    assert judge(found).binding == "cpu"
    (advice,) = [advice for advice in advise(found, judge(found)) if "more cores" in advice.action]
    assert "with 8 cores" in advice.action
    assert 0.5 < advice.expected_gain < 1.1


def test_waiting_workers_are_told_what_more_of_them_would_bring():
    found = simulated(BEST, cpu_s=0.002, wait_s=0.1, step_s=0.004)
    assert judge(found).binding == "wait"
    advice = advise(found, judge(found))[0]
    assert "max_workers=8" in advice.action
    assert 0.7 < advice.expected_gain < 1.1


def test_a_loop_that_is_no_faster_with_more_workers_and_batches_that_lie_ready_does_not_wait_for_storage():
    # GIVEN fetches that sleep, six workers that just keep up, and batches that take a while to receive
    six, twelve = LoaderConfig(num_workers=6), LoaderConfig(num_workers=12)
    found = simulated(six, [twelve], cpu_s=0.002, wait_s=0.06, step_s=0.01, receive_s=0.0018, service_cv=0.02)
    # THEN that is told with what shows it, and nothing is promised for reading faster
    assert judge(found).binding == "unknown"
    assert "yet with more workers, whose batches lay ready, the rate is no higher (2,720/s)" in judge(found).sentence
    assert "of 12 ms a batch the step takes 10 ms and receiving it 1.8 ms" in judge(found).sentence
    assert [each for each in advise(found, judge(found)) if each.expected_gain] == []
    # BUT where twelve are faster, six do wait
    slower = simulated(six, [twelve], cpu_s=0.002, wait_s=0.12, step_s=0.01, receive_s=0.0018, service_cv=0.02)
    assert judge(slower).binding == "wait"


def test_a_full_pinning_thread_is_named():
    pinned = LoaderConfig(num_workers=4, pin_memory=True)
    found = simulated(pinned, cpu_s=0.01, pin_s=0.03, step_s=0.002, batch_bytes=64 << 20)
    verdict = judge(found)
    assert verdict.binding == "pinning"
    assert "64 MiB" in verdict.sentence


def test_memory_binds_only_where_more_workers_would_have_been_faster():
    useless = replace(killed(6), predicted_samples_per_s=1001.0)
    useful = replace(killed(6), predicted_samples_per_s=1400.0)
    assert judge(evidence(trials=(useless,))).binding == "cpu"
    found = evidence(trials=(useful,))
    assert judge(found).binding == "memory"
    assert advise(found, judge(found))[0].expected_gain == pytest.approx(0.4)


def test_full_shared_memory_asks_for_more_of_it_or_smaller_batches():
    full = replace(killed(6), failure=Failure(kind="shared_memory", phase="batches", message="full"))
    found = evidence(trials=(full,))
    assert "--shm-size" in advise(found, judge(found))[0].action


def test_large_batches_that_cost_more_to_hand_over_than_to_make_are_transport():
    here = measured(service_s=0.004, service_cpu_s=0.004, receive_s=0.0)
    there = measured(service_s=0.009, service_cpu_s=0.009, receive_s=0.002)
    trials = tuple(
        Trial(number=workers, config=LoaderConfig(num_workers=workers), role="search", measurement=burst)
        for workers, burst in enumerate((here, there))
    )
    verdict = judge(evidence(here, best=LoaderConfig(), trials=trials, ceiling=exactly(6000.0)))
    assert verdict.binding == "transport"
    assert "another 7 ms" in verdict.sentence


def test_workers_that_only_write_large_batches_are_transport():
    # GIVEN 32 MiB a batch in 8 ms of CPU: nothing can have been computed meanwhile
    found = evidence(measured(service_s=0.009, service_cpu_s=0.008, batch_bytes=32 << 20))
    verdict = judge(found)
    assert verdict.binding == "transport"
    assert "8 ms of CPU for 32 MiB" in verdict.sentence
    assert "uint8" in advise(found, verdict)[0].action


READ = StageTime(stage="read", where="a.py:1, open", wall_share=0.5, cpu_share=0.1, wall_s=3e-3, cpu_s=0.3e-3)
DECODE = StageTime(stage="decode", where="a.py:2, convert", wall_share=0.4, cpu_share=0.6, wall_s=1.8e-3, cpu_s=1.8e-3)
CROP = StageTime(stage="crop", where="a.py:3", wall_share=0.1, cpu_share=0.3, wall_s=0.9e-3, cpu_s=0.9e-3)


def test_the_stage_that_takes_most_of_what_binds_is_named_with_its_line():
    computing = evidence(stage_times=(READ, DECODE, CROP))
    assert "; decode takes 60 % of a worker's CPU (a.py:2, convert); " in judge(computing).sentence
    waiting = evidence(measured(service_cpu_s=0.01), stage_times=(READ, DECODE))
    assert "; read takes 100 % of a worker's waiting (a.py:1, open); " in judge(waiting).sentence
    assert any("most of it in 'read' (a.py:1, open)" in each.reason for each in advise(waiting, judge(waiting)))


def test_advice_on_stages_is_ordered_by_what_the_twin_says_of_them():
    found = replace(simulated(BEST, cpu_s=0.1, step_s=0.002), stage_times=(CROP, READ, DECODE))
    advice = advise(found, judge(found))
    assert (
        advice[0].action
        == "Make 'decode' cheaper (a.py:2, convert): smaller source images, a faster decoder, or decoded once and kept."
    )
    assert advice[1].action == "Make 'crop' cheaper (a.py:3)."
    assert not any("'read'" in each.action for each in advice)
    # half of 60 % of what binds
    assert advice[0].expected_gain == pytest.approx(1 / 0.7 - 1, rel=0.15)
    assert advice[1].expected_gain < advice[0].expected_gain


def test_memory_that_grows_names_the_list_that_is_copied():
    growing = MemoryUse(rss_bytes=1 << 30, pss_slope_bytes_per_s=float(8 << 20))
    held = HeldObjects("paths", "Photos", "list", 200_000, "str")
    found = evidence(measured(memory=growing), held=held)
    advice = next(each for each in advise(found, judge(found)) if "grows by 8 MiB/s" in each.reason)
    assert "self.paths = np.array(self.paths)" in advice.action
    assert "Photos.paths is a list of 200,000 objects (str)" in advice.reason
