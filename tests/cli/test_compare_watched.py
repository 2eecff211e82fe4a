"""`compare` of two reports of `watch --json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune_loader import cli


def report(path: Path, **rates: float | None) -> str:
    loaders = [{"name": f"train.py:{name}", "samples_per_s": rate, "wait_share": 0.5} for name, rate in rates.items()]
    path.write_text(json.dumps({"verb": "watch", "loaders": loaders}))
    return str(path)


@pytest.mark.parametrize(
    ("after", "options", "code", "told"),
    [
        (900.0, [], 0, "-10 %"),
        (900.0, ["--fail-if-slower", "5%"], 4, "Slower by more than --fail-if-slower allows: train.py:a"),
        (900.0, ["--json"], 0, '"train.py:a": 0.09999'),
        (900.0, ["--fail-if-slower", "0.2"], 0, "-10 %"),
        (2000.0, ["--fail-if-slower", "5%"], 0, "+100 %"),
        (None, ["--fail-if-slower", "5%"], 0, "-"),
    ],
)
def test_a_slower_loader_is_shown_and_can_fail_a_pipeline(
    after: float | None, options: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = report(tmp_path / "before.json", a=1000.0), report(tmp_path / "after.json", a=after, b=1.0)
    assert cli.main(["compare", before, now, *options]) == code
    assert told in "".join(capsys.readouterr())


def test_reports_of_different_scripts_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", report(tmp_path / "one.json", a=1.0), report(tmp_path / "other.json", b=1.0)]) == 2
    assert "no loader in common" in capsys.readouterr().err
