"""What several numbers of devices train, as a section: whether more devices are worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.devices import capabilities_of
from autotune.records.config import BATCH_KEYS
from autotune.records.measured import Measured, OneDevice
from autotune.records.result import Result
from autotune.records.scaling import OnDevices, Scaling
from autotune.report.figures import NOISY, interval, is_wide, measured_joules, measured_rate, role_of, times
from autotune.report.sections import Cell, Paragraph, Section, Span, Table, Tone, table
from autotune.techniques import Techniques
from autotune.units import format_bytes, plural

Row = tuple[int, Measured | OnDevices, str, Cell]  # processes, what was found, efficiency, config


def scaling_section(scaling: Scaling, techniques: Techniques) -> Section:
    """A row for each number of devices; in words, the throughput of each over that of the fewest, and why others have no answer."""
    fewest = scaling.rows[0]
    rows: list[Row] = [
        (one.num_processes, one, _efficiency(one.efficiency, one.efficiency_ci), techniques.describe(one.config))
        for one in scaling.rows
    ]
    words = [
        f"{one.num_processes} processes: {times(one.samples_per_s / fewest.samples_per_s)} the throughput of "
        f"{fewest.num_processes}."
        for one in scaling.rows[1:]
    ]
    words += [
        f"A million samples cost {one.price.words(one.money.per_million_samples)} on {one.num_processes}."
        for one in scaling.rows
        if one.price is not None and one.money is not None
    ]
    words += [f"{number}: {why}" for number, why in scaling.failed.items()]
    return Section("Devices", (_table(rows), *map(Paragraph, words)), "each has a search and a study of its own")


def one_device_section(result: Result, one: OneDevice, answer: Measured, techniques: Techniques) -> Section:
    """The baseline on one device and on several, and the answer: what more devices add to what the user runs today."""
    size, base = result.subject.num_processes, result.baseline

    def config(found: Measured, role: str, tone: Tone) -> Cell:
        return techniques.describe(found.config), Span(f"  {role}", tone)

    rows: list[Row] = [(1, one, "-" if one.failure else "100%", config(one, "baseline", Tone.BASELINE))]
    if base is not None:
        efficiency = _efficiency(one.efficiency, one.efficiency_ci)
        rows.append((size, base, efficiency, config(base, "baseline", Tone.BASELINE)))
    if base is None or base.config != result.config:
        rows.append((size, answer, "-", config(answer, role_of(result), Tone.BEST)))
    told = one.failure[:1].upper() + one.failure[1:]
    words = [f"{told}."] if told else _what_more_devices_add(result, one)
    return Section(
        "Devices", (_table(rows), *map(Paragraph, words)), "one device ran the baseline alone; 95% intervals"
    )


def _what_more_devices_add(result: Result, one: OneDevice) -> Iterator[str]:
    """What the table shows, in sentences, and what has to be known to read it."""
    size, base = result.subject.num_processes, result.baseline
    if one.efficiency is not None and one.efficiency_ci is not None:
        low, high = (size * edge for edge in one.efficiency_ci)
        yield f"The baseline trains {_gain(size * one.efficiency, low, high)} as fast on {size} as on 1."
    if one.speedup is not None and one.speedup_ci is not None and (base is None or base.config != result.config):
        yield f"The answer on {size} trains {_gain(one.speedup, *one.speedup_ci)} as fast as the baseline on 1."
        searches = f"; --devices 1,{size} does that" if result.subject.model else ""
        yield f"The fastest config of one device was not searched{searches}."
    if not capabilities_of(result.subject.device).own_processors:
        yield f"They share one CPU: a process alone has all its cores, so an efficiency of {1 / size:.0%} is no loss."
    alone, together = _samples_per_step(one), size * _samples_per_step(base or one)
    if alone != together:
        yield (
            f"No global batch is given, so an optimizer step takes {plural(together, 'sample')} on {size} and {alone} on 1."
        )


def _samples_per_step(found: Measured) -> int:
    """Samples of one process."""
    batch_size, accumulation_steps = (int(found.config[name]) for name in BATCH_KEYS)
    return batch_size * accumulation_steps


def _gain(ratio: float, low: float, high: float) -> str:
    """`1.83x (95% interval 1.78x to 1.88x)`."""
    sure = "too noisy to tell more" if is_wide(low, high) else f"95% interval {interval(low, high)}"
    return f"{times(ratio)} ({sure})"


def _efficiency(efficiency: float | None, ends: tuple[float, float] | None) -> str:
    """`91% (88% to 94%)`, `91% noisy`; a dash where it is not known."""
    if efficiency is None or ends is None:
        return "-"
    low, high = ends
    sure = NOISY if is_wide(low, high) else f"({low:.0%} to {high:.0%})"
    return f"{efficiency:.0%} {sure}"


def _table(rows: Sequence[Row]) -> Table:
    """A table with a column for energy where that is known of some."""
    has_energy = any(found.joules_per_sample is not None for _, found, *_ in rows)

    def figures(found: Measured | OnDevices, efficiency: str) -> tuple[str, ...]:
        told = measured_rate(found), efficiency, format_bytes(found.peak_bytes), measured_joules(found)
        return (told if found.samples_per_s > 0 else ("-",) * 4)[: 4 if has_energy else 3]

    columns = (">samples/s", ">efficiency", ">memory of each", ">J/sample")[: 4 if has_energy else 3]
    cells = ((str(number), *figures(found, efficiency), config) for number, found, efficiency, config in rows)
    return table((">processes", *columns, "config"), cells)
