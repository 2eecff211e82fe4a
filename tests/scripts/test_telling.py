"""Lines, figures and sentences of a script's report, without a script."""

from __future__ import annotations

import os
from collections import namedtuple
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.cli.scripts import Launch, launch_of
from autotune_loader.cli.tuning import tune_command
from autotune_loader.live.result import NOTHING
from autotune_loader.results.loader_file import Verdict
from autotune_loader.scripts import telling
from autotune_loader.scripts.hook import Hook
from autotune_loader.scripts.nothing import tell_nothing
from autotune_loader.scripts.plan import Plan
from autotune_loader.scripts.session import Session
from autotune_loader.scripts.site import Site
from autotune_loader.scripts.tally import Tally
from autotune_loader.scripts.telling import LoaderReport, ScriptReport, is_waiting_too_long, report_of
from autotune_loader.scripts.watching import forget_our_frames
from autotune_loader.values import lines
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import Line, users_line
from autotune_loader.values.statistics import Interval

Frame = namedtuple("Frame", ["f_code", "f_lineno", "f_back"])


def code_of(file: str) -> CodeType:
    return compile("", file, "exec")


def stack(*files: str) -> Any:
    """Frames of files, the outermost first."""
    frame = None
    for number, file in enumerate(files, 1):
        frame = Frame(code_of(file), number, frame)
    return frame


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (("/job/train.py",), "train.py:1"),
        (("/job/train.py", "/env/site-packages/lightning/trainer.py", lines.__file__), "train.py:1"),
        (("/job/train.py", "/job/data.py", torch.__file__), "data.py:2"),
        (("<frozen runpy>", "/env/site-packages/trainer/cli.py"), "cli.py:2"),
        (("/env/site-packages/IPython/shell.py", "/tmp/ipykernel_12/3456.py"), "cell:2"),
    ],
)
def test_a_loader_has_the_name_of_the_nearest_line_of_the_users(files: tuple[str, ...], name: str) -> None:
    assert str(users_line(stack(*files))) == name


def test_where_libraries_count_the_nearest_line_outside_of_this_package_is_meant() -> None:
    files = ("/job/train.py", "/env/site-packages/lightning/trainer.py", lines.__file__)
    line = users_line(stack(*files), libraries=True)
    assert line is not None
    assert line.file == files[1]


def test_waiting_and_pauses_are_told_apart() -> None:
    tally, now = Tally(), 0.0
    tally.begin(0.5)
    for step_s in (0.1, 0.1, 60.0, 0.1):  # an evaluation of a minute is no step
        tally.ask(now)
        tally.receive(now, now + 0.3, 8)
        now += 0.3 + step_s
    tally.ask(now)
    tally.end(now, now)

    assert (tally.batches, tally.samples, tally.epochs) == (4, 32, 1)
    assert tally.waited_s == pytest.approx(0.5 + 4 * 0.3)
    assert tally.stepped_s == pytest.approx(3 * 0.1)


def test_waiting_for_epochs_to_start_is_told_apart() -> None:
    tally, now = Tally(), 0.0
    for _ in range(2):
        tally.begin(1.0)
        for wait_s in (1.1, 0.1, 0.1, 0.1):
            tally.ask(now)
            tally.receive(now, now + wait_s, 8)
            now += wait_s + 0.1
    assert tally.wait_share == pytest.approx(4.8 / 5.4)  # the step before an epoch's first request is none
    assert tally.starting_share == pytest.approx((2 * 2.1 - 2 * 0.1) / 5.4)
    assert Tally().starting_share == 0.0


def test_the_text_of_a_workers_error_has_no_frame_of_ours() -> None:
    error = ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/env/torch/worker.py", line 1, in loop\n    data = fetch()\n'
        f'  File "{lines.__file__}", line 2, in ours\n    return fetch()\n           ^^^^^^^\n'
        '  File "/job/train.py", line 3, in __getitem__\n    raise ValueError\nValueError: bad\n'
    )

    forget_our_frames(error)

    assert "ours" not in str(error)
    assert str(error).endswith(
        '    data = fetch()\n  File "/job/train.py", line 3, in __getitem__\n    raise ValueError\nValueError: bad\n'
    )


def a_loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(16.0)), batch_size=batch_size)


def test_loaders_of_one_line_are_one_unless_they_are_iterated_together() -> None:
    line, known = Line("/job/train.py", 7), dict[Any, Line]()
    session = Session(Plan(verb="watch"), known)

    def begin(loader: DataLoader[Any]) -> Any:
        known[loader] = line
        return session.iterate(loader, DataLoader.__iter__)

    for _ in range(2):
        list(begin(a_loader()))  # made anew for each epoch
    kept, other = a_loader(), a_loader()
    first, second = begin(kept), begin(other)  # both at once
    next(first), next(second)
    list(begin(a_loader(batch_size=8)))

    assert [(site.name, site.tally.batches) for site in session.sites] == [
        ("train.py:7", 9),
        ("train.py:7 TensorDataset", 1),
        ("train.py:7 TensorDataset 2", 2),
    ]


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_samples_are_those_of_the_dataset_whatever_a_batch_holds(verb: Any) -> None:
    session = Session(Plan(verb=verb), {})
    loader = DataLoader(TensorDataset(torch.arange(18.0)), batch_size=4, collate_fn=lambda items: torch.zeros(1, 3))

    for _ in range(2):
        assert len(list(session.iterate(loader, DataLoader.__iter__))) == 5

    assert (session.sites[0].tally.batches, session.sites[0].tally.samples) == (10, 36)


