"""Studies can be imported without measuring anything, and one of them runs in small."""

import importlib
from pathlib import Path

from studies.regret import OURS, machines, simulated, table

ROOT = Path(__file__).parents[2]


def test_every_module_of_the_studies_can_be_imported():
    paths = [path.relative_to(ROOT) for path in (ROOT / "studies").rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        importlib.import_module(".".join(path.with_suffix("").parts))


def test_a_study_of_regret_runs_in_small(tmp_path, monkeypatch):
    # GIVEN a machine whose rates are known for 0 to 4 workers
    monkeypatch.setattr(machines, "COUNTS", range(5))
    monkeypatch.setattr(machines, "TRUTH_BATCHES", 500)
    monkeypatch.setattr(simulated, "BUDGET_S", 5.0)
    found = simulated.study_machine("usual", 0, [OURS, "torch default"], tmp_path)
    # THEN each strategy has a regret, and the table has a row for it
    assert all(0 <= each.regret <= 1 for each in found)
    assert found[0].regret <= found[1].regret
    names = [row.cells["strategy"] for row in table(found)]
    assert names == [OURS, "torch default"]
    # WHEN it runs again, the machine is not simulated anew
    monkeypatch.setattr(machines.Oracle, "_fastest_at_a_glance", None)
    assert simulated.study_machine("usual", 0, [OURS, "torch default"], tmp_path) == found
