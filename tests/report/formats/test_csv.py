"""A study as CSV."""

from __future__ import annotations

import io

import pandas as pd

from autotune.report.formats.csv import render
from autotune.study.reading import Study


def test_pandas_reads_the_csv_back(study: Study) -> None:
    frame, back = study.frame(), pd.read_csv(io.StringIO(render(study)))
    assert list(back.columns) == list(frame.columns)
    assert list(back["samples_per_s"].round(9).dropna()) == list(frame["samples_per_s"].round(9).dropna())
    assert list(back["outcome"]) == list(frame["outcome"])


def test_the_csv_of_a_study_without_probes_is_its_header(empty: Study) -> None:
    assert render(empty).count("\n") == 1
