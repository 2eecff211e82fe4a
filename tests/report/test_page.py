"""The page and the notebook's cell: one file, which nothing in a result can break out of."""

from __future__ import annotations

import base64
import json
import re
import sys

from autotune_loader.report.page import page_of
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig

BOTH = ["Samples per second over workers", "Where a sample's time goes in a worker"]


def pictures(page):
    """What each picture is said to show."""
    found = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', page)
    assert all(base64.b64decode(data).startswith(b"<?xml") for _, data in found)
    return [what for what, _ in found]


def test_a_page_holds_the_report_the_pictures_and_the_arguments_and_escapes_what_it_quotes(result, tmp_path):
    result.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert pictures(page) == BOTH
    assert "order &lt;was&gt; not shuffled &amp; read twice" in page
    assert "2026-11-26, photos.Photos[1200], 4 cores, 16 GiB, no GPU, torch 2.6.0" in page
    arguments = page.rpartition("<pre>")[2].partition("</pre>")[0].replace("&quot;", '"')
    assert json.loads(arguments) == result.best.to_kwargs()
    # AND nothing is fetched from anywhere, and no script could be run
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_page_of_nothing_and_of_a_loaded_result_can_be_made(result):
    assert pictures(page_of(TuningResult(best=LoaderConfig(), status="fallback"))) == BOTH[:1]
    assert pictures(page_of(TuningResult.from_dict(result.to_dict()))) == BOTH


def test_a_cell_has_the_choice_the_table_and_pictures_and_without_matplotlib_the_text(result, monkeypatch):
    cell = result._repr_html_()
    assert pictures(cell) == BOTH
    assert "Use 5 workers, prefetch 2: " in cell
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert pictures(result._repr_html_()) == []
    assert "&gt; chosen  = as fast" in result._repr_html_()
