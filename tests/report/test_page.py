"""The page and the notebook's cell, which nothing in a result can break out of; and frames."""

import base64
import json
import re
import sys

from report.example import FULL, STAGES

from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig

NOTHING = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
BOTH = ["Samples per second over workers", "Time of a sample in a worker, by stage"]


def pictures(page):
    """What each picture is said to show."""
    found = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', page)
    assert all(base64.b64decode(data).startswith(b"<?xml") for _, data in found)
    return [what for what, _ in found]


def test_a_page_escapes_what_it_quotes(result, tmp_path):
    result.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert pictures(page) == BOTH
    assert "order &lt;was&gt; not shuffled &amp; read twice" in page
    assert "2026-11-26, photos.Photos[1200], 4 cores, 16 GiB, no GPU, torch 2.6.0" in page
    arguments = page.rpartition("<pre>")[2].partition("</pre>")[0].replace("&quot;", '"')
    assert arguments == json.dumps(result.best.to_kwargs(), indent=2)
    # AND nothing is fetched from anywhere, and no script could be run
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_cell_has_pictures_where_there_is_matplotlib(result, monkeypatch):
    cell = result._repr_html_()
    assert pictures(cell) == BOTH
    assert pictures(NOTHING._repr_html_()) == BOTH[:1]
    assert "Use 5 workers, prefetch 2: " in cell
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert pictures(result._repr_html_()) == []
    assert "\nchosen " in result._repr_html_()


def test_a_row_holds_what_was_measured(result):
    frame, trial = result.to_dataframe().set_index("number"), result.trials[1]
    assert list(frame.index) == [trial.number for trial in result.trials]
    row, measured = frame.loc[1], trial.measurement
    assert (row.num_workers, row.prefetch_factor) == (1, trial.config.prefetch_factor)
    assert row.samples_per_s == measured.samples_per_s.value
    assert row.samples_per_s_low == measured.samples_per_s.low
    assert row.wait_share == measured.wait_share
    assert row.rss_bytes == measured.memory.rss_bytes
    # Beside 0 workers, which have none, prefetch factors stay whole numbers; so do rounds.
    assert (str(frame["prefetch_factor"].dtype), str(frame["round"].dtype)) == ("Int64", "Int64")
    assert frame["round"].dropna().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    late = frame.iloc[-2]
    assert (late.failure_kind, late.failure_phase) == (FULL.kind, FULL.phase)
    assert late.failure_message == FULL.message
    assert late[["samples_per_s", "wait_share"]].isna().all()
    stages = result.to_dataframe("stages")
    assert list(stages.columns) == ["stage", "where", "wall_share", "cpu_share", "wall_s", "cpu_s"]
    told = [(each.stage, each.wall_s) for each in STAGES]
    assert list(zip(stages.stage, stages.wall_s, strict=True)) == told
    # AND without a row columns and types are the same
    for of, full in (("trials", result.to_dataframe()), ("stages", stages)):
        empty = NOTHING.to_dataframe(of)
        assert len(empty) == 0
        assert empty.dtypes.equals(full.dtypes)
