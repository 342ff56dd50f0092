"""How results, studies and predictions look in a notebook: as on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def register() -> None:
    """Tell IPython, where one is running, how each is shown. Nothing is imported before one of them is."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    for room, name, sections in (
        ("autotune.records.result", "Result", _of_result),
        ("autotune.study.reading", "Study", _of_study),
        ("autotune.records.capacity", "MemoryPrediction", _of_prediction),
    ):
        html.for_type_by_name(room, name, _shown(sections))


def _shown(sections: Callable[[Any], Iterable[Any]]) -> Callable[[Any], str]:
    def show(what: Any) -> str:
        from autotune.report.html import fragment

        return fragment(sections(what))

    return show


def _of_result(result: Any) -> Iterable[Any]:
    from autotune.report.answer import answer_sections
    from autotune.techniques import find_techniques

    return answer_sections(result, find_techniques(), model=result.subject.model)


def _of_study(study: Any) -> Iterable[Any]:
    from autotune.report.study import study_sections

    return study_sections(study, model=study.facts.model)


def _of_prediction(prediction: Any) -> Iterable[Any]:
    from autotune.report.capacity import prediction_sections
    from autotune.techniques import find_techniques

    return prediction_sections(prediction, find_techniques())
