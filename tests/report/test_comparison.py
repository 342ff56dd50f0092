"""Several answers side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.errors import StudyError
from autotune.report.comparison import comparison_sections
from autotune.report.terminal import as_text
from autotune.study.reading import Study
from autotune.units import format_bytes


def test_answers_stand_in_rows_and_only_what_differs_between_machines_is_told(study: Study) -> None:
    machine = replace(study.facts.fingerprint, device="cuda NVIDIA T4")
    other = replace(study, storage="t4.db", facts=replace(study.facts, fingerprint=machine))
    text = as_text(comparison_sections([study, other]), width=160)
    assert text.count("faster") == 2 and "gpt 2" in text
    differs = text[text.index("What differs") :]
    assert "NVIDIA T4" in differs and "t4.db" in differs and "torch" not in differs.partition("Configs")[0]


def test_a_row_of_figures_is_one_line_in_a_terminal(study: Study) -> None:
    """Else its last figure is cut between number and unit."""
    assert study.result is not None
    peak = f" {format_bytes(study.result.peak_bytes)}"
    told = as_text(comparison_sections([replace(study, name="digits-replay"), study]), width=80)
    rows = [line.rstrip() for line in told.splitlines() if "faster" in line]
    assert len(rows) == 2 and all(row.endswith(peak) for row in rows)


def test_a_study_without_an_answer_cannot_be_compared(study: Study, unanswered: Study) -> None:
    with pytest.raises(StudyError, match="has no answer yet"):
        list(comparison_sections([study, unanswered]))
