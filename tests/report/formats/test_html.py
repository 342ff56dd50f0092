"""A study as one page: complete, of itself, and safe to open whatever a model or a log said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from autotune import notebook
from autotune.records.config import Config
from autotune.records.measured import Dropped
from autotune.records.result import Ranking
from autotune.records.study import Fingerprint
from autotune.report import plots
from autotune.report.formats.html import render
from autotune.report.html import STYLE
from autotune.study.reading import Study
from tests.report.sample_study import but

pytest.importorskip("matplotlib")
HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


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
    assert {"Memory of tensors at the peak, by kind", "Where a step's time goes"} <= set(page.titles)
    assert {"Effect of each change", "Run it", "Probes", "Machine and versions"} <= set(page.titles)


def test_that_the_last_search_found_no_answer_stands_first_on_the_page(study: Study) -> None:
    failed = replace(study, facts=replace(study.facts, no_answer="everything ran out of memory"))
    assert Page(render(failed)).titles[1:3] == ["No newer answer", "Answer"]


def test_the_page_says_what_was_searched_for(study: Study) -> None:
    assert "gpt: how to train it fastest" in Page(render(study)).words
    thrifty = Page(render(replace(study, facts=replace(study.facts, objective="energy"))))
    assert "gpt: how to train it with the least energy" in thrifty.words and "fastest" not in thrifty.words[:600]


def test_the_page_loads_nothing(study: Study) -> None:
    page = render(study)
    assert not any(Page(page).addresses)
    assert not re.search(
        r"""<(script|link|img|iframe)[^>]+(src|href)=""", page.split("<body")[1].split("</script>")[-1]
    )


def test_a_study_without_an_answer_or_a_probe_still_makes_a_page(unanswered: Study, empty: Study) -> None:
    assert "No answer" in Page(render(unanswered)).words
    assert "No probe has ended yet" in Page(render(empty)).words


def test_lines_that_look_alike_are_one_entry_of_the_legend(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "NUM_GROUPS", 2)
    drawn = dict(plots.pictures(study))["Throughput and batch size"]
    assert drawn.count(">others<") == 1 and drawn.count("Throughput and batch size") == 0


def test_in_a_notebook_words_stand_on_the_left_and_code_in_its_own_font() -> None:
    """Jupyter sets every cell to the right, by a rule with the weight of two classes and an element."""
    (rule,) = [line for line in STYLE.splitlines() if "text-align: left" in line]
    selector = rule.partition("{")[0]
    assert len(re.findall(r"\.[a-z]", selector)) == 2 and "td" in selector and "th" in selector
    assert "font-family: ui-monospace, monospace" in STYLE


def hostile(study: Study) -> Study:
    """The study where every text that a user, a model, a log or another package's technique gives is HTML."""

    def choosing(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, HOSTILE: HOSTILE}

    assert study.result is not None and study.result.baseline is not None
    probes = []
    for probe in study.probes:
        outcome = probe.outcome
        if not outcome.ok:
            outcome = replace(outcome, cause=HOSTILE, detail=HOSTILE, log=HOSTILE)
        config = Config(tuple(choosing(probe.config.as_dict()).items()))
        probes.append(replace(probe, config=config, reason=HOSTILE, outcome=outcome))
    (check,), (finalist, *_) = study.result.checks, study.result.finalists
    result = but(
        study.result,
        config=choosing(study.result.config),
        baseline=replace(study.result.baseline, config=choosing(study.result.baseline.config)),
        finalists=(Dropped(**{**vars(finalist), "config": choosing(finalist.config)}, dropped=HOSTILE),),
        front=tuple(replace(one, config=choosing(one.config)) for one in study.result.front),
        effects=tuple(replace(effect, technique=HOSTILE, choice=HOSTILE) for effect in study.result.effects),
        checks=(replace(check, technique=HOSTILE, reason=HOSTILE, passed=False),),
        limit=HOSTILE,
        study=HOSTILE,
        device=HOSTILE,
        asked={"device": HOSTILE},
        warnings=(HOSTILE,),
        rankings=(Ranking(choice={"variant": HOSTILE}, study=HOSTILE, failure=HOSTILE),),
    )
    facts = replace(
        study.facts,
        model=f"{HOSTILE}.py",
        task=HOSTILE,
        no_answer=HOSTILE,
        unsupported={HOSTILE: HOSTILE},
        baseline_config=choosing(study.baseline_config),
        fingerprint=Fingerprint(device=HOSTILE, environment={HOSTILE: HOSTILE}),
    )
    return replace(study, name=HOSTILE, facts=facts, probes=tuple(probes), result=result)


def require_text(page: str) -> None:
    """Nothing in a page is markup that somebody else wrote: each tag and address is ours."""
    assert HOSTILE in Page(page).words
    assert "onerror=alert(1)>" not in page and not any(Page(page).addresses)
    assert not {"img", "script", "iframe"} & set(Page(page).tags)


def test_whatever_a_model_or_a_log_says_is_text(study: Study) -> None:
    require_text(render(hostile(study)))
    require_text(render(replace(hostile(study), result=None)))


def test_it_is_text_in_a_notebook_too(study: Study) -> None:
    told = hostile(study)
    for what in (told, told.result):
        require_text(notebook._as_html(what))


def test_arrows_lines_of_code_and_wide_tables_stay_readable_on_a_narrow_screen(study: Study) -> None:
    page = render(study)
    assert 'fp32 <span class="whole">-&gt;</span> bf16' in page and "white-space: pre-wrap" in page
    assert '<table class="deep" style="--columns: 5"><tr><th class="number">#</th>' in page


def test_the_time_of_a_step_is_that_of_a_probe_that_nothing_disturbed(study: Study) -> None:
    assert study.result is not None
    usual = next(p for p in study.probes if p.config.as_dict() == study.result.config and p.outcome.measurement)
    assert usual.outcome.measurement is not None
    odd = replace(usual.outcome.measurement, phases_s={"waiting for others": 1.0})
    disturbed = replace(usual, outcome=replace(usual.outcome, measurement=odd), disturbed=True)
    assert "waiting for others" not in render(replace(study, probes=(*study.probes, disturbed)))
