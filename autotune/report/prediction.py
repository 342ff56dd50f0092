"""A prediction for people: what fits, what it consists of, and where most of it is held."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from autotune.predict.answer import GroupPrediction, PredictedPeak, Prediction
from autotune.records.config import Choice
from autotune.report.text import heading, paragraph, table
from autotune.report.words import describe, describe_batch, describe_choice
from autotune.units import GIB, MIB, format_bytes

_PARTS = (
    ("params", "parameters_bytes", "parameters and buffers"),
    ("grads", "gradients_bytes", "gradients"),
    ("optim", "optimizer_bytes", "the optimizer's state"),
    ("activ", "activations_bytes", "activations kept for the backward pass"),
    ("temps", "temporaries_bytes", "inputs, results in flight, scratch space"),
    ("alloc", "allocator_bytes", "rounding and fragments of the allocator, workspaces, kernels"),
    ("outside", "outside_bytes", "outside the allocator: {outside}"),
)
_COLUMNS = ", ".join(f"{title}: {meaning}" for title, _, meaning in _PARTS if title not in ("params", "grads"))
Changes = frozenset[tuple[str, Choice]]

NUM_SAME = 4  # further choices of the same memory that are named


def render_prediction(prediction: Prediction, console: Console) -> None:
    """Print a prediction: of one config, or of every combination of techniques."""
    limit = f"{format_bytes(prediction.memory_limit_bytes)}, {prediction.headroom:.0%} of it kept free"
    console.print()
    console.print(Text.assemble((prediction.task, "bold"), f" on {prediction.device}: what fits within {limit}"))
    paragraph(console, Text("Predicted by tracing training steps. Nothing was trained, nothing was measured.", "dim"))
    if prediction.config is not None:
        _one(prediction, prediction.config, console)
    else:
        _all(prediction, console)
    _remarks(prediction, console)


def _one(prediction: Prediction, peak: PredictedPeak, console: Console) -> None:
    console.print()
    verdict, style = ("Fits", "bold green") if prediction.fits else ("Does not fit", "bold red")
    paragraph(
        console,
        Text.assemble(
            (f"{verdict}: ", style),
            (f"{format_bytes(peak.peak_bytes)} of {format_bytes(prediction.usable_bytes)}", style),
            f" ({_range(peak)} in 95%, {peak.chance_to_fit:.0%} to fit): {describe(peak.config)}",
        ),
    )
    heading(console, "What it consists of")
    made = table(("bytes", "right"), ("share", "right"), last="")
    for _, field, meaning in _PARTS:
        part_bytes = getattr(peak, field)
        made.add_row(
            "",
            format_bytes(part_bytes),
            f"{part_bytes / peak.peak_bytes:.0%}",
            meaning.format(outside=_outside(prediction)),
        )
    console.print(made)
    _modules(peak, console, note="")


def _all(prediction: Prediction, console: Console) -> None:
    groups = prediction.groups
    steps = f"xN: accumulated to the global batch of {prediction.global_batch}" if prediction.global_batch else ""
    heading(console, "Largest batch that fits", steps)
    made = table(("#", "right"), ("batch", "left"), ("peak", "right"), ("95% likely", "left"), last="switched on")
    everywhere = _everywhere(groups)
    most = max((group.peak.config["batch_size"] for group in groups if group.fits), default=None)
    for number, group in enumerate(groups, start=1):
        peak = group.peak
        batch = describe_batch(peak.config).removeprefix("batch ")
        best = group.fits and peak.config["batch_size"] == most
        made.add_row(
            "",
            str(number),
            Text(batch, style="bold green" if best else "") if group.fits else Text("none fits", style="red"),
            Text(format_bytes(peak.peak_bytes), style="" if group.fits else "red"),
            Text(
                _range(peak),
                style="yellow" if group.fits and peak.peak_high_bytes > prediction.memory_limit_bytes else "",
            ),
            Text.assemble(_words(group.switched_on) or "nothing", (_same(group, everywhere), "dim")),
        )
    console.print(made)
    if everywhere:
        paragraph(console, Text(f"The same with {_alternatives(everywhere)}.", "dim"))
    if not all(group.fits for group in groups):
        paragraph(console, Text("Where none fits, the peak is that of the smallest batch.", "dim"))
    unit, name = (GIB, "GiB") if max(group.peak.peak_bytes for group in groups) >= 2 * GIB else (MIB, "MiB")
    heading(console, "What it consists of", name)
    made = table(("#", "right"), *((title, "right") for title, _, _ in _PARTS), last="")
    for number, group in enumerate(groups, start=1):
        made.add_row("", str(number), *(_in(getattr(group.peak, field), unit) for _, field, _ in _PARTS), "")
    console.print(made)
    paragraph(console, Text(_COLUMNS.format(outside=_outside(prediction)), "dim"))
    first = next((group for group in groups if group.fits), groups[0])
    _modules(first.peak, console, note=f"#{groups.index(first) + 1}")


def _modules(peak: PredictedPeak, console: Console, *, note: str) -> None:
    if not peak.modules:
        return
    heading(console, "Modules that hold most of the activations", note)
    made = table(("bytes", "right"), ("share", "right"), last="module")
    for name, held_bytes in peak.modules:
        share = f"{held_bytes / peak.activations_bytes:.0%}" if peak.activations_bytes > 0 else "-"
        made.add_row("", format_bytes(held_bytes), share, name or "(the model itself)")
    console.print(made)


def _remarks(prediction: Prediction, console: Console) -> None:
    if prediction.config is None:
        _untraced(prediction, console)
        _left_out(prediction, console)
    if prediction.warnings:
        heading(console, "Warnings")
        for warning in prediction.warnings:
            paragraph(console, Text.assemble(("! ", "bold yellow"), warning))
    console.print()


def _untraced(prediction: Prediction, console: Console) -> None:
    """Each reason once, with what could not be traced for it."""
    alike: dict[str, list[str]] = {}
    for label, reason in prediction.untraced.items():
        alike.setdefault(reason, []).append(label)
    if alike:
        heading(console, "Not predicted", "could not be traced")
    for reason, labels in alike.items():
        more = f" and {len(labels) - NUM_SAME} more" if len(labels) > NUM_SAME else ""
        paragraph(console, Text.assemble(reason, (f"  {'; '.join(labels[:NUM_SAME])}{more}", "dim")))


def _left_out(prediction: Prediction, console: Console) -> None:
    if not prediction.left_out:
        return
    heading(console, "Left out", "does not apply there")
    made = table(("", "left"), last="")
    made.show_header = False
    for name, reason in prediction.left_out.items():
        made.add_row("", name, Text(reason))
    console.print(made)


def _range(peak: PredictedPeak) -> str:
    """`1.02 to 1.21 GiB`."""
    low, high = format_bytes(peak.peak_low_bytes), format_bytes(peak.peak_high_bytes)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _words(choices: dict[str, Choice]) -> str:
    words = ", ".join(describe_choice(name, choice) for name, choice in choices.items())
    return words.replace("checkpoint segment", "segment")  # a row a combination, where the console is 80 wide


def _changes(group: GroupPrediction) -> list[Changes]:
    """What else may be switched without changing the memory; what follows from two of these is left out."""
    changes = [frozenset(other.items() - group.switched_on.items()) for other in group.same_memory]
    return [change for change in changes if change and not any(other < change for other in changes)]


def _everywhere(groups: Sequence[GroupPrediction]) -> list[Changes]:
    """Changes that make no difference in any group, in order."""
    return [change for change in _changes(groups[0]) if all(change in _changes(group) for group in groups)]


def _same(group: GroupPrediction, everywhere: Sequence[Changes]) -> str:
    """What else takes the same memory, what does everywhere apart: `; same with 6 segments`."""
    others = [change for change in _changes(group) if change not in everywhere]
    return f"; same with {_alternatives(others)}" if others else ""


def _alternatives(changes: Sequence[Changes]) -> str:
    more = f" or {len(changes) - NUM_SAME} more" if len(changes) > NUM_SAME else ""
    return " or ".join(_words(dict(change)) for change in changes[:NUM_SAME]) + more


def _in(num_bytes: int, unit: int) -> str:
    return f"{num_bytes / unit:.2f}" if unit == GIB else f"{num_bytes / unit:.0f}"


def _outside(prediction: Prediction) -> str:
    return "the CUDA context" if prediction.on_gpu else "the process and its libraries"
