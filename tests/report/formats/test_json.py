"""A study as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from autotune.records.outcome import Outcome
from autotune.report.formats.json import render
from autotune.report.sections import document
from autotune.study.reading import Study


def test_the_json_is_one_document_with_everything(study: Study) -> None:
    data = json.loads(render(study))
    assert (data["study"], data["task"], data["memory_limit_bytes"]) == ("gpt", "gpt", study.memory_limit_bytes)
    assert (len(data["probes"]), data["num_running"], data["num_lost"]) == (len(study.probes), 1, 1)
    assert study.result is not None and data["result"]["config"] == study.result.config
    assert data["front"][-1]["config"] == study.result.config


def test_a_probe_of_the_json_can_be_read_back(study: Study) -> None:
    data = json.loads(render(study))
    assert [Outcome.from_dict(probe["outcome"]) for probe in data["probes"]] == [
        probe.outcome for probe in study.probes
    ]


def test_a_study_without_an_answer_has_a_null_one(empty: Study) -> None:
    data = json.loads(render(empty))
    assert (data["result"], data["probes"], data["front"]) == (None, [], [])


def test_what_json_has_no_word_for_becomes_null(study: Study) -> None:
    assert study.result is not None
    endless = replace(study, result=replace(study.result, speedup_ci=(0.0, math.inf), samples_per_s=math.nan))
    data = json.loads(render(endless), parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
    assert data["result"]["speedup_ci"] == [0.0, None] and data["result"]["samples_per_s"] is None


def test_a_document_keeps_letters_as_they_are() -> None:
    assert json.loads(document({"task": "größer"})) == {"task": "größer"}
