"""A study as one page: complete, of itself, and safe to open whatever a model or a log said."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autotune.report.formats.html import render
from autotune.study.reading import Study

pytest.importorskip("plotly")
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """The words outside scripts and styles, the titles, and every address and handler."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.titles, self.tags, self.addresses = "", [""], [""], [""]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1] not in ("script", "style"):
            self.words += data
        if self.tags[-1] == "h2":
            self.titles.append(data.strip())
            self.tags[-1] = ""


def test_the_page_tells_the_verdict_the_config_the_reasons_and_the_machine(study: Study) -> None:
    page = Page(render(study))
    assert "Faster: 1.7" in page.words and "config = {" in page.words and "2.13.0" in page.words
    expected = ["Answer", "Recommended config", "Play-off", "Throughput and memory", "Throughput and batch size"]
    assert page.titles[1:6] == expected
    assert {"Effect of each change", "Run it", "Probes", "Machine and versions"} <= set(page.titles)


def test_the_page_loads_nothing(study: Study) -> None:
    page = render(study)
    assert not any(Page(page).addresses)
    assert not re.search(
        r"""<(script|link|img|iframe)[^>]+(src|href)=""", page.split("<body")[1].split("</script>")[-1]
    )


def test_a_study_without_an_answer_or_a_probe_still_makes_a_page(unanswered: Study, empty: Study) -> None:
    assert "No answer" in Page(render(unanswered)).words
    assert "No probe has ended yet" in Page(render(empty)).words


def test_whatever_a_model_or_a_log_says_is_text(study: Study) -> None:
    assert study.result is not None
    failed = next(probe for probe in study.probes if not probe.outcome.ok)
    said = replace(failed, reason=HOSTILE, outcome=replace(failed.outcome, cause=HOSTILE))
    hostile = replace(
        study,
        name=HOSTILE,
        attributes={**study.attributes, "unsupported": {HOSTILE: HOSTILE}},
        probes=(*study.probes, said),
        result=replace(study.result, warnings=(HOSTILE,)),
    )
    page = render(hostile)
    assert HOSTILE not in page and "<img" not in page.split("<body")[1].partition("<script")[0]
    assert "img" not in Page(page).tags and HOSTILE in Page(page).words
