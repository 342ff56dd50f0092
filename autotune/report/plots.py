"""Pictures of a study, for notebooks and for a page. matplotlib is optional: `pip install 'autotune-torch[report]'`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError
from autotune.records.config import ACCUMULATION, Choice
from autotune.records.measured import Measured
from autotune.records.outcome import Kind
from autotune.study.reading import Study
from autotune.techniques import Techniques
from autotune.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_GROUPS = 6  # lines in colour; more cannot be told apart
FAR_LIMIT = 3.0  # times the largest peak
GREY, INK = "0.72", "#7b8794"  # INK is seen on white and on black
# Okabe and Ito: told apart without red and green
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_front(study: Study, ax: Axes | None = None) -> Axes:
    """Throughput over peak memory: every feasible config with its 95 % interval, the front, the baseline, the answer.

    Args:
        ax: where to draw; None makes a figure.

    Raises:
        AutotuneError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    measured, front = study.measured_configs(), study.front_configs()
    answer = study.result.config if study.result else None
    baseline = [m for m in measured if m.config == study.baseline_config]
    _errorbars(ax, measured, GREY, "feasible config")
    if front:
        peaks, speeds = [m.peak_bytes / MIB for m in front], [m.samples_per_s for m in front]
        ax.step(peaks, speeds, where="post", color=COLOURS[0], zorder=2)
    _errorbars(ax, front, COLOURS[0], "front" if len(front) > 1 else "front: nothing is faster or smaller")
    _errorbars(ax, baseline, INK, "baseline", marker="s", size=8)
    _errorbars(ax, [m for m in measured if m.config == answer], COLOURS[1], "answer", marker="*", size=15)
    if study.memory_limit_bytes:
        usable = study.memory_limit_bytes * (1 - study.headroom) / MIB
        largest = max((m.peak_bytes / MIB for m in measured), default=usable)
        if usable <= FAR_LIMIT * largest:  # a limit far away would press everything to the left edge
            ax.axvline(usable, color=INK, linestyle="--", linewidth=1, label="limit less headroom")
        else:
            ax.plot([], [], " ", label=f"limit less headroom: {usable:,.0f} MiB")
    ax.set(xlabel="peak memory (MiB)", ylabel="throughput (samples/s)", title=f"{study.name}: memory and throughput")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    _finish(ax)
    return ax


def plot_throughput(study: Study, ax: Axes | None = None) -> Axes:
    """Throughput over micro batch size, a line for each combination of the other techniques, the fastest in colour.

    A cross on the lower edge marks a batch size at which a combination ran out of memory.

    Args:
        ax: where to draw; None makes a figure.

    Raises:
        AutotuneError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    lines: dict[str, list[Measured]] = {}
    for measured in study.measured_configs():
        lines.setdefault(techniques_of(measured.config, study.techniques), []).append(measured)

    def rank(group: str) -> tuple[bool, float]:
        return len(lines[group]) > 1, max(m.samples_per_s for m in lines[group])

    ranked = sorted(lines, key=rank, reverse=True)
    colours = dict(zip(ranked, COLOURS[:NUM_GROUPS], strict=False))
    for group in ranked:
        points = sorted(lines[group], key=lambda m: int(m.config["batch_size"]))
        sizes, colour = [int(m.config["batch_size"]) for m in points], colours.get(group, GREY)
        ax.plot(sizes, [m.samples_per_s for m in points], color=colour, zorder=2 if group in colours else 1)
        is_first_other = len(ranked) > NUM_GROUPS and group == ranked[NUM_GROUPS]
        label = group if group in colours else "others" if is_first_other else ""
        _errorbars(ax, points, colour, label, over_batch=True)
    failed = {
        (techniques_of(p.config, study.techniques), int(p.config["batch_size"]))
        for p in study.probes
        if p.outcome.kind is Kind.OOM
    }
    _mark_out_of_memory(ax, failed, colours)
    sizes = sorted({int(probe.config["batch_size"]) for probe in study.probes})
    if sizes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, labels=[str(size) for size in sizes])
        ax.minorticks_off()
    title = f"{study.name}: throughput and batch size"
    ax.set(xlabel="batch size (samples per micro step)", ylabel="throughput (samples/s)", title=title)
    ax.set_ylim(bottom=0)
    _finish(ax)
    return ax


def plot_parts(split: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """A bar for each of `split`, in parts: role -> part -> size.

    Args:
        ax: where to draw; None makes a figure.

    Raises:
        AutotuneError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    starts = dict.fromkeys(split, 0.0)
    for place, name in enumerate(dict.fromkeys(name for parts in split.values() for name in parts)):
        widths = [parts.get(name, 0.0) for parts in split.values()]
        ax.barh(list(split), widths, left=list(starts.values()), color=COLOURS[place % len(COLOURS)], label=name)
        starts = {role: start + width for (role, start), width in zip(starts.items(), widths, strict=True)}
    ax.set(xlabel=unit)
    _finish(ax)
    ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.4), ncols=3)
    return ax


