from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest
from report.example import synthetic_result

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


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return synthetic_result()


@pytest.fixture(scope="module")
def page(result: TuningResult) -> Reader:
    return read(render_html(result))


def test_loads_nothing_from_elsewhere_and_runs_nothing(page: Reader) -> None:
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "script" not in {tag for tag, _ in page.tags}


def test_every_picture_is_there_with_a_text_for_those_who_do_not_see_it(page: Reader) -> None:
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 4
    assert all(picture["alt"] for picture in pictures)
    assert base64.b64decode(pictures[0]["src"].split(",", 1)[1]).startswith(b"<?xml")


def test_shows_table_verdict_advice_and_configuration(page: Reader, result: TuningResult) -> None:
    text = "".join(page.blocks)
    assert "Verdict: Decoding binds" in text
    assert "Implement __getitems__" in text
    assert "> chosen   = equally fast" in text
    found = json.loads(re.search(r"\{\n.*\n\}", text, flags=re.S)[0])
    assert found["dataloader_kwargs"] == result.best.to_kwargs()


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


def test_a_run_in_which_nothing_worked_has_a_page_too() -> None:
    empty = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    text = "".join(read(render_html(empty)).blocks)
    assert "fallback: 0 workers" in text


def test_what_is_not_there_has_no_picture(result: TuningResult) -> None:
    # GIVEN a result from its file, without stages
    reader = read(render_html(replace(TuningResult.from_dict(result.to_dict()), stage_times=())))
    assert [attrs["alt"].partition(":")[0] for tag, attrs in reader.tags if tag == "img"] == ["workers", "speedup"]


def test_a_notebook_shows_what_was_found_the_table_and_two_pictures(result: TuningResult) -> None:
    reader = read(result._repr_html_())
    assert [attrs["alt"].partition(":")[0] for tag, attrs in reader.tags if tag == "img"] == ["workers", "stages"]
    assert result.summary[0] in "".join(reader.blocks)
    assert "> chosen   = equally fast" in "".join(reader.blocks)
