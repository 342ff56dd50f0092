"""Pictures of a study."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune.errors import AutotuneError
from autotune.report.plots import plot_front, plot_throughput
from autotune.study.reading import Study


@pytest.fixture
def plt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def _labels(ax: Any) -> list[str]:
    return list(ax.get_legend_handles_labels()[1])


def test_the_front_is_drawn_with_baseline_answer_and_limit(study: Study, plt: Any) -> None:
    ax = plot_front(study)
    assert set(_labels(ax)) == {"feasible config", "front", "baseline", "answer", "limit less headroom"}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("peak memory (MiB)", "throughput (samples/s)")


def test_the_energy_of_the_front_stands_beside_its_points(
    study: Study, plt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plot_front(study).texts
    known = tuple(replace(one, joules_per_sample=0.52) for one in study.measured_configs())
    monkeypatch.setattr(Study, "measured_configs", lambda self: known)
    assert {text.get_text() for text in plot_front(study).texts} == {" 0.52 J/sample"}


def test_throughput_has_a_line_for_each_combination_and_marks_out_of_memory(study: Study, plt: Any) -> None:
    ax = plot_throughput(study)
    assert {"bf16, fused", "plain training", "bf16, 2 checkpoint segments, fused", "out of memory"} <= set(_labels(ax))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4", "8", "12", "16", "24", "48"]


@pytest.mark.parametrize("plot", [plot_front, plot_throughput])
def test_given_axes_are_drawn_into(study: Study, plt: Any, plot: Any) -> None:
    ax = plt.subplots()[1]
    assert plot(study, ax) is ax


@pytest.mark.parametrize("plot", [plot_front, plot_throughput])
def test_a_study_without_probes_is_an_empty_picture(empty: Study, plt: Any, plot: Any) -> None:
    plot(empty).figure.canvas.draw()


def test_without_matplotlib_the_error_says_what_to_install(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AutotuneError, match="autotune-torch\\[report\\]"):
        plot_front(study)
