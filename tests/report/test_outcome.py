"""What is told of one probe."""

from __future__ import annotations

from dataclasses import replace

from autotune.records.outcome import Outcome
from autotune.report.outcome import outcome_sections
from autotune.report.terminal import as_text
from tests.report.sample_study import BASELINE, FAILURES, measured


def text_of(outcome: Outcome) -> str:
    return " ".join(as_text(outcome_sections(outcome, BASELINE.as_dict())).split())


def test_a_probe_that_ran_is_told_with_its_interval() -> None:
    assert "outcome ok throughput 43.5 samples/s (95% 42.9 to 44.0)" in text_of(measured(BASELINE))


def test_a_single_block_has_no_interval() -> None:
    found = measured(BASELINE)
    assert found.measurement is not None
    speed = found.measurement.samples_per_s
    single = replace(found.measurement, samples_per_s_low=speed, samples_per_s_high=speed)
    assert "throughput 43.5 samples/s optimizer step" in text_of(replace(found, measurement=single))


def test_a_probe_that_failed_is_told_with_its_cause_and_where_it_was() -> None:
    _, failed = FAILURES[2]
    text = text_of(failed)
    assert "error: RuntimeError: view size is not compatible [in block.3] (during setup)" in text
    assert "In detail model.py, line 12" in text
