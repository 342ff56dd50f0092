"""A study as CSV, for other programs."""

from __future__ import annotations

from autotune.study.reading import Study


def study_csv(study: Study) -> str:
    """Every probe as a line of CSV with a header: the columns of `autotune.study.frame.probe_frame`."""
    return study.frame().to_csv(index=False)
