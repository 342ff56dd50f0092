"""The picture of an explanation: living storages over one training step by kind, and the modules that hold the peak."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ConfigError
from autotune.records.explanation import KINDS, Anatomy, Explanation, fold_repeats
from autotune.report.explanation import named
from autotune.report.plots import COLOURS, GREY
from autotune.techniques import Techniques
from autotune.units import MIB, format_bytes, plural

FORMS = (".png", ".svg", ".pdf")
NUM_BARS = 12
SMALLEST_BAR = 0.005  # of the peak
_COLOURS = (COLOURS[0], COLOURS[4], COLOURS[2], COLOURS[5], COLOURS[1], GREY)  # in the order of `KINDS`


def require_form(path: Path) -> None:
    """Raise ConfigError or AutotuneError where no picture can be written: before minutes of work rather than after them."""
    if path.suffix not in FORMS:
        raise ConfigError(f"--picture {path}: expected a file that ends in {', '.join(FORMS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise AutotuneError("a picture needs matplotlib; install it: pip install 'autotune-torch[report]'") from None


def draw(explanation: Explanation, memory: Anatomy, techniques: Techniques, path: Path) -> None:
    """Write the picture in the form that the file's suffix says.

    Args:
        memory: of the explanation.

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
    """Stacked kinds over the allocations of a step, its phases in turn behind them."""
    moments = memory.timeline
    held = list(zip(*(moment.held_bytes for moment in moments), strict=True))
    ax.stackplot(range(len(moments)), *([b / MIB for b in kind] for kind in held), labels=KINDS, colors=_COLOURS)
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
    """The axes with a bar for each module or run of equal blocks, by kind; the largest ones."""
    by_name = {module.name: module for module in memory.modules}
    folds = fold_repeats({name: module.total_bytes for name, module in by_name.items()})
    held = {fold.names: sum(by_name[name].total_bytes for name in fold.names) for fold in folds}
    folds.sort(key=lambda fold: -held[fold.names])
    shown = [fold for fold in folds[:NUM_BARS] if held[fold.names] >= SMALLEST_BAR * memory.peak_bytes]
    labels = [named(f.label) if len(f.blocks) == 1 else f"{f.label} ({len(f.blocks)} blocks)" for f in shown]
    groups = [fold.names for fold in shown]
    if rest := folds[len(shown) :]:
        labels.append(plural(len(rest), "more module"))
        groups.append(frozenset(name for fold in rest for name in fold.names))
    starts = [0.0] * len(groups)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        widths = [sum(by_name[name].held_bytes.get(kind, 0) for name in names) / MIB for names in groups]
        ax.barh(range(len(groups)), widths, left=starts, color=colour)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, end in enumerate(starts):
        ax.text(end, place, f" {end * MIB / memory.peak_bytes:.0%}", va="center", fontsize="small")
    ax.set(yticks=range(len(groups)), yticklabels=labels, xlabel="MiB at the peak")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * max(starts))
    return ax
