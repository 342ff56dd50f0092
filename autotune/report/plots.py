"""Pictures of a study, for notebooks and for the HTML page, and the picture of an explanation.

matplotlib is optional: `pip install 'autotune-torch[report]'`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, ConfigError
from autotune.records.config import ACCUMULATION, Choice
from autotune.records.explanation import KINDS, Anatomy, Explanation, fold_repeats
from autotune.records.measured import Measured, pareto_front
from autotune.records.outcome import Kind
from autotune.report.explanation import named
from autotune.report.figures import rate
from autotune.study.reading import Study
from autotune.techniques import Techniques
from autotune.units import MIB, format_bytes, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_GROUPS = 6  # lines in colour; more cannot be told apart
FAR_LIMIT = 3.0  # a limit beyond this multiple of the largest peak is not drawn
GREY, INK = "0.72", "#7b8794"  # INK is seen on white and on black
# Okabe and Ito: told apart without red and green
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
KIND_COLOURS = (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[5], COLOURS[1], GREY)  # in the order of `KINDS`
FORMS = (".png", ".svg", ".pdf")
NUM_BARS = 12
SMALLEST_BAR = 0.005  # modules with a smaller share of the peak have no bar of their own


def plot_front(study: Study, ax: Axes | None = None) -> Axes:
    """Throughput over peak memory: every feasible config with its 95 % interval, the front with its energy, the baseline, the answer.

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
        edge = pareto_front(
            front, lambda m: (m.peak_bytes, m.samples_per_s)
        )  # what is there for its energy may lie below
        ax.step(
            [m.peak_bytes / MIB for m in edge],
            [m.samples_per_s for m in edge],
            where="post",
            color=COLOURS[0],
            zorder=2,
        )
    _errorbars(ax, front, COLOURS[0], "front" if len(front) > 1 else "front: nothing is faster or smaller")
    for found in front:
        if found.joules_per_sample is not None:
            told = f" {rate(found.joules_per_sample)} J/sample"
            ax.annotate(told, (found.peak_bytes / MIB, found.samples_per_s), color=INK, fontsize="x-small", va="top")
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


def why_no_pictures() -> str:
    """Why no picture can be drawn, and what to do about it; empty where pictures can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "matplotlib, which draws the pictures, is not installed; `pip install 'autotune-torch[report]'` adds it"
    return ""


def _require_matplotlib() -> None:
    if reason := why_no_pictures():
        raise AutotuneError(reason)


def pictures(study: Study) -> Iterator[tuple[str, str]]:
    """Titles and SVG elements of all pictures that the study has figures for; none where `why_no_pictures` has a reason.

    Text in them stays text, in a colour that can be read on a white and on a dark page.
    """
    if why_no_pictures():
        return
    if study.measured_configs():
        yield "Throughput and memory", _as_svg(partial(plot_front, study))
        yield "Throughput and batch size", _as_svg(partial(plot_throughput, study))
    if study.result and study.result.reasons.peak_by_kind:
        plot = partial(_plot_parts, study.result.reasons.peak_by_kind, MIB, "MiB, as traced")
        yield "Memory of tensors at the peak, by kind", _as_svg(plot, 2.4)
    if phases_s := _phases(study):
        plot = partial(_plot_parts, phases_s, 1e-3, "milliseconds of one optimizer step")
        yield "Where a step's time goes", _as_svg(plot, 2.4)


def _plot_parts(split: Mapping[str, Mapping[str, float]], unit: float, called: str, ax: Axes) -> None:
    """A bar for each role of `split`, in parts: role -> part -> size. Sizes are drawn in units of `unit`, called `called`."""
    names = dict.fromkeys(name for parts in split.values() for name in parts)
    drawn = {role: {name: size / unit for name, size in parts.items()} for role, parts in split.items()}
    _stack(ax, drawn, dict(zip(names, itertools.cycle(COLOURS), strict=False)))
    ax.set(xlabel=called)
    _finish(ax)
    ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.4), ncols=3)


def _stack(ax: Axes, split: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> list[float]:
    """Draw a bar for each role of `split`, its parts one after the other in their colours. Returns where the bars end."""
    ends = [0.0] * len(split)
    for part, colour in colours.items():
        widths = [parts.get(part, 0.0) for parts in split.values()]
        ax.barh(list(split), widths, left=ends, color=colour, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends


def _as_svg(plot: Callable[[Axes], object], height: float = 4.2) -> str:
    """The SVG element alone, without prologue, title or metadata; dollar signs in a name do not become a formula."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    look: Any = {**ink, "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif"}
    with mpl.rc_context(look):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        plot(axes)
        axes.set_title("")
        drawn = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _phases(study: Study) -> dict[str, dict[str, float]]:
    """Seconds of an optimizer step by phase, for the baseline and the answer; one that was not split is left out."""
    wanted = {"baseline": study.baseline_config, "answer": study.result.config if study.result else {}}
    found: dict[str, dict[str, float]] = {}
    for probe in study.probes:
        for role, config in wanted.items():
            phases_s = probe.outcome.measurement.phases_s if probe.outcome.measurement else {}
            useful = not probe.disturbed or role not in found
            if phases_s and useful and probe.config.as_dict() == config:
                found[role] = phases_s
    return found


