"""Interactive pictures of a study for a page, drawn by plotly: `pip install 'autotune-torch[report]'`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from autotune.records.batch_plan import BATCH_SIZE
from autotune.records.result import Measured
from autotune.report.figures import measured_rate
from autotune.report.plots import COLOURS, FAR_LIMIT, techniques_of
from autotune.study.reading import Study
from autotune.techniques.labels import describe
from autotune.units import MIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

GREY, INK = "#9aa4af", "#7b8794"  # seen on white and on black


def why_no_pictures() -> str:
    """Why none can be drawn, and what to do about it; empty where they can."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        return "plotly, which draws the pictures, is not installed; `pip install 'autotune-torch[report]'` adds it"
    return ""


def pictures(study: Study) -> Iterator[tuple[str, Figure]]:
    """Titles and pictures of whatever the study has figures for; none where `why_no_pictures` has a reason."""
    if why_no_pictures():
        return
    import plotly.graph_objects as go

    if measured := study.measured_configs():
        yield "Throughput and memory", _front(go, study, measured)
        yield "Throughput and batch size", _throughput(go, measured)
    if study.result and study.result.peak_by_kind:
        held = {role: _scaled(kinds, 1 / MIB) for role, kinds in study.result.peak_by_kind.items()}
        yield "Memory of tensors at the peak, by kind", _stacked(go, held, "MiB, as traced")
    if phases := _phases(study):
        split = {role: _scaled(phases_s, 1e3) for role, phases_s in phases.items()}
        yield "Where a step's time goes", _stacked(go, split, "milliseconds of one optimizer step")


def _front(go: Any, study: Study, measured: Sequence[Measured]) -> Figure:
    front, answer = study.front_configs(), study.result.config if study.result else None
    figure = go.Figure()
    figure.add_trace(_points(go, [m for m in measured if m not in front], "feasible config", GREY))
    figure.add_trace(_points(go, front, "front", COLOURS[0], mode="lines+markers", line={"shape": "hv"}))
    figure.add_trace(
        _points(go, [m for m in measured if m.config == study.baseline_config], "baseline", INK, "square", 11)
    )
    figure.add_trace(_points(go, [m for m in measured if m.config == answer], "answer", COLOURS[1], "star", 16))
    usable_mib = study.memory_limit_bytes * (1 - study.headroom) / MIB
    if 0 < usable_mib <= FAR_LIMIT * max(m.peak_bytes / MIB for m in measured):
        figure.add_vline(usable_mib, line_dash="dash", line_color=INK, annotation_text="limit less headroom")
    return _finish(figure, "peak memory (MiB)", "throughput (samples/s)")


def _throughput(go: Any, measured: Sequence[Measured]) -> Figure:
    """A line for each combination of techniques, the fastest in colour; the others are one entry of the legend."""
    lines: dict[str, list[Measured]] = {}
    for one in measured:
        lines.setdefault(techniques_of(one.config), []).append(one)
    ranked = sorted(lines, key=lambda group: -max(m.samples_per_s for m in lines[group]))
    figure = go.Figure()
    for place, group in enumerate(ranked):
        points = sorted(lines[group], key=lambda m: int(m.config[BATCH_SIZE]))
        if place < len(COLOURS):
            trace = _points(go, points, group, COLOURS[place], mode="lines+markers")
        else:
            trace = _points(go, points, "others", GREY, mode="lines+markers")
            trace.update(legendgroup="others", showlegend=place == len(COLOURS))
        figure.add_trace(trace.update(x=[int(m.config[BATCH_SIZE]) for m in points]))
    sizes = sorted({int(m.config[BATCH_SIZE]) for m in measured})
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=sizes)
    return _finish(figure, "batch size (samples per micro step)", "throughput (samples/s)")


def _phases(study: Study) -> dict[str, dict[str, float]]:
    """Seconds of an optimizer step by phase, for the baseline and the answer; what was not split is left out."""
    wanted = {"baseline": study.baseline_config, "answer": study.result.config if study.result else {}}
    found: dict[str, dict[str, float]] = {}
    for probe in study.probes:
        for role, config in wanted.items():
            phases_s = probe.outcome.measurement.phases_s if probe.outcome.measurement else {}
            useful = not probe.disturbed or role not in found
            if phases_s and useful and probe.config.as_dict() == config:
                found[role] = phases_s
    return found


def _scaled(parts: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in parts.items()}


def _stacked(go: Any, split: dict[str, dict[str, float]], unit: str) -> Figure:
    """A bar for each role, in parts."""
    figure = go.Figure()
    for place, name in enumerate(dict.fromkeys(name for parts in split.values() for name in parts)):
        sizes = [parts.get(name, 0.0) for parts in split.values()]
        colour = COLOURS[place % len(COLOURS)]
        figure.add_bar(y=list(split), x=sizes, name=name, orientation="h", marker_color=colour)
    _finish(figure, unit, "")
    return figure.update_layout(barmode="stack", height=240, legend={"y": -0.6, "traceorder": "normal"})


def _points(
    go: Any, found: Sequence[Measured], name: str, colour: str, symbol: str = "circle", size: int = 8, **look: Any
) -> Any:
    """Configs with their 95 % intervals; what they are is told where one points at them."""
    low, high = [[m.samples_per_s_ci[side] for m in found] for side in (0, 1)]
    speeds = [m.samples_per_s for m in found]
    figures = [f"{measured_rate(m)} samples/s, {format_bytes(m.peak_bytes)}" for m in found]
    return go.Scatter(
        x=[m.peak_bytes / MIB for m in found],
        y=speeds,
        error_y={
            "array": [h - s for h, s in zip(high, speeds, strict=True)],
            "arrayminus": [s - lowest for lowest, s in zip(low, speeds, strict=True)],
            "thickness": 1,
        },
        name=escape(name),
        text=[f"{escape(describe(m.config))}<br>{told}" for m, told in zip(found, figures, strict=True)],
        hoverinfo="text",
        marker={"color": colour, "symbol": symbol, "size": size},
        visible=True if found else "legendonly",
        **{"mode": "markers", **look},
    )


def _finish(figure: Figure, x: str, y: str) -> Figure:
    axis = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.5)", "rangemode": "tozero"}
    axis |= {"ticks": "outside", "tickcolor": "rgba(0,0,0,0)"}  # room between labels and axis
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 13},
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
        legend={"orientation": "h", "y": -0.25, "traceorder": "normal"},
        xaxis={**axis, "title": x},
        yaxis={**axis, "title": y},
    )
    return figure
