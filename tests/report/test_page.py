from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.report.page import render_html
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.version import __version__

VOID = {"meta", "img", "link", "br"}


class Reader(HTMLParser):
    """Collects text and attributes, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.blocks.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def pictures(page: Reader) -> list[str]:
    return [attrs["alt"].partition(":")[0] for tag, attrs in page.tags if tag == "img"]


def test_the_page_has_table_verdict_advice_configuration_and_pictures_and_loads_nothing(result: TuningResult) -> None:
    page = read(render_html(result))
    text = "".join(page.blocks)
    assert "Verdict: Decoding binds" in text
    assert "Implement __getitems__" in text
    assert "> chosen   = equally fast" in text
    found = json.loads(re.search(r"\{\n.*\n\}", text, flags=re.S)[0])
    assert found["dataloader_kwargs"] == result.best.to_kwargs()
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert len(pictures(page)) == len(links) == 4
    for link in links:
        assert base64.b64decode(link.removeprefix("data:image/svg+xml;base64,")).startswith(b"<?xml")
    assert "script" not in {tag for tag, _ in page.tags}


def test_the_page_names_machine_dataset_date_and_version_says_nothing_twice_and_escapes(result: TuningResult) -> None:
    # GIVEN a run whose texts are markup
    machine = Fingerprint(usable_cores=4, memory_bytes=8 << 30, dataset="Photos[1200]")
    hostile = ("</pre><script>alert(1)</script>",)
    page = render_html(replace(result, fingerprint=machine, warnings=hostile, summary=("<img src=x>",)))
    text = "".join(read(page).blocks)
    for each in ("4 cores, 8 GiB, no GPU", "Photos[1200]", __version__, datetime.now(timezone.utc).date().isoformat()):
        assert each in text
    assert text.count(result.verdict.sentence) == 1
    assert "<script>" not in page
    assert "<img src=x>" not in page
    assert "alert(1)" in text


def test_what_is_not_there_is_not_shown(result: TuningResult) -> None:
    empty = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    assert "fallback: 0 workers" in "".join(read(render_html(empty)).blocks)
    loaded = replace(TuningResult.from_dict(result.to_dict()), stage_times=())  # traces are not in the file
    assert pictures(read(render_html(loaded))) == ["workers", "speedup"]


def test_a_notebook_shows_what_was_found_the_table_and_two_pictures(result: TuningResult) -> None:
    page = read(result._repr_html_())
    assert pictures(page) == ["workers", "stages"]
    assert result.summary[0] in "".join(page.blocks)
    assert "> chosen   = equally fast" in "".join(page.blocks)