def test_torch_is_as_before_once_the_hook_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    before = vars(DataLoader)["__init__"], vars(DataLoader)["__iter__"]
    hook = Hook(Plan(verb="watch"))
    hook.install()
    loader = a_loader()
    own = {**vars(loader)}
    batches = iter(loader)
    kind = type(batches)

    assert sum(len(x) for (x,) in batches) == 16
    assert vars(loader) == own
    assert isinstance(batches, torch.utils.data.dataloader._SingleProcessDataLoaderIter)
    assert kind.__name__ == "_SingleProcessDataLoaderIter"
    assert hook.session.sites[0].name.startswith("tests/scripts/test_telling.py:")

    hook.remove()
    assert (vars(DataLoader)["__init__"], vars(DataLoader)["__iter__"]) == before
    list(loader)
    assert hook.session.sites[0].tally.epochs == 1
    hook.tell()
    assert "4 batches, " in capsys.readouterr().err


def test_a_block_says_what_was_changed_and_what_it_brought() -> None:
    loader = LoaderReport(
        name="train.py:41",
        contents="Images[1200], batches of 32, shuffled",
        epochs=5,
        batches=190,
        samples_per_s=212.3,
        starting_share=0.0,
        wait_share=0.12,
        gpu_share=0.8,
        settings={"num_workers": 0, "pin_memory": False},
        settings_now={"num_workers": 2, "pin_memory": False, "prefetch_factor": 4},
        gain=Interval(value=0.83, low=0.75, high=0.92, count=40),
        why_watched=None,
        binding="cpu",
        verdict="The CPU binds.",
        next_step="use more cores",
    )
    report = ScriptReport(
        verb="run",
        seconds=61.0,
        peak_memory_bytes=300 << 20,
        peak_child_memory_bytes=200 << 20,
        peak_gpu_memory_bytes=None,
        loaders=(loader,),
        notes=("Written to loader.json.",),
    )

    assert str(report) == (
        "autotune-loader run: 1 loader in 61 s; peak memory 300 MiB, largest worker 200 MiB\n"
        "\n"
        "train.py:41  Images[1200], batches of 32, shuffled\n"
        "  190 batches in 5 epochs, 212 samples/s; the loop waits 12 % of its time, and the GPU works 80 % of it\n"
        "  settings: num_workers=0\n"
        "  now: num_workers=2, prefetch_factor=4: +83 % (+75 to +92 %)\n"
        "  The CPU binds.\n"
        "  next: use more cores\n"
        "\n"
        "Written to loader.json."
    )


@pytest.mark.parametrize(("binding", "is_promised"), [("wait", True), ("in_memory", False)])
def test_no_workers_are_promised_to_a_loader_that_needs_none(
    monkeypatch: pytest.MonkeyPatch, binding: str, is_promised: bool
) -> None:
    # GIVEN a loader that is waited for, a verdict, and beliefs that more workers would be faster
    session = Session(Plan(verb="watch"), {})
    list(session.iterate(a_loader(), DataLoader.__iter__))
    session.sites[0].tally.waited_s, session.sites[0].tally.stepped_s = 4.0, 6.0
    verdict = SimpleNamespace(binding=binding, sentence="It binds.")
    monkeypatch.setattr(Site, "result", lambda site: SimpleNamespace(verdict=verdict, advice=()))
    faster = LoaderConfig(num_workers=3), Interval(value=0.57, low=0.36, high=0.81, count=9)
    monkeypatch.setattr(telling, "expected", lambda site: faster)

    # WHEN it is told of THEN its next step does not contradict the verdict
    (loader,) = report_of(session).loaders
    assert (loader.next_step is not None) is is_promised


def test_only_more_than_is_allowed_is_too_long() -> None:
    for most, is_too_long in ((0.5, True), (0.9, False), (None, False)):
        session = Session(Plan(verb="watch", most_waiting=most), {})
        list(session.iterate(a_loader(), DataLoader.__iter__))
        tally = session.sites[0].tally
        tally.waited_s, tally.stepped_s = 8.0, 2.0
        assert is_waiting_too_long(session) is is_too_long
        notes = report_of(session).notes
        told = "tests/scripts/test_telling.py:" if is_too_long else ""
        assert (
            any("was waited for 80 % of its time, and --fail-if-wait allows 50 %." in note for note in notes)
            is is_too_long
        )
        assert all(told in note for note in notes)


