"""A prediction as sections: the largest batches that fit, the breakdown of their memory, and the modules that hold most of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.records.capacity import LARGEST_BATCH, GroupPrediction, MemoryPrediction, PredictedPeak
from autotune.records.config import Choice, describe_batch
from autotune.records.device import NO_COMMUNICATORS, Communicators
from autotune.report.figures import limit_words
from autotune.report.sections import Cell, Paragraph, Section, Span, Tone, by_reason, table, warnings_section
from autotune.techniques import Techniques
from autotune.units import GIB, MIB, format_bytes, format_seconds, plural

ALLOCATORS = "rounding and fragments of the allocator, workspaces of libraries"
_PARTS = (
    ("params", "parameters_bytes", "parameters and buffers"),
    ("grads", "gradients_bytes", "gradients"),
    ("optim", "optimizer_bytes", "the optimizer's state"),
    ("activ", "activations_bytes", "activations kept for the backward pass"),
    ("temps", "temporaries_bytes", "inputs, results in flight, scratch space"),
    ("alloc", "allocator_bytes", ALLOCATORS),
    ("outside", "outside_bytes", "{outside}"),
)
SMALLEST_SHARE = 0.005  # of the activations: modules that hold less are left out
NUM_SAME = 4  # at most so many choices that do not change the memory are named
Changes = frozenset[tuple[str, Choice]]


def outside_words(*, on_gpu: bool, communicators: Communicators = NO_COMMUNICATORS, numbers: Iterable[int] = ()) -> str:
    """What lies outside the allocator.

    Args:
        numbers: of communicators, in what is told.
    """
    what = (
        "the CUDA context, handles and loaded kernels of its libraries" if on_gpu else "the process and its libraries"
    )
    held = [
        f"{plural(number, 'communicator')} {format_bytes(num_bytes)}, {'measured' if communicators.is_measured(number) else 'an estimate'}"
        for number in sorted({*numbers})
        if (num_bytes := communicators.bytes_of(number))
    ]
    collectives = f", and buffers of collectives ({'; '.join(held)})" if held else ""
    return f"outside the allocator: {what}{collectives}"


def prediction_sections(prediction: MemoryPrediction, techniques: Techniques) -> Iterator[Section]:
    """All sections of a prediction for one config, or for every combination of techniques."""
    limit = limit_words("what fits", prediction.memory_limit_bytes, prediction.headroom)
    how = Span("Predicted by tracing training steps. Nothing was trained, nothing was measured.", Tone.NOTE)
    yield Section(prediction.task, (Paragraph(how),), f"on {prediction.device}: {limit}")
    peaks = [prediction.config] if prediction.config is not None else [group.peak for group in prediction.groups]
    outside = outside_words(
        on_gpu=prediction.on_gpu,
        communicators=prediction.communicators,
        numbers=(peak.num_communicators for peak in peaks),
    )
    if prediction.config is not None:
        yield from _one(prediction, prediction.config, techniques, outside)
    else:
        yield from _all(prediction, techniques, outside)
        yield from _not_predicted(prediction)
    if prediction.warnings:
        yield warnings_section(prediction.warnings)


def first_words(prediction: MemoryPrediction) -> str:
    """What is known once plain training has been traced, in one line."""
    group = prediction.groups[0]
    peak = group.peak
    batch = describe_batch(peak.config)
    parts = ", ".join(
        f"{short} {format_bytes(getattr(peak, field))}" for short, field, _ in _PARTS if getattr(peak, field)
    )
    return (
        f"after {format_seconds(prediction.wall_s)}: with nothing switched on, {batch if group.fits else f'not even {batch}'} fits: "
        f"{format_bytes(peak.peak_bytes)} of {format_bytes(prediction.usable_bytes)} ({parts}); tracing what may be switched on"
    )


def _one(prediction: MemoryPrediction, peak: PredictedPeak, techniques: Techniques, outside: str) -> Iterator[Section]:
    word, tone = "Does not fit", Tone.FAILED
    if prediction.fits:
        word, tone = "Fits", Tone.BEST
    elif peak.peak_bytes <= prediction.usable_bytes:
        word, tone = "May fit", Tone.WARNING
    verdict: Cell = (
        Span(f"{word}: {format_bytes(peak.peak_bytes)} of {format_bytes(prediction.usable_bytes)}", tone),
        f" ({_range(peak)} in 95%, {peak.chance_to_fit:.0%} to fit): {techniques.describe(peak.config)}",
    )
    yield Section("", (Paragraph(verdict),))
    yield from _breakdown(peak, outside)


def _breakdown(peak: PredictedPeak, outside: str, note: str = "") -> Iterator[Section]:
    rows = (
        (format_bytes(held), f"{held / peak.peak_bytes:.0%}", meaning.format(outside=outside))
        for _, field, meaning in _PARTS
        for held in (getattr(peak, field),)
    )
    yield Section("Breakdown", (table((">bytes", ">share", ""), rows),), note)
    yield from _modules(peak, note)


def _all(prediction: MemoryPrediction, techniques: Techniques, outside: str) -> Iterator[Section]:
    groups = prediction.groups
    everywhere = [
        c for c in _changes(groups[0]) if all(c in _changes(group) for group in groups)
    ]  # changes that make no difference anywhere
    most = max((group.peak.config["batch_size"] for group in groups if group.fits), default=None)
    rows = [(str(number), *_group(group, techniques, most, everywhere)) for number, group in enumerate(groups, start=1)]
    remarks = [f"The same with {_alternatives(everywhere, techniques)}."] if everywhere else []
    if not prediction.global_batch:
        remarks += _bounds(groups)
    if not all(group.fits for group in groups):
        remarks.append("Where none fits, the peak is that of the smallest batch.")
    shown = table((">#", "batch", ">peak", "95% likely", "switched on"), rows)
    steps = f"xN: accumulated to the global batch of {prediction.global_batch}" if prediction.global_batch else ""
    yield Section("Largest batch that fits", (shown, *(Paragraph(Span(text, Tone.NOTE)) for text in remarks)), steps)
    if all(group.bounded for group in groups):  # everything fits, so nobody asks how each group fills the memory
        yield from _breakdown(groups[0].peak, outside, "#1")
        return
    unit, name = (GIB, "GiB") if max(group.peak.peak_bytes for group in groups) >= 2 * GIB else (MIB, "MiB")
    digits = 2 if unit == GIB else 0
    parts = table(
        (">#", *(f">{title}" for title, _, _ in _PARTS), ""),
        (
            (str(number), *(f"{getattr(group.peak, field) / unit:.{digits}f}" for _, field, _ in _PARTS), "")
            for number, group in enumerate(groups, start=1)
        ),
    )
    meanings = ", ".join(f"{title}: {meaning}" for title, _, meaning in _PARTS if title not in ("params", "grads"))
    explained = Paragraph(Span(meanings.format(outside=outside), Tone.NOTE))
    yield Section("Breakdown", (parts, explained), name)
    first = next((number for number, group in enumerate(groups) if group.fits), 0)
    yield from _modules(groups[first].peak, f"#{first + 1}")


def _bounds(groups: Sequence[GroupPrediction]) -> list[str]:
    """Why no larger batches are shown, where they would fit."""
    largest = max((int(group.peak.config["batch_size"]) for group in groups if group.bounded), default=0)
    if largest == LARGEST_BATCH:
        return [f"Batches beyond {LARGEST_BATCH:,} samples may fit, too; they were not looked at."]
    return [f"The dataset has {plural(largest, 'sample')}, so no batch is larger."] if largest else []


def _group(
    group: GroupPrediction, techniques: Techniques, most: Choice | None, everywhere: Sequence[Changes]
) -> tuple[Cell, ...]:
    peak = group.peak
    batch = describe_batch(peak.config).removeprefix("batch ")
    best = group.fits and peak.config["batch_size"] == most
    others = [change for change in _changes(group) if change not in everywhere]
    same = f"; same with {_alternatives(others, techniques)}" if others else ""
    return (
        Span(batch, Tone.BEST if best else Tone.PLAIN) if group.fits else Span("none fits", Tone.BAD),
        Span(format_bytes(peak.peak_bytes), Tone.PLAIN if group.fits else Tone.BAD),
        _range(peak),
        (_words(group.switched_on, techniques) or "nothing", Span(same, Tone.NOTE)),
    )


def _modules(peak: PredictedPeak, note: str = "") -> Iterator[Section]:
    rows = [
        (
            format_bytes(held_bytes),
            f"{held_bytes / peak.activations_bytes:.0%}" if peak.activations_bytes > 0 else "-",
            name or "(the model itself)",
        )
        for name, held_bytes in peak.modules
        if held_bytes > SMALLEST_SHARE * peak.activations_bytes
    ]
    if rows:
        held = table((">bytes", ">share", "module"), rows)
        yield Section("Modules that hold most of the activations", (held,), note)


def _not_predicted(prediction: MemoryPrediction) -> Iterator[Section]:
    """What could not be traced, and what does not apply."""
    if prediction.untraced:
        yield Section("Not predicted", tuple(by_reason(prediction.untraced)), "could not be traced")
    if prediction.left_out:
        yield Section("Left out", tuple(by_reason(prediction.left_out)), "does not apply there")


def _range(peak: PredictedPeak) -> str:
    """`1.02 to 1.21 GiB`."""
    low, high = format_bytes(peak.peak_low_bytes), format_bytes(peak.peak_high_bytes)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _words(choices: Mapping[str, Choice], techniques: Techniques) -> str:
    return ", ".join(techniques.label(name, choice) for name, choice in choices.items())


def _changes(group: GroupPrediction) -> list[Changes]:
    """Choices that may be switched without changing the memory. A combination of two such choices is not listed again."""
    changes = [frozenset(other.items() - group.switched_on.items()) for other in group.same_memory]
    return [change for change in changes if change and not any(other < change for other in changes)]


def _alternatives(changes: Sequence[Changes], techniques: Techniques) -> str:
    """The first few, and how many more there are."""
    texts = [_words(dict(change), techniques) for change in changes]
    more = f" or {len(texts) - NUM_SAME} more" if len(texts) > NUM_SAME else ""
    return " or ".join(texts[:NUM_SAME]) + more