def why_no_pictures() -> str:
    """Why none can be drawn, and what to do about it; empty where they can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "matplotlib, which draws the pictures, is not installed; `pip install 'autotune-torch[report]'` adds it"
    return ""


def pictures(study: Study) -> Iterator[tuple[str, str]]:
    """Titles and SVG elements of whatever the study has figures for; none where `why_no_pictures` has a reason.

    Text in them is text, in the colours of the page's own on white and on black.
    """
    if why_no_pictures():
        return
    if study.measured_configs():
        yield "Throughput and memory", _as_svg(partial(plot_front, study))
        yield "Throughput and batch size", _as_svg(partial(plot_throughput, study))
    if study.result and study.result.reasons.peak_by_kind:
        held = {role: _scaled(kinds, 1 / MIB) for role, kinds in study.result.reasons.peak_by_kind.items()}
        yield "Memory of tensors at the peak, by kind", _as_svg(partial(plot_parts, held, "MiB, as traced"), 2.4)
    if phases := _phases(study):
        split = {role: _scaled(phases_s, 1e3) for role, phases_s in phases.items()}
        unit = "milliseconds of one optimizer step"
        yield "Where a step's time goes", _as_svg(partial(plot_parts, split, unit), 2.4)


def _as_svg(plot: Callable[[Axes], Axes], height: float = 4.2) -> str:
    """The element alone: without a prologue, a title, an address, or a formula made of somebody's dollar signs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    look: Any = {**ink, "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif"}
    with mpl.rc_context(look):
        figure = Figure(figsize=(9, height), layout="constrained")
        plot(figure.subplots()).set_title("")
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


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


def _new_axes() -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise AutotuneError(
            "plots need matplotlib, which is not installed; `pip install 'autotune-torch[report]'` adds it"
        ) from None
    return plt.subplots(figsize=(7.5, 4.8), layout="constrained")[1]


def techniques_of(config: Mapping[str, Choice], techniques: Techniques) -> str:
    """The techniques, without the batch: they stay the same along a line."""
    return ", ".join(techniques.describe({**config, ACCUMULATION: 1}).split(", ")[1:]) or "plain training"


def _errorbars(
    ax: Axes,
    found: Sequence[Measured],
    color: str,
    label: str,
    *,
    marker: str = "o",
    size: float = 5,
    over_batch: bool = False,
) -> None:
    """Each config at its throughput with the 95 % interval, over its peak memory or its batch size."""
    if not found:
        return
    xs = [int(m.config["batch_size"]) if over_batch else m.peak_bytes / MIB for m in found]
    speeds = [m.samples_per_s for m in found]
    errors = [[abs(m.samples_per_s - m.samples_per_s_ci[side]) for m in found] for side in (0, 1)]
    look: dict[str, Any] = {"fmt": marker, "markersize": size, "color": color, "elinewidth": 1, "capsize": 2}
    ax.errorbar(xs, speeds, yerr=errors, label=label or None, zorder=1 if color == GREY else 3, **look)


def _mark_out_of_memory(ax: Axes, failed: set[tuple[str, int]], colours: dict[str, str]) -> None:
    """Crosses on the lower edge, in rows, so that those of one batch size do not hide each other."""
    if failed:
        ax.plot([], [], "x", color="0.3", label="out of memory")
    row: dict[int, int] = {}
    edge = ax.get_xaxis_transform()  # x in data, y from 0 at the lower edge to 1
    for group, size in sorted(failed, key=lambda item: (item[0] not in colours, item)):
        row[size] = row.get(size, -1) + 1
        ax.plot([size], [0.03 + 0.035 * row[size]], "x", color=colours.get(group, GREY), transform=edge, zorder=3)


def _finish(ax: Axes) -> None:
    ax.grid(True, color=GREY, alpha=0.35, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize="small")