@pytest.mark.parametrize(
    ("typed", "target", "arguments", "output"),
    [
        (["train.py", "-o", "theirs", "--budget"], "train.py", ("-o", "theirs", "--budget"), "loader.json"),
        (["-o", "own.json", "--budget", "9s", "train.py"], "train.py", (), "own.json"),
        (["--json", "-m", "project.train", "--lr", "1"], "project.train", ("--lr", "1"), "loader.json"),
    ],
)
def test_what_follows_a_script_is_its_own(
    typed: list[str], target: str, arguments: tuple[str, ...], output: str
) -> None:
    launch = tune_command.main(typed, standalone_mode=False)

    assert isinstance(launch, Launch)
    assert (launch.plan.verb, launch.target, launch.arguments) == ("tune", target, arguments)
    assert (launch.plan.output or "").endswith(f"/{output}")
    assert launch.is_module is ("-m" in typed)


@pytest.mark.parametrize(
    ("typed", "names"),
    [(["--search", "grid", "train.py"], "--search"), (["train.py:make", "more"], "more"), (["train"], "train")],
)
def test_what_does_not_fit_a_script_or_a_factory_is_named(typed: list[str], names: str) -> None:
    with pytest.raises(ValueError, match=f"{names}.*would"):
        tune_command.main(typed, standalone_mode=False)


def test_tune_says_that_it_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ValueError, match=r"WORLD_SIZE=2; autotune-loader run -o loader.json train.py would work"):
        tune_command.main(["train.py"], standalone_mode=False)


@pytest.mark.parametrize(("rank", "lines"), [("", 1), ("0", 1), ("1", 0)])
def test_only_rank_0_says_that_there_is_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)

    tell_nothing(Plan(verb="watch"))

    assert capsys.readouterr().err.count("Nothing can be told") == lines


@pytest.mark.parametrize("share", ["ten", "110%", "-0.1"])
def test_a_share_that_is_none_is_named(share: str) -> None:
    with pytest.raises(ValueError, match=f"--fail-if-wait='{share}'.*10%"):
        launch_of("watch", "train.py", (), fail_if_wait=share)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("output", "/nope/x.json", "--output='/nope/x.json' cannot be written"),
        ("page", "/nope/x.html", "--report='/nope/x.html' cannot be written.*--report='report.html'"),
        ("max_workers", -1, "--max-workers=-1 is below 0"),
    ],
)
def test_what_cannot_be_done_at_the_end_is_said_before_the_script_runs(option: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"{told}.* would work"):
        launch_of("run", "train.py", (), **{option: value})


def test_the_environment_hands_the_plan_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_LOADER_SCRIPT", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert Plan.handed_on() is None

    Plan(verb="tune", max_workers=3).hand_on()

    assert Plan.handed_on() == Plan(verb="run", max_workers=3)  # only the script itself is ended
    assert os.environ["PYTHONPATH"].split(":")[1] == "/theirs"


def told(monkeypatch: pytest.MonkeyPatch, verdict: Any, rise: float = 0.3) -> LoaderReport:
    """Of a loader that is watched and waited for, with a verdict and a belief in more workers."""
    session = Session(Plan(verb="watch"), {})
    list(session.iterate(a_loader(), DataLoader.__iter__))
    session.sites[0].tally.waited_s, session.sites[0].tally.stepped_s = 4.0, 6.0
    monkeypatch.setattr(Site, "result", lambda site: SimpleNamespace(verdict=verdict, advice=()))
    gain = Interval(value=rise, low=0.9 * rise, high=1.1 * rise, count=9)
    monkeypatch.setattr(telling, "expected", lambda site: (LoaderConfig(num_workers=57), gain))
    return report_of(session).loaders[0]


def test_a_verdict_says_that_it_is_of_the_latest_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a verdict by a block in which the loop waited for less than over all its time
    verdict = Verdict(binding="wait", sentence="Waiting binds: the loop waits for data 25 % of the time.")
    loader = told(monkeypatch, verdict)
    # THEN no one takes one for the other
    assert loader.wait_share == pytest.approx(0.4)
    assert loader.verdict == f"Lately: {verdict.sentence}"
    assert told(monkeypatch, NOTHING).verdict == NOTHING.sentence


def test_no_figure_is_promised_that_nobody_would_believe(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict(binding="wait", sentence="It waits.")
    near, far = (told(monkeypatch, verdict, rise).next_step for rise in (3.0, 42.4))
    assert "num_workers=57, prefetch_factor=2: 4.0 times the rate (3.7 to 4.3) expected; autotune-loader run" in (
        near or ""
    )
    assert "num_workers=57, prefetch_factor=2: more than 10 times the rate expected; autotune-loader run" in (far or "")


def test_many_batches_in_too_short_a_time_are_not_called_few(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Plan(verb="watch"), {})
    list(session.iterate(a_loader(), DataLoader.__iter__))
    assert report_of(session).loaders[0].verdict == "The training was too short to say what binds."
