"""An explanation as sections: the memory by kind, the modules with their memory and time, what is large, what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from autotune.records.config import ACCUMULATION
from autotune.records.explanation import (
    BACKWARD,
    BATCH,
    FORWARD,
    LOSS,
    MODEL,
    UPDATE,
    Advice,
    Anatomy,
    Explanation,
    Fold,
    fold_repeats,
)
from autotune.report.capacity import ALLOCATORS, outside_words
from autotune.report.figures import rate
from autotune.report.sections import Cell, Paragraph, Section, Span, Tone, by_reason, table
from autotune.techniques import Techniques
from autotune.units import format_bytes, format_seconds, plural

_MEANINGS = {
    "parameters": "parameters and buffers",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "activations": "activations kept for the backward pass",
    "temporaries": "results in flight, scratch space",
    "batch": "the batch and what is made of it before the first layer",
}
_OUTSIDE = {
    MODEL: "the model between its layers",
    BATCH: "the batch",
    LOSS: "the loss (after the last layer)",
    UPDATE: "the optimizer",
}
NUM_ROWS = 10
NUM_INNER = 3  # modules shown inside a block
SMALLEST_INNER = 0.05  # modules with a smaller share of their block are not shown


def explanation_sections(explanation: Explanation, techniques: Techniques) -> Iterator[Section]:
    """All sections of an explanation."""
    memory = explanation.memory
    yield Section(explanation.task, (), f"on {explanation.device}: {techniques.describe(explanation.config)}")
    if memory is not None:
        yield _kinds(explanation, memory)
    else:
        yield Section("Memory", (Paragraph(Span(f"not traced: {explanation.untraced}", Tone.WARNING)),))
    yield _time(explanation)
    yield from _modules(explanation)
    if explanation.remarks:
        yield Section("What is large", tuple(Paragraph(text, "-") for text in _remarks(explanation)))
    if memory is not None:
        yield from _advice(explanation, memory)


def _kinds(explanation: Explanation, memory: Anatomy) -> Section:
    outside_bytes = min(explanation.outside_bytes, explanation.beside_bytes)
    outside = outside_words(
        on_gpu=explanation.on_gpu,
        communicators=explanation.communicators,
        numbers=[explanation.num_communicators],
    )
    rows: list[tuple[Cell, ...]] = [
        (format_bytes(held), f"{held / memory.peak_bytes:.0%}", _MEANINGS[kind])
        for kind, held in memory.kinds().items()
    ]
    rows += [
        (Span(format_bytes(memory.peak_bytes), Tone.STRONG), "100%", Span("the allocator's peak, traced", Tone.STRONG)),
        (format_bytes(explanation.beside_bytes - outside_bytes), "", ALLOCATORS),
        (format_bytes(outside_bytes), "", outside),
    ]
    blocks: list[Paragraph] = []
    if explanation.times is not None:
        real = explanation.times.allocated_bytes
        off = round(memory.peak_bytes / real - 1, 3)
        told = f"{off:+.1%}" if off else "0.0%"
        said = f"Measured, the allocator's peak is {format_bytes(real)}: the trace is {told} off."
        blocks.append(Paragraph(Span(said, Tone.NOTE)))
    if memory.wire_bytes:
        wired = ", ".join(f"{name} {format_bytes(round(size))}" for name, size in memory.wire_bytes.items())
        blocks.append(Paragraph(f"Over the wire in a step: {wired}, of which each device sends its part."))
    where = f"in the {memory.phase} pass" if memory.phase in (FORWARD, BACKWARD) else "in the optimizer's step"
    return Section(
        "Memory", (table((">bytes", ">share", ""), rows), *blocks), f"the peak is {where}, at {named(memory.module)}"
    )


def _time(explanation: Explanation) -> Section:
    probe = explanation.probe
    if probe is None:
        return Section("Time", (Paragraph(Span(f"not measured: {explanation.untimed}", Tone.NOTE)),))
    if probe.measurement is None:
        return Section("Time", (Paragraph(Span(f"{probe.kind}: {probe.cause}", Tone.BAD)),))
    phases, measured = probe.measurement.phases_s, probe.measurement
    total = sum(phases.values())
    rows = ((format_seconds(seconds), f"{seconds / total:.0%}", phase) for phase, seconds in phases.items())
    speed = f"{rate(measured.samples_per_s)} samples/s, {format_seconds(measured.step_s)} a step, {format_bytes(measured.peak_bytes)}"
    blocks = [table((">time", ">share", ""), rows)]
    untimed = [Paragraph(Span(f"Not by module: {explanation.untimed}.", Tone.NOTE))] if explanation.untimed else []
    return Section("Time", (*blocks, *untimed), f"a short real run: {speed}")


def _modules(explanation: Explanation) -> Iterator[Section]:
    """A row for each block, one for several equal blocks, and under it the largest modules inside."""
    memory = explanation.memory
    seconds = _seconds(explanation)
    traced = memory.modules if memory is not None else ()
    held = {m.name: float(m.total_bytes) for m in traced}
    micro_batches = int(explanation.config[ACCUMULATION])
    flops = {m.name: micro_batches * sum(m.flops.values()) for m in traced}
    of_phases = {
        phase: {name: times.get(phase, 0.0) for name, times in seconds.items()} for phase in (FORWARD, BACKWARD)
    }
    figures: list[tuple[str, Mapping[str, float], Callable[[float], str]]] = [
        ("memory", held, lambda value: format_bytes(round(value))),
        *((phase, times, _time_or_dash) for phase, times in of_phases.items()),
        ("GFLOP", flops, _gflops_or_dash),
    ]
    figures = [column for column in figures if column[1]]
    if not figures:
        return
    totals = [sum(values.values()) for _, values, _ in figures]
    main = held or {name: sum(phases.values()) for name, phases in seconds.items()}

    def share(names: Collection[str]) -> float:
        return max(_sum(values, names) / total for (_, values, _), total in zip(figures, totals, strict=True) if total)

    folds = sorted(
        (f for f in fold_repeats(main | dict.fromkeys(seconds.keys() - main.keys(), 0.0))),
        key=lambda f: -share(f.names),
    )
    shown = [fold for fold in folds[:NUM_ROWS] if share(fold.names) >= 0.001]
    rest = folds[len(shown) :]
    main_total = sum(main.values()) or 1.0
    shown.sort(key=lambda fold: -_sum(main, fold.names))

    def row(label: Cell, names: Collection[str], count: int = 1) -> tuple[Cell, ...]:
        cells = (show(_sum(values, names) / count) for _, values, show in figures)
        return (f"{_sum(main, names) / main_total:.0%}", *cells, label)

    rows = []
    for fold in shown:
        each = f", each of {len(fold.blocks)}" if len(fold.blocks) > 1 else ""
        rows.append(row((named(fold.label), Span(each, Tone.NOTE)), fold.names, len(fold.blocks)))
        rows += [row(Span(f"  {label}", Tone.NOTE), names, len(fold.blocks)) for label, names in _inner(fold, main)]
    if rest:
        names = frozenset(name for fold in rest for name in fold.names)
        rows.append(row(Span(f"{plural(len(rest), 'more module')}", Tone.NOTE), names))
    titles = (">share", *(f">{title}" for title, _, _ in figures), "module")
    what = "memory at the peak" if held else "time"
    note = f"share of the {what}; time and FLOPs of a whole step; of equal blocks the share of all, and the figures of each"
    yield Section("Modules", (table(titles, rows),), note)


def _seconds(explanation: Explanation) -> Mapping[str, Mapping[str, float]]:
    found = explanation.times.seconds if explanation.times is not None else {}
    return {name: phases for name, phases in found.items() if phases.keys() & {FORWARD, BACKWARD}}


def _inner(fold: Fold, main: Mapping[str, float]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The largest modules inside a block, summed over equal blocks: (name within the block, qualified names)."""
    blocks = fold.blocks
    if len(blocks[0]) == 1:
        return
    inside = [tuple(block[place] for block in blocks) for place in range(len(blocks[0]))]
    total = _sum(main, fold.names)
    largest = sorted(inside, key=lambda names: -_sum(main, names))[:NUM_INNER]
    for names in largest:
        if _sum(main, names) >= SMALLEST_INNER * total:
            yield names[0].removeprefix(fold.block).removeprefix(".") or "its own code", names


