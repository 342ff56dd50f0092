"""Pictures of a study. matplotlib is optional: `pip install 'autotune-torch[notebook]'`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError
from autotune.records.batch_plan import ACCUMULATION
from autotune.records.outcome import Kind
from autotune.records.result import Measured
from autotune.study.reading import Study
from autotune.techniques.labels import AnyConfig, as_dict, describe
from autotune.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_GROUPS = 6  # lines in colour; more cannot be told apart
FAR_LIMIT = 3.0  # times the largest peak
GREY = "0.72"
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
    _errorbars(ax, baseline, "black", "baseline", marker="s", size=8)
    _errorbars(ax, [m for m in measured if m.config == answer], COLOURS[1], "answer", marker="*", size=15)
    if study.memory_limit_bytes:
        usable = study.memory_limit_bytes * (1 - study.headroom) / MIB
        largest = max((m.peak_bytes / MIB for m in measured), default=usable)
        if usable <= FAR_LIMIT * largest:  # a limit far away would press everything to the left edge
            ax.axvline(usable, color="0.4", linestyle="--", linewidth=1, label="limit less headroom")
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
        lines.setdefault(techniques_of(measured.config), []).append(measured)

    def rank(group: str) -> tuple[bool, float]:
        return len(lines[group]) > 1, max(m.samples_per_s for m in lines[group])

    ranked = sorted(lines, key=rank, reverse=True)
    colours = dict(zip(ranked, COLOURS[:NUM_GROUPS], strict=False))
    for group in ranked:
        points = sorted(lines[group], key=lambda m: int(m.config["batch_size"]))
        sizes, colour = [int(m.config["batch_size"]) for m in points], colours.get(group, GREY)
        ax.plot(sizes, [m.samples_per_s for m in points], color=colour, zorder=2 if group in colours else 1)
        _errorbars(ax, points, colour, group if group in colours else "", over_batch=True)
    failed = {
        (techniques_of(p.config), int(p.config["batch_size"])) for p in study.probes if p.outcome.kind is Kind.OOM
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


def _new_axes() -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise AutotuneError(
            "plots need matplotlib, which is not installed; `pip install 'autotune-torch[notebook]'` adds it"
        ) from None
    return plt.subplots(figsize=(7.5, 4.8), layout="constrained")[1]


def techniques_of(config: AnyConfig) -> str:
    """The techniques, without the batch: they stay the same along a line."""
    return ", ".join(describe({**as_dict(config), ACCUMULATION: 1}).split(", ")[1:]) or "plain training"


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
    ax.grid(True, color="0.92", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize="small")
