"""Studies run in small: killed again and again, a job of a GPU on a simulated one, a library tried, a step timed, births."""

import contextlib
import json

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from studies.endurance import kills
from studies.gpu import __main__ as jobs
from studies.libraries.__main__ import row
from studies.libraries.attempt import Job, make_attempt
from studies.live import births, births_kills, overhead
from studies.processes import busy_neighbours

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


def test_a_run_killed_at_any_moment_leaves_nothing_and_its_file_loads(
    tmp_path, preloaded, monkeypatch
):
    # Five short runs, each of which would otherwise begin with importing torch.
    (tmp_path / "run.py").write_text(kills.RUN.replace("budget=4", "budget=1"))

    def start(folder):
        return preloaded.start(
            str(tmp_path / "run.py"), folder=folder, environ=kills.environ(folder)
        )

    monkeypatch.setattr(kills, "start", start)
    figures = kills.kill_runs(2, seed=5)
    assert (figures["kills"], figures["unreadable files"], figures["not finished"]) == (2, 0, 0)
    assert [figures[name] for name in kills.LEFT] == [0, 0]


def test_a_job_runs_in_small_on_an_accelerator_and_its_verdict_is_right(simulated, tmp_path):
    arguments = ["--device", "sim", "--quick", "--only", "transformer"]
    run = simulated.start(jobs.__file__, *arguments, folder=tmp_path, probes=True)
    assert run.wait(60) == 0, run.output
    lines = run.output.splitlines()
    assert sum(line.startswith("RECORD") for line in lines) >= 8
    cells = dict(zip(jobs.COLUMNS, lines[-1].strip("| ").split(" | "), strict=True))
    assert cells[jobs.COLUMNS[0]] == "transformer (step)"
    assert cells["verdict"] == "step"


@pytest.mark.parametrize(
    ("given", "batch", "outcome", "says"),
    [
        (TensorDataset(torch.zeros(16, 2)), 4, "tuned", ""),
        (TensorDataset(torch.zeros(16, 2)), 8, "wrong", "a batch of 8 samples was counted as 4"),
        (42, 4, "refused", "would work"),
    ],
)
def test_an_attempt_is_tuned_refused_or_wrong(given, batch, outcome, says):
    options = {"batch_size": 4, "budget": 2, "collate_fn": default_collate}
    job = Job(
        given=given,
        model=None,
        options=options,
        batch=batch,
        epoch=lambda result: result.make_loader(given),
    )
    made = make_attempt(job)
    assert made.outcome == outcome
    assert says in made.says
    assert row("torch", "2", "a | b", made).startswith(f"| torch 2 | a \\| b | {outcome} | ")


def test_a_step_without_workers_is_timed_beside_dataloaders(monkeypatch):
    monkeypatch.setattr(overhead, "ROWS", 4 * overhead.SIZE)  # an epoch ends within a turn
    for name, data in overhead.datasets().items():
        cells = overhead.row(name, data, pairs=3, block=5, settle_s=0.0).strip("| ").split(" | ")
        assert (cells[0], cells[-1], len(cells)) == (name, "0", 5)
        assert min(map(float, cells[1:3])) > 0


@pytest.fixture
def in_small(preloaded, tmp_path, monkeypatch):
    """Jobs of births under fork, each in a process that has torch already."""

    def answer(job, **given):
        run = preloaded.start(
            births.__file__, "--job", json.dumps({"job": job, **given}), folder=tmp_path
        )
        assert run.wait(60) == 0, run.output
        return json.loads(run.output.splitlines()[-1])

    monkeypatch.setattr(births, "answer", answer)
    monkeypatch.setattr(births, "ANEW", ("fork",))
    sizes = births.SMALL._replace(entries=2000, many=2, batches=5, further=2)
    return births.Options(sizes, rounds=2, kills=1, seed=0, is_judged=True)


def test_births_of_workers_are_rows_of_a_table(in_small):
    rows = [*births.starts(in_small, "fork"), *births.further_workers(in_small._replace(rounds=1))]
    cells = [str(row).strip("| ").split(" | ") for row in rows]
    assert {len(each) for each in cells} == {5}
    assert all(
        each.split()[0].replace(",", "").replace(".", "").isdigit()
        for row in cells[:6]
        for each in row[1:3]
    )
    assert {(row[3] == "-", row[4] in ("yes", "NO")) for row in cells} == {
        (True, False),
        (False, True),
    }
    failed = births.compared(in_small, "a job that failed", [1.0], [], bar=2.0)
    assert (failed.ours, failed.is_met) == ("no answer", False)


def test_a_worker_is_what_torchs_is(in_small):
    (row, *notes) = births.fields(in_small)
    assert row.is_met, notes


def test_a_training_killed_while_workers_are_born_leaves_nothing():
    tally = births_kills.kill_births(1, seed=1, methods=("fork",))
    assert (tally.kills.total(), tally.is_bad) == (1, False), tally.notes()


def test_busy_neighbours_end_with_what_they_slow():
    with contextlib.suppress(KeyboardInterrupt), busy_neighbours(2):
        started = [each for each in psutil.Process().children() if "getppid" in each.cmdline()[-1]]
        assert len(started) == 2
        raise KeyboardInterrupt
    assert [each for each in started if each.is_running()] == []
