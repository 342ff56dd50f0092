"""What is told of one probe, of a study, and of several side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.errors import StudyError
from autotune.records.inspection import LossKind, ModelSignature
from autotune.records.outcome import Outcome
from autotune.report.study import comparison_sections, outcome_sections, study_sections
from autotune.report.terminal import as_text
from autotune.study.reading import Study
from autotune.techniques import find_techniques
from autotune.units import format_bytes
from tests.report.sample_study import BASELINE, FAILURES, but, measured


def text_of(study: Study, width: int = 80) -> str:
    return as_text(study_sections(study), width)


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_a_study_shows_every_probe_with_what_was_changed_and_why(study: Study) -> None:
    text = text_of(study, 120)
    lines = text[text.index("Probes") : text.index("Failures")].splitlines()
    rows = {
        int(line.split()[0].rstrip("*")): " ".join(line.split())
        for line in lines
        if line.split() and line.split()[0].rstrip("*").isdigit()
    }
    assert len(rows) == len(study.probes)
    assert rows[0] == "0 16 x3 43.5 ±1.4% 1.33 GiB baseline, what you run today"
    assert rows[1] == "1 8 x6 timeout bf16, 4 checkpoint segments, fused proposed by gp"
    assert rows[43] == "43 24 x2 75.2 ±1.4% 1.08 GiB bf16, fused play-off, round 1"


def test_what_other_work_disturbed_is_marked(study: Study) -> None:
    disturbed = next(probe.number for probe in study.probes if probe.disturbed)
    text = text_of(study)
    assert any(line.split()[:1] == [f"{disturbed}*"] for line in text.splitlines())
    assert "* other work disturbed it" in text and f"{disturbed + 1}*" not in text


def test_at_80_columns_a_probe_takes_two_lines_at_most(study: Study) -> None:
    text = text_of(study)
    table = text[text.index("Probes") : text.index("Failures")].splitlines()[2:-2]
    assert len(table) <= 2 * len(study.probes)


def test_a_study_lists_each_cause_of_failure_once(study: Study) -> None:
    text = _flat(text_of(study, 120))
    assert "oom needs 1920 MiB of 1500 MiB: DefaultCPUAllocator: can't allocate memory #33 #34 #39 #40 #42" in text
    assert "timeout no end within 20 s #1" in text and "nonfinite the loss is nan at step 3 #4" in text


def test_a_study_tells_of_trials_without_an_outcome_and_of_what_was_not_searched(study: Study) -> None:
    text = _flat(text_of(study, 120))
    assert "1 running or left running; 1 cut short without an outcome" in text
    assert "channels_last the model has no 2-D convolution" in text


def test_a_study_shows_the_front_once_and_then_the_answer(study: Study) -> None:
    text = text_of(study)
    assert text.count("Memory/throughput front") == 1
    assert text.index("Probes") < text.index("Failures") < text.index("Memory/throughput front") < text.index("Answer")
    assert "Faster: 1.73x" in text


def test_where_the_last_search_found_no_answer_it_is_said_before_an_earlier_one(study: Study) -> None:
    assert "No newer answer" not in text_of(study)
    failed = replace(study, facts=replace(study.facts, no_answer="everything ran out of memory"))
    text = _flat(text_of(failed))
    assert "The last search found none, and this answer is an earlier one's: everything ran out of memory" in text
    assert text.index("No newer answer") < text.index("Faster: 1.73x")


def test_a_study_tells_when_probes_are_newer_than_its_answer(study: Study) -> None:
    assert "came after this answer" not in text_of(study)
    assert study.result is not None
    older = replace(study, result=but(study.result, probes=study.result.probes - 2))
    assert "A search has continued since: 2 probes came after this answer." in text_of(older)


def test_a_study_without_an_answer_says_how_to_go_on(unanswered: Study) -> None:
    text = text_of(unanswered)
    assert "No answer yet" in text and "continues where it stopped" in _flat(text)


def test_a_study_in_which_nothing_is_feasible_says_so(unanswered: Study) -> None:
    nothing = replace(unanswered, probes=tuple(probe for probe in unanswered.probes if not probe.feasible))
    text = text_of(nothing)
    assert "Nothing was feasible so far" in text and "Memory/throughput front" not in text


def test_a_study_without_an_answer_says_what_the_search_said(unanswered: Study) -> None:
    why = "the smallest config needs at least 262 MiB; raise --memory-limit"
    text = _flat(text_of(replace(unanswered, facts=replace(unanswered.facts, no_answer=why))))
    assert f"No answer {why}" in text and "No answer yet" not in text
    with pytest.raises(StudyError, match=f"the study gpt has no answer: {why}"):
        replace(unanswered, facts=replace(unanswered.facts, no_answer=why)).answer()


def test_a_study_without_probes_says_so(empty: Study) -> None:
    assert "No probe has ended yet" in text_of(empty)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_but_the_command_is_wider_than_the_terminal(study: Study, width: int) -> None:
    assert all(len(line) <= width for line in text_of(study, width).splitlines() if "autotune verify" not in line)


def test_text_that_looks_like_markup_is_told_as_it_is(study: Study) -> None:
    assert "[in block.3]" in text_of(study)


def test_answers_stand_in_rows_and_only_what_differs_between_machines_is_told(study: Study) -> None:
    machine = replace(study.facts.fingerprint, device="cuda NVIDIA T4")
    other = replace(study, storage="t4.db", facts=replace(study.facts, fingerprint=machine))
    text = as_text(comparison_sections([study, other]), width=160)
    assert text.count("faster") == 2 and "gpt 2" in text
    differs = text[text.index("What differs") :]
    assert "NVIDIA T4" in differs and "t4.db" in differs and "torch" not in differs.partition("Configs")[0]


def test_what_was_searched_for_and_kept_free_is_told_where_it_differs(study: Study) -> None:
    other = replace(study, name="thrifty", facts=replace(study.facts, objective="energy", headroom=0.2))
    differs = as_text(comparison_sections([study, other]), width=120).partition("What differs")[2]
    rows = [line.split() for line in differs.splitlines()]
    assert ["objective", "throughput", "energy"] in rows and ["headroom", "5%", "20%"] in rows


def test_studies_of_models_of_other_sizes_say_so(study: Study) -> None:
    small, large = (
        ModelSignature(layers=(), num_parameters=number, dtypes=(), loss=LossKind.CROSS_ENTROPY)
        for number in (138_000, 222_000)
    )
    studies = [replace(study, facts=replace(study.facts, signature=one)) for one in (small, large)]
    differs = as_text(comparison_sections(studies), width=120).partition("What differs")[2]
    assert ["parameters", "138,000", "222,000"] in [line.split() for line in differs.splitlines()]


def test_answers_are_compared_by_energy_too_where_one_of_them_knows_it(study: Study) -> None:
    assert study.result is not None
    counted = replace(study, name="counted", result=but(study.result, joules_per_sample=0.52))
    told = as_text(comparison_sections([study, counted]), width=120)
    assert "J/sample" in told and any(line.split()[-1:] == ["0.52"] for line in told.splitlines())
    assert "J/sample" not in as_text(comparison_sections([study, study]), width=120)


def test_a_row_of_figures_is_one_line_in_a_terminal(study: Study) -> None:
    """Else its last figure is cut between number and unit."""
    assert study.result is not None
    peak = f" {format_bytes(study.result.peak_bytes)}"
    told = as_text(comparison_sections([replace(study, name="digits-replay"), study]), width=80)
    rows = [line.rstrip() for line in told.splitlines() if "faster" in line]
    assert len(rows) == 2 and all(row.endswith(peak) for row in rows)


def test_three_studies_with_long_names_are_compared_whole_at_80_columns(study: Study) -> None:
    names = ("gpt-medium on the machine of the lab", "gpt-medium on my own machine", "gpt-medium on the rented machine")
    devices = ("cuda:0 NVIDIA A100-SXM4-80GB", "cuda:0 NVIDIA H200", "cuda:0 NVIDIA GeForce RTX 4090")
    found = [replace(study.facts, fingerprint=replace(study.facts.fingerprint, device=device)) for device in devices]
    studies = [replace(study, name=name, facts=facts) for name, facts in zip(names, found, strict=True)]
    answers, _, differs = as_text(comparison_sections(studies), width=80).partition("What differs")
    assert answers.count("1.08 GiB") == 3
    assert all(word in differs for device in devices for word in device.split())


def test_a_study_without_an_answer_cannot_be_compared(study: Study, unanswered: Study) -> None:
    with pytest.raises(StudyError, match="has no answer yet"):
        list(comparison_sections([study, unanswered]))


def told_of(outcome: Outcome) -> str:
    return " ".join(as_text(outcome_sections(outcome, BASELINE.as_dict(), find_techniques())).split())


def test_a_probe_that_ran_is_told_with_its_interval() -> None:
    assert "outcome ok throughput 43.5 samples/s (95% 42.9 to 44.0)" in told_of(measured(BASELINE))


def test_a_single_block_has_no_interval() -> None:
    found = measured(BASELINE)
    assert found.measurement is not None
    speed = found.measurement.samples_per_s
    single = replace(found.measurement, samples_per_s_low=speed, samples_per_s_high=speed)
    assert "throughput 43.5 samples/s optimizer step" in told_of(replace(found, measurement=single))


def test_a_probe_that_failed_is_told_with_its_cause_and_where_it_was() -> None:
    _, failed = FAILURES[2]
    text = told_of(failed)
    assert "error: RuntimeError: view size is not compatible [in block.3] (during setup)" in text
    assert "In detail model.py, line 12" in text
