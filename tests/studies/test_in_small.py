"""Studies run in small: killed again and again, the jobs of a GPU on a CPU, a library tried."""

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from studies.endurance import kills
from studies.gpu import __main__ as jobs
from studies.libraries.__main__ import row
from studies.libraries.attempt import Job, make_attempt

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


def test_a_run_killed_at_any_moment_leaves_nothing_and_its_file_loads(tmp_path, preloaded, monkeypatch):
    # Five short runs, each of which would otherwise begin with importing torch.
    (tmp_path / "run.py").write_text(kills.RUN.replace("budget=4", "budget=2"))

    def start(folder):
        return preloaded.start(str(tmp_path / "run.py"), folder=folder, environ=kills.environ(folder))

    monkeypatch.setattr(kills, "start", start)
    figures = kills.kill_runs(2, seed=5)
    assert (figures["kills"], figures["unreadable files"], figures["not finished"]) == (2, 0, 0)
    assert [figures[name] for name in kills.LEFT] == [0, 0]


def test_a_job_runs_in_small_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # put back afterwards
    jobs.main(["--device", "cpu", "--quick", "--only", "transformer", "--budget", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("RECORD") for line in lines) >= 8
    cells = lines[-1].split(" | ")
    assert (len(cells), cells[0]) == (len(jobs.COLUMNS), "| transformer (step)")


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
    job = Job(given=given, model=None, options=options, batch=batch, epoch=lambda result: result.make_loader(given))
    made = make_attempt(job)
    assert made.outcome == outcome
    assert says in made.says
    assert row("torch", "2", "a | b", made).startswith(f"| torch 2 | a \\| b | {outcome} | ")
