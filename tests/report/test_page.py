from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import replace
from datetime import datetime, timezone

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.page import render_html
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.version import __version__


def words(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def pictures(page: str) -> list[str]:
    return re.findall(r'<img alt="(\w+):', page)


def test_the_page_has_table_verdict_advice_configuration_and_pictures_and_loads_nothing(result: TuningResult) -> None:
    page = render_html(result)
    for part in (f"Verdict: {result.verdict.sentence}", "Implement __getitems__", "> chosen   = equally fast"):
        assert words(page).count(part) == 1
    (configuration,) = re.findall(r"\{\n.*\n\}", words(page), flags=re.DOTALL)
    assert json.loads(configuration)["dataloader_kwargs"] == result.best.to_kwargs()
    assert pictures(page) == ["workers", "speedup", "stages", "timeline"]
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(links) == 4
    for link in links:
        assert base64.b64decode(link.removeprefix("data:image/svg+xml;base64,")).startswith(b"<?xml")
    assert "<script" not in page


def test_the_page_names_machine_dataset_date_and_version_and_escapes_what_is_markup(result: TuningResult) -> None:
    machine = Fingerprint(usable_cores=4, memory_bytes=8 << 30, dataset="Photos[1200]")
    hostile = ("</pre><script>alert(1)</script>",)
    page = render_html(replace(result, fingerprint=machine, warnings=hostile, summary=("<img src=x>",)))
    for each in ("4 cores, 8 GiB, no GPU", "Photos[1200]", __version__, datetime.now(timezone.utc).date().isoformat()):
        assert each in words(page)
    assert "<script>" not in page
    assert "<img src=x>" not in page
    assert hostile[0] in html.unescape(page)


def test_what_is_not_there_is_not_shown(result: TuningResult) -> None:
    empty = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    assert "fallback: 0 workers" in words(render_html(empty))
    loaded = replace(TuningResult.from_dict(result.to_dict()), stage_times=())  # traces are not in the file
    assert pictures(render_html(loaded)) == ["workers", "speedup"]


def test_a_notebook_shows_what_was_found_the_table_and_two_pictures(result: TuningResult) -> None:
    page = result._repr_html_()
    assert pictures(page) == ["workers", "stages"]
    assert result.summary[0] in words(page)
    assert "> chosen   = equally fast" in words(page)
