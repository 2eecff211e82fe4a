"""Each bottleneck from figures that show it, with the advice that follows; and numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from report.example import STAGES, exactly, ran, synthetic_result

from autotune_loader.diagnosis import (
    Answer,
    Caution,
    Evidence,
    diagnose,
    judged,
)
from autotune_loader.diagnosis.evidence import ready_s
from autotune_loader.diagnosis.judge import changes_in_training, source_of
from autotune_loader.diagnosis.messages import Source, answer
from autotune_loader.pipeline.forking import ParentProcess
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Failure, Interval, LoaderConfig, units

FOUR, SIX, TWELVE = (LoaderConfig(num_workers=workers) for workers in (4, 6, 12))
KEPT = replace(FOUR, persistent_workers=True)


def evidence(**changes):
    """A loader limited by the CPU: 100 ms of it a batch in a worker, and a loop that waits half."""
    values = {
        "config": FOUR, "samples_per_s": 1000.0, "wait_share": 0.5, "cores": 4, "batch_size": 32.0,
        "step_s": 0.015,
        "fetch_s": 0.11, "fetch_cpu_s": 0.10, "receive_s": 0.001, "batch_bytes": 4 << 20,
        "ceiling": exactly(2000.0),
        "has_batched_fetch": False, **changes,
    }  # fmt: skip
    return Evidence(**values)


def failed(kind, config=SIX):
    return ran(config, Failure(kind=kind, phase="batches", message="no room"))


READS = {"fetch_cpu_s": 0.01}
IN_MEMORY = {
    "config": LoaderConfig(), "batch_size": 64.0, "fetch_s": 0.001, "fetch_cpu_s": 0.001,
    "step_s": 0.0001,
    "samples_per_s": 58_000.0, "ceiling": exactly(580_000.0),
}  # fmt: skip
SMALL = {
    "batch_bytes": 800, "receive_s": 0.0004, "fetch_s": 0.0002, "fetch_cpu_s": 0.0002,
    "wait_share": 0.9,
    "samples_per_s": 6e4, "ceiling": None,
}  # fmt: skip
RARELY = {"wait_share": 0.05, "fetch_s": 0.004, "fetch_cpu_s": 0.003}
RARELY |= {"cpu_share": 0.27, "foreign_cpu_share": 0.7}
ASLEEP_IN_TIME = {"wait_share": 0.04, "fetch_cpu_s": 0.01, "cpu_share": 0.3}
ASLEEP_IN_TIME |= {"ceiling": exactly(1090.0)}
QUEUED = {"fetch_queued_s": 0.12}
STARTS = {"starting_share": 0.2, "wait_share": 0.3}
LONG_STEP = {"wait_share": 0.2, "ceiling": exactly(7540.0), "step_s": 0.025}
LONG_STEP |= {"foreign_cpu_share": 0.25}
LOOP_QUEUED = {
    "receive_s": 0.002, "receive_queued_s": 0.009, "fetch_s": 0.01, "fetch_cpu_s": 0.005,
    "fetch_queued_s": 0.0,
}  # fmt: skip
NO_STORAGE = {
    "receive_s": 0.004, "wait_share": 0.15, "fetch_s": 0.1, "fetch_cpu_s": 0.001,
    "fetch_queued_s": 0.001, "ceiling": None,
}  # fmt: skip
COPIES = {"copy_s": 0.01, "fetch_s": 0.04}
HANDED_OVER = {"transfer_ceiling": exactly(1000.0)}
COPIES_ITSELF = {
    "copy_s": 0.014, "fetch_s": 0.04, "wait_share": 0.01, "step_s": 0.03, "cpu_share": 0.3,
    "on_accelerator": True,
}  # fmt: skip
OF_CUDA = {"parent": ParentProcess("cuda", 1 << 30, is_elastic=False)}
OF_CUDA_ELASTIC = {"parent": ParentProcess("cuda", 12 << 30, is_elastic=True)}
OF_LARGE = {"parent": ParentProcess(None, 4 << 30, is_elastic=False)}
NO_IDLE_CORE = {"fetch_cpu_s": 0.04, "cpu_share": 0.45, "foreign_cpu_share": 0.5}

# Kind, what differs from a loader limited by the CPU, words of the bottleneck and of some advice
# (None: no advice).
CASES = {
    "the CPU": ("cpu", {}, "100 ms of CPU to load, 15 ms to train.", "Speed up the transforms"),
    "the CPU, beside an accelerator": ("cpu", {"on_accelerator": True},
        "at most 2.00x faster", ""),
    "the CPU beside a step": ("cpu", {"wait_share": 0.01, "step_s": 0.03}, "30 ms to train.", ""),
    "a fetch that no clock saw": ("cpu", {"wait_share": 0.01, "fetch_s": None}, "", ""),
    "all cores in use": ("cpu", {**READS, "cpu_share": 0.97}, "97% of 4 cores are busy.", ""),
    "a loop that hardly steps": ("cpu", {"wait_share": 0.97}, "about 2.0x faster", ""),
    "a slow stage": ("cpu", {"stages": STAGES},
        "", "Speed up decode (PIL.ImageFile.ImageFile.load), which takes"),
    "what failed otherwise": ("cpu", {"trials": (failed("user_exception"), ran(FOUR, 2300.0))},
        "about 2.0x faster", ""),
    "a step that was passed": ("cpu", {"wait_share": 0.95}, "more than 10x faster", ""),
    "the step": ("step", {"wait_share": 0.02, "ceiling": exactly(1020.0)},
        "waits for data 2% of the time. It runs at 1,000 samples/s; the step alone runs at 1,020",
        "Speed up the step"),
    "without a ceiling": ("step", {"wait_share": 0.01, "ceiling": None},
        "waits for data 1% of the time.", ""),
    "fetches sleep, and are in time": ("step", ASLEEP_IN_TIME, "4% of the time", ""),
    "storage": ("storage", READS,
        "takes 110 ms, of which 10 ms are CPU time.", "Read larger chunks (tar"),
    "a stage that waits": ("storage", {**READS, "stages": STAGES},
        "100% of a worker's waiting is in read (PIL.Image.open).", "Read larger chunks"),
    "a core that is waited for": ("cores", QUEUED,
        "49% of the wait is for a CPU core: more", "Use fewer than 4 workers (num_workers=0 if"),
    "a core that the loop waits for": ("cores", {**QUEUED, **LOOP_QUEUED},
        "56% of the wait is for a CPU core", ""),
    "a core, without workers": ("cores", {**QUEUED, "config": LoaderConfig()},
        "52%", "more cores, or run fewer other"),
    "computing, and a core": ("cpu", {**QUEUED, "fetch_queued_s": 0.01}, "100 ms of CPU", ""),
    "no storage": ("transfer", NO_STORAGE, "Receiving a batch of 4 MiB takes 4 ms", ""),
    "a step that shares its cores": ("cpu", LONG_STEP,
        "A step takes 25 ms in training and 4.2 ms alone: it shares the CPU cores with",
        ""),
    "a step beside other processes": ("cpu", {**LONG_STEP, "foreign_cpu_share": 0.4},
        "20% of the time. Other processes used 40% of the CPU. With instant data", ""),
    "transfers": ("transfer", {"receive_s": 0.02, "batch_bytes": 1 << 20},
        "Receiving a batch of 1 MiB takes 20 ms.", "uint8"),
    "batches without tensors": ("transfer", {"receive_s": 0.02, "batch_bytes": 0},
        "Receiving a batch takes 20 ms.", ""),
    "small batches": ("transfer", SMALL,
        "90% of the time", "Use larger batches: transferring a small one takes hardly less"),
    "handing over": ("transfer", {"transfer_ceiling": exactly(1040.0), "pin_s": 0.03},
        "every 31 ms, however many they are; the step alone takes 16 ms. Pinning",
        "Try AutoLoader(dataset, num_workers=4, tune=False), which transfers"),
    "handing over, which slows the step": ("transfer", HANDED_OVER | {"wait_share": 0.01},
        "every 32 ms", "AutoLoader"),
    "the CPU, before handing over": ("cpu", {"transfer_ceiling": exactly(1500.0)},
        "about 2.0x faster. DataLoader's workers could make it at most 1.50x faster.", ""),
    "handing over in time": ("cpu", HANDED_OVER | {"ceiling": exactly(1160.0), "step_s": 0.03},
        "", ""),
    "handing over, without workers": ("cpu",
        {"transfer_ceiling": exactly(1050.0), "config": LoaderConfig()}, "", ""),
    "copies, handed over": ("copy", HANDED_OVER | {"copy_s": 0.01, "fetch_s": 0.04},
        "adds 10 ms to its step", ""),
    "copies": ("copy", COPIES,
        "Copying a batch of 4 MiB to the device adds 10 ms to its step.",
        "wrap the loader in DevicePrefetcher."),
    "copies ahead": ("copy",
        {**COPIES, "config": replace(FOUR, device_prefetch=2), "batch_bytes": 1 << 20},
        "adds 10 ms", "uint8"),
    "workers that copies do not hold up": ("storage", {**READS, "copy_s": 0.014, "fetch_s": 0.124},
        "", "Read larger"),
    "copies after fetches": ("copy", {**READS, "copy_s": 0.014, "config": LoaderConfig()},
        "adds 14 ms", "DevicePrefetcher"),
    "a step that copies": ("copy", COPIES_ITSELF,
        "adds 14 ms to its step. The training loop waits for data 1% of", 'allow="device_'),
    "a step without a core": ("unclear", {**COPIES_ITSELF, "copy_s": 0.001},
        "runs at 1,000 samples/s; the step alone runs at 2,000 samples/s.", None),
    "memory that ran out": ("memory", {"trials": (failed("oom_killed"),)},
        "6 workers, prefetch 2 ran out of memory (oom killed).", "Use less memory per worker"),
    "shared memory": ("memory", {"trials": (failed("shared_memory"),)}, "", "--shm-size"),
    "starting epochs": ("start_up", STARTS, "takes 20%", "persistent_workers=True"),
    "workers that are kept": ("start_up", {**STARTS, "config": KEPT}, "", None),
    "starts, and no more known": ("start_up", {**STARTS, "wait_share": 0.98, "fetch_s": None},
        "takes 20%", ""),
    "in memory": ("in_memory", IN_MEMORY,
        "training process, 1 ms per batch. The training loop waits", "__getitems__"),
    "in memory, in batches": ("in_memory", {**IN_MEMORY, "has_batched_fetch": True},
        "", "Leave the loader as it is."),
    "another loader": ("little", {"loader_share": 0.01},
        "This loader takes 1% of the time", "Leave the loader as it is."),
    "too short": ("too_short", {"batches": 0}, "0 batches: too few", None),
    "no step": ("no_step", {"wait_share": None},
        "ended after its first batch", "iter(loader) once"),
    "forked from a process with CUDA": ("cpu", OF_CUDA,
        "",
        "initialized CUDA: they may crash or hang. Use AutoLoader or"),
    "the same, by AutoLoader": ("cpu", OF_CUDA_ELASTIC,
        "",
        'they may crash or hang. Use multiprocessing_context="forkserver": the'),
    "forked from a large process": ("cpu", OF_LARGE,
        "",
        "from a process with 4 GiB of memory: each fork copies its page tables"),
    # Two witnesses that disagree: both are named, and nothing is concluded.
    "rarely fetches": ("unclear", RARELY,
        "spends 3% of its time loading data. Other processes used 70% of the CPU.", None),
    "fetches that no clock saw": ("unclear", {"fetch_s": None}, "", None),
    "never waits, yet slow": ("unclear",
        {"wait_share": 0.01, "cpu_share": 0.2, "foreign_cpu_share": 0.05},
        "runs at 1,000 samples/s; the step alone runs at 2,000 samples/s.", None),
    "no core was idle": ("unclear", NO_IDLE_CORE, "of which 40 ms are CPU time.", None),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words", "advised"), CASES.values(), ids=CASES)
def test_a_bottleneck_has_figures_and_advice(kind, changes, words, advised):
    bottleneck, advice = diagnose(evidence(**changes))
    assert bottleneck.kind == kind
    assert words in bottleneck.sentence
    assert advice == () if advised is None else advised in "\n".join(map(str, advice))


IN_TIME, ALONE = {"wait_share": 0.01}, LoaderConfig()
WAITING = {"fetch_s": 0.1, "fetch_queued_s": 0.01, "receive_s": 0.0}
A_SECOND = {"batch_size": 1000.0, "fetch_s": 4.0, "fetch_cpu_s": 3.0}
OF_TEN, OF_MANY = (
    {"config": ALONE, "batch_size": size, "samples_per_s": 100.0} for size in (10.0, 100.0)
)

# What differs, a figure at a limit with its kind, and beyond with another.
LIMITS = [
    ({}, "batches", 3, "cpu", 2, "too_short"),
    ({}, "loader_share", 0.02, "cpu", 0.019, "little"),
    ({"loader_share": 0.01}, "wait_share", 0.05, "little", 0.049, "cpu"),
    (READS, "wait_share", 0.05, "storage", 0.049, "cpu"),
    ({"wait_share": 0.1}, "starting_share", 0.1, "cpu", 0.11, "start_up"),
    ({}, "starting_share", 0.25, "cpu", 0.26, "start_up"),
    ({"samples_per_s": 950.0, "wait_share": 0.1},
     "ceiling", exactly(1000.0), "step", exactly(1001.0), "cpu"),
    ({"samples_per_s": 950.0},
     "transfer_ceiling", exactly(1000.0), "transfer", exactly(1001.0), "cpu"),
    ({"on_accelerator": True, **IN_TIME},
     "ceiling", exactly(1250.0), "step", exactly(1251.0), "unclear"),
    (IN_TIME, "cpu_share", 0.5, "cpu", 0.49, "unclear"),
    (IN_TIME, "foreign_cpu_share", 0.25, "cpu", 0.26, "unclear"),
    (READS, "cpu_share", 0.85, "storage", 0.86, "cpu"),
    ({"fetch_s": 0.1}, "fetch_cpu_s", 0.06, "storage", 0.061, "cpu"),
    ({"fetch_cpu_s": 0.001}, "fetch_s", 0.0256, "storage", 0.0255, "unclear"),
    (A_SECOND, "receive_s", 0.3, "cpu", 0.31, "transfer"),
    (OF_TEN, "fetch_s", 0.002, "cpu", 0.0019, "in_memory"),
    (OF_MANY, "fetch_s", 0.005, "cpu", 0.0049, "in_memory"),
    ({"fetch_s": 0.04}, "copy_s", 0.008, "cpu", 0.0081, "copy"),
    (READS, "fetch_queued_s", 0.099, "storage", 0.101, "cores"),
    (WAITING, "fetch_cpu_s", 0.049, "storage", 0.051, "transfer"),
    (WAITING | {"config": ALONE},
     "fetch_cpu_s", 0.049, "storage", 0.051, "cpu"),
    (NO_IDLE_CORE | {"fetch_s": 0.1}, "fetch_cpu_s", 0.03, "storage", 0.031, "unclear"),
    (NO_IDLE_CORE, "cpu_share", 0.34, "storage", 0.36, "unclear"),
    (HANDED_OVER, "copy_s", 0.008, "transfer", 0.0081, "copy"),
    ({}, "trials", (failed("oom_killed", FOUR),), "cpu",
     (failed("oom_killed", replace(FOUR, prefetch_factor=3)),), "memory"),
    ({}, "trials", (failed("oom_killed", TWELVE), ran(SIX, 1050.0)), "cpu",
     (failed("oom_killed", TWELVE), ran(SIX, 1051.0)), "memory"),
    ({}, "trials", (replace(failed("oom_killed"), predicted_samples_per_s=1050.0),), "cpu",
     (replace(failed("oom_killed"), predicted_samples_per_s=1051.0),), "memory"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "figure", "at", "kind", "beyond", "other"), LIMITS)
def test_a_kind_has_its_limit(changes, figure, at, kind, beyond, other):
    assert diagnose(evidence(**{**changes, figure: at}))[0].kind == kind
    assert diagnose(evidence(**{**changes, figure: beyond}))[0].kind == other


BUSY = {"foreign_cpu_share": 0.3}
BIGGER = ran(replace(FOUR, batch_size=64), 5000.0)
SLEPT, COMPUTED = (
    ran(TWELVE, 1.0, service_s=0.1, service_cpu_s=cpu_s, **BUSY) for cpu_s in (0.01, 0.05)
)
WHOLE = {**QUEUED, "fetch_cpu_s": 0.3}  # a fetch on several cores


@pytest.mark.parametrize(
    ("changes", "figure", "expected"),
    [
        ({}, "alone_s", 0.016),
        ({"ceiling": None}, "alone_s", 0.015),
        ({"ceiling": None, "step_s": None}, "alone_s", 0.0),
        ({}, "fetching_share", 0.859375),
        ({"fetch_s": 0.2}, "fetching_share", 1.0),
        ({"config": ALONE}, "fetching_share", 1.0),
        ({"copy_s": 0.01}, "saved_s", 0.0045),
        ({"copy_s": 0.01, "config": ALONE}, "saved_s", 0.01),
        ({"ceiling": exactly(900.0)}, "headroom", 0.0),
        ({"ceiling": None, "wait_share": 1.0}, "headroom", None),
        ({"ceiling": None, "trials": (ran(FOUR, 2000.0), BIGGER)}, "headroom", 1.0),
        ({"ceiling": None, "trials": (ran(FOUR, 2001.0),)}, "headroom", None),
        ({"ceiling": exactly(9000.0), "trials": (ran(FOUR, 2100.0),)}, "headroom", 1.1),
        ({"ceiling": exactly(9000.0), "on_accelerator": True}, "headroom", 8.0),
        ({"transfer_ceiling": exactly(1700.0)}, "handed_over", None),
        ({"transfer_ceiling": exactly(1699.0)}, "handed_over", exactly(1699.0)),
        ({}, "waiting", None),
        ({**QUEUED, "wait_share": 0.0}, "waiting", None),
        (QUEUED, "waiting", (0.470109, 0.489130, 0.040761)),
        ({**QUEUED, **LOOP_QUEUED}, "waiting", (0.28125, 0.5625, 0.15625)),
        ({**QUEUED, "config": ALONE}, "waiting", (0.434783, 0.521739, 0.043478)),
        (WHOLE, "waiting", (0.732143, 0.267857, 0.0)),
        ({"fetch_s": None}, "computing_share", 1.0),
        (READS, "computing_share", 1 / 11),
    ],
)
def test_evidence_derives_figures(changes, figure, expected):
    found = getattr(evidence(**changes), figure)
    is_exact = expected is None or isinstance(expected, Interval)
    assert found == (expected if is_exact else pytest.approx(expected, abs=1e-6))


@pytest.mark.parametrize(
    ("trials", "config"),
    [
        ((ran(SIX, 1.0), ran(FOUR, 1.0, foreign_cpu_share=0.25), ran(TWELVE, 1.0)), FOUR),
        ((ran(SIX, 1.0), ran(FOUR, 1.0, **BUSY)), SIX),
        ((ran(SIX, 1.0, service_cpu_s=0.001, **BUSY), SLEPT, COMPUTED), TWELVE),
        ((), FOUR),
    ],
)
def test_a_fetch_is_judged_where_it_was_undisturbed(trials, config):
    found = evidence(trials=trials).undisturbed
    assert found.config == config
    assert found.fetch_cpu_s in (0.05, 0.07, 0.10)


@pytest.mark.parametrize(
    ("waits", "receive_s"), [((9, 2, 4, -9), 3.0), ((9, 2, -9), 0.0), ((), 0.001)]
)
def test_a_ready_batch_takes_its_median(waits, receive_s):
    # GIVEN batches that were whole as the loop asked for them, or 9 s later
    traces = tuple(
        BatchTrace(0, 0.0, 1.0, 1.0 if wait > 0 else 10.0, 0.1, 1, 1.0, 1.0 + abs(wait), 99.0)
        for wait in waits
    )
    assert ready_s(ran(FOUR, 1.0, traces=traces).measurement) == receive_s


def test_without_a_ceiling_waiting_bounds_the_gain():
    found, _ = diagnose(evidence(ceiling=None, wait_share=0.41))
    assert found.gain == pytest.approx(0.41 / 0.59)
    assert "about 1.7x faster" in found.sentence


def test_a_ceiling_that_was_passed_is_a_warning():
    result, limit = synthetic_result(), exactly(1000.0)
    found = judged(replace(result, ceiling=limit, transfer_ceiling=limit))
    assert Caution.CEILING_PASSED.said_by(found.warnings[-1])
    assert found.ceiling is None
    # AND that of workers is left out once a rate lies 15% above it
    for rate, of_workers in ((1150.0, limit), (1151.0, None)):
        near = replace(result, rate=exactly(rate), transfer_ceiling=limit)
        assert judged(near).transfer_ceiling == of_workers
    # AND without a rate nothing is said
    assert judged(replace(synthetic_result(), rate=None)).bottleneck.kind == "nothing"


def test_the_evidence_of_a_burst_is_its_means():
    # GIVEN a burst whose batches the loop fetched itself, so that none lay ready, and epochs of
    # 100 batches of 32 ms
    ends = dict.fromkeys(("fetch_end", "collate_end", "cpu_s", "received", "step_end"), 0.1)
    batch = BatchTrace(worker=MAIN_PROCESS, fetch_start=0.0, requested=0.0, samples=32, **ends)
    burst = ran(FOUR, 1000.0, traces=(batch,) * 50, first_batch_s=0.88, receive_s=0.1).measurement
    found = Evidence.of(burst, config=FOUR, cores=4, wait_share=0.3, epoch_batches=100)
    assert (found.samples_per_s, found.fetch_s) == (1000.0, 0.08)
    assert (found.wait_share, found.receive_s) == (0.3, 0.0)
    assert found.starting_share == pytest.approx(0.8 / (0.8 + 3.2))
    assert Evidence.of(burst, config=KEPT, cores=4, epoch_batches=100).starting_share == 0.0


ONCE, GIB = {"sample": 1e5, "data": 10**6}, 1 << 30


@pytest.mark.parametrize(
    ("sample", "samples", "fits", "told"),
    [
        (None, 10, True, None),
        (63.0, 10, True, Source.NOT_STORAGE()),
        (64.0, None, True, Source.STORAGE(sample=64.0)),
        (1e5, 10, None, Source.STORAGE(sample=1e5)),
        (1e5, 10, True, Source.STORAGE_AT_FIRST(**ONCE)),
        (1e5, 10, False, Source.STORAGE_ALWAYS(**ONCE, memory=GIB)),
    ],
)
def test_where_training_will_have_samples_from_is_told(sample, samples, fits, told):
    machine = SimpleNamespace(memory=SimpleNamespace(total_bytes=GIB), holds=lambda size: fits)
    data = SimpleNamespace(samples_per_epoch=lambda: samples)
    assert source_of(SimpleNamespace(read_bytes_per_sample=sample), data, machine) == told


OLD, TWO = {"batch_size": 8}, {"num_workers": 2}
STREAMED = {"is_iterable": True, "drop_last": True}
# A configuration, its data, and what the one changes for the other.
CHANGES = [
    ({"batch_size": 32}, OLD, Caution.BATCH_SIZE(old=8, new=32)),
    ({"batch_size": 32}, {}, None),
    ({}, OLD, None),
    (TWO | {"in_order": False}, OLD, Caution.OUT_OF_ORDER()),
    (TWO | {"persistent_workers": True}, {"has_epochs": True}, Caution.EPOCH_NOT_SEEN()),
    (TWO | {"persistent_workers": True}, OLD, None),
    (TWO, {"has_epochs": True}, None),
    (TWO, STREAMED, Caution.FEWER_SAMPLES(workers=2)),
    ({"num_workers": 1}, STREAMED, None),
    (TWO, {"is_iterable": True}, None),
    (TWO, {"drop_last": True}, None),
]


@pytest.mark.parametrize(("best", "data", "said"), CHANGES)
def test_what_a_choice_changes_in_training_is_said(best, data, said):
    facts = dict.fromkeys(("batch_size", "has_epochs", "is_iterable", "drop_last")) | data
    found = [*changes_in_training(LoaderConfig(**best), SimpleNamespace(**facts))]
    assert found == ([] if said is None else [said])


RATIO = Interval(value=2.31, low=2.2, high=2.42, count=4)


@pytest.mark.parametrize(
    ("ratio", "row"),
    [
        ((1.5, 1.4, 1.6), Answer.FASTER),
        ((0.8, 0.7, 0.9), Answer.SLOWER),
        ((1.1, 0.9, 1.3), Answer.NOT_SHOWN),
        ((1.02, 1.001, 1.04), Answer.NOT_SHOWN),  # the limit is written as 1.00x
        ((1.03, 1.005, 1.06), Answer.NOT_SHOWN),
        ((0.97, 0.94, 1.0), Answer.NOT_SHOWN),
        ((0.97, 0.94, 1 / 1.005), Answer.NOT_SHOWN),
        ((1.0, 0.98, 1.02), Answer.EQUAL),
        ((1.0, 0.979, 1.02), Answer.NOT_SHOWN),
        ((1.0, 0.98, 1.021), Answer.NOT_SHOWN),
        ((12.0, 3.5, 41.0), Answer.FASTER),
        ((0.03, 0.0, 0.4), Answer.SLOWER),
        ((1.5, float("-inf"), float("inf")), Answer.UNSURE),
    ],
)
def test_a_gain_is_claimed_where_rounds_show_it(ratio, row):
    value, low, high = ratio
    assert row.said_by(answer("new", Interval(value=value, low=low, high=high, count=4), "old"))


TEXTS = {
    units.number_text: {1234.4: "1,234", 0.7891: "0.789", 123_456: "123k",
                      1_234_567: "1.23M", 99_949: "99,949", 99_950: "100k", 999_499: "999k",
                      999_500: "1.00M", 99.95: "100", 9.995: "10.0", 0.9995: "1.00",
                      float("inf"): "inf"},
    units.rate_text: {1234.4: "1,234 samples/s", None: "-"},
    units.share_text: {0.004: "0.4%", 0.0095: "1%", 0.124: "12%", 0.0: "0%", None: "-"},
    units.bytes_text: {45 << 20: "45 MiB", (5 << 30) // 4: "1.25 GiB", 1000: "1000 B", None: "-",
                       3 << 40: "3 TiB", 1 << 10: "1 KiB", 1 << 20: "1 MiB", 1 << 30: "1 GiB"},
    units.seconds_text: {9.449e-6: "9.4 us", 9.452e-6: "9.5 us", 0.0004: "0.4 ms",
                         45: "45 s", 200: "3 min 20 s", 0.0: "0 ms", None: "-", 119.5: "2 min 0 s",
                         0.9995: "1.00 s", 9.95: "10 s", 0.9: "900 ms", 0.012: "12 ms",
                         0.00995: "10 ms", 0.0000995: "0.1 ms", 1.234: "1.23 s"},
    Interval.as_ratio: {
        RATIO: "2.31x",
        Interval(value=12.0, low=3.5, high=41.0, count=2): "at least 3.50x",
        Interval(value=0.03, low=0.0, high=0.4, count=2): "at most 0.40x",
        Interval(value=32.4, low=0.0, high=float("inf"), count=1): "32.4x",
    },
    Interval.limits: {RATIO: "2.20 to 2.42", Interval(value=1.0, low=0.0, high=9.0, count=4): ""},
    lambda count: units.counted(count, "batch"): {1: "1 batch", 1200: "1,200 batches"},
}  # fmt: skip


def test_numbers_are_written_for_people():
    for text_of, texts in TEXTS.items():
        assert {number: text_of(number) for number in texts} == texts