def _new_axes() -> Axes:
    _require_matplotlib()
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7.5, 4.8), layout="constrained")[1]


def techniques_of(config: Mapping[str, Choice], techniques: Techniques) -> str:
    """A config's techniques in words, without the batch: what stays the same along a line."""
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
    """Draw each config's throughput with its 95 % interval, over its peak memory or its batch size."""
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


def require_form(path: Path) -> None:
    """Raise ConfigError or AutotuneError where no picture can be written, and do so before minutes of work."""
    if path.suffix not in FORMS:
        raise ConfigError(f"--picture {path}: expected a file that ends in {', '.join(FORMS)}")
    _require_matplotlib()


def draw(explanation: Explanation, memory: Anatomy, techniques: Techniques, path: Path) -> None:
    """Write the picture in the format that the file's suffix names.

    Args:
        memory: the explanation's memory, which must have been traced.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    over_time, by_module = figure.subplots(2, 1, height_ratios=(3, 4))
    figure.suptitle(
        f"{explanation.task}: {techniques.describe(explanation.config)}\n{format_bytes(memory.peak_bytes)} of tensors at the peak"
    )
    _timeline(memory, over_time)
    bars(memory, by_module)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error.strerror}") from None


def _timeline(memory: Anatomy, ax: Any) -> None:
    """Draw the kinds of memory, stacked, over the allocations of a step, and its phases as stripes behind them."""
    moments = memory.timeline
    held = list(zip(*(moment.held_bytes for moment in moments), strict=True))
    ax.stackplot(range(len(moments)), *([b / MIB for b in kind] for kind in held), labels=KINDS, colors=KIND_COLOURS)
    position = 0
    for number, (phase, group) in enumerate(itertools.groupby(moments, key=lambda moment: moment.phase)):
        width = len(list(group))
        ax.axvspan(position, position + width, color="black", alpha=0.06 * (number % 2), linewidth=0)
        if width > len(moments) / 20:
            ax.text(position + width / 2, 1.01, phase, transform=ax.get_xaxis_transform(), ha="center", va="bottom")
        position += width
    peak = max(range(len(moments)), key=lambda place: sum(moments[place].held_bytes))
    ax.annotate(
        f"peak, at {named(memory.module)}",
        (peak, sum(moments[peak].held_bytes) / MIB),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
    )
    ax.set(xlim=(0, len(moments) - 1), xlabel="one training step, allocation by allocation", ylabel="MiB", xticks=[])
    ax.margins(y=0.12)
    ax.figure.legend(loc="outside lower center", ncols=len(KINDS))


def bars(memory: Anatomy, ax: Any) -> Any:
    """Draw a bar, split by kind, for each of the largest modules or runs of equal blocks. Returns the axes."""
    by_name = {module.name: module for module in memory.modules}
    folds = fold_repeats({name: module.total_bytes for name, module in by_name.items()})
    held = {fold.names: sum(by_name[name].total_bytes for name in fold.names) for fold in folds}
    folds.sort(key=lambda fold: -held[fold.names])
    shown = [fold for fold in folds[:NUM_BARS] if held[fold.names] >= SMALLEST_BAR * memory.peak_bytes]
    groups = {named(f.label) if len(f.blocks) == 1 else f"{f.label} ({len(f.blocks)} blocks)": f.names for f in shown}
    if rest := folds[len(shown) :]:
        groups[plural(len(rest), "more module")] = frozenset(name for fold in rest for name in fold.names)
    split = {
        label: {kind: sum(by_name[name].held_bytes.get(kind, 0) for name in names) / MIB for kind in KINDS}
        for label, names in groups.items()
    }
    ends = _stack(ax, split, dict(zip(KINDS, KIND_COLOURS, strict=True)))
    for place, end in enumerate(ends):
        ax.text(end, place, f" {end * MIB / memory.peak_bytes:.0%}", va="center", fontsize="small")
    ax.set(xlabel="MiB at the peak")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * max(ends))
    return ax
