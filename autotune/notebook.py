"""How results, studies and predictions look in a notebook: as on the command line."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Tell IPython, where one is running, how each of these is shown. Their modules are imported only when one is shown."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    for room, name in (
        ("autotune.records.result", "Result"),
        ("autotune.study.reading", "Study"),
        ("autotune.records.capacity", "MemoryPrediction"),
    ):
        html.for_type_by_name(room, name, _as_html)


def _as_html(what: Any) -> str:
    from autotune.records.result import Result
    from autotune.report.answer import answer_sections
    from autotune.report.capacity import prediction_sections
    from autotune.report.html import fragment
    from autotune.report.study import study_sections
    from autotune.study.reading import Study
    from autotune.techniques import find_techniques

    if isinstance(what, Result):
        return fragment(answer_sections(what, find_techniques(), model=what.subject.model))
    if isinstance(what, Study):
        return fragment(study_sections(what, model=what.facts.model))
    return fragment(prediction_sections(what, find_techniques()))