def _sum(values: Mapping[str, float], names: Collection[str]) -> float:
    return sum(values.get(name, 0.0) for name in names)


def _time_or_dash(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 1e-4 else "-"


def _gflops_or_dash(flops: float) -> str:
    if flops < 1e7:
        return "-"
    return f"{flops / 1e9:,.0f}" if flops >= 1e11 else f"{flops / 1e9:.3g}"


def named(module: str) -> str:
    """A module's name; for what runs outside of every layer, words."""
    return _OUTSIDE.get(module, module)


def _remarks(explanation: Explanation) -> Iterator[Cell]:
    for remark in explanation.remarks:
        said = f"{remark.part} take {remark.share:.0%} of the peak ({format_bytes(remark.held_bytes)})"
        saved = f": {remark.remedy} would make the peak {format_bytes(remark.saves_bytes)} lower"
        yield said[0].upper() + said[1:], Span(saved if remark.remedy else "", Tone.BEST)


def _advice(explanation: Explanation, memory: Anatomy) -> Iterator[Section]:
    rows = (
        (
            Span(format_bytes(advice.saves_bytes), Tone.GOOD),
            f"{advice.saves_bytes / memory.peak_bytes:.0%}",
            f"{advice.flops_ratio:.2f}x",
            f"{advice.moved_ratio:.2f}x",
            (advice.label, Span(_mark(advice), Tone.NOTE)),
        )
        for advice in explanation.advice
    )
    blocks = [table((">saves", ">share", ">FLOPs", ">moved", "one change alone"), rows)] if explanation.advice else []
    remarks = []
    if explanation.no_gain:
        remarks.append(Paragraph(Span(f"Less than 1% of the peak: {', '.join(explanation.no_gain)}.", Tone.NOTE)))
    remarks += by_reason({label: f"not predicted: {why}" for label, why in explanation.not_predicted.items()})
    remarks += by_reason({advice.label: advice.note for advice in explanation.advice if advice.note and _mark(advice)})
    note = "each predicted by tracing; a step's FLOPs and bytes moved, over those of the config above"
    yield Section("What would save memory", (*blocks, *remarks), note)


def _mark(advice: Advice) -> str:
    """How an advice differs from what a search tries unasked; empty where it does not."""
    if advice.changes_learning:
        return "; trains something else"
    return "" if advice.included else "; not searched by default"
