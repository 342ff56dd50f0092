"""A study as CSV, a line for each probe."""

from __future__ import annotations

from autotune.study.reading import Study


def render(study: Study) -> str:
    """Every probe as a line of CSV with a header: the columns of `autotune.study.frame.probe_frame`."""
    return study.frame().to_csv(index=False)
