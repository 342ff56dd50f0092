"""The answers for several numbers of devices, as a section: whether more devices are worth it."""

from __future__ import annotations

from autotune.records.scaling import OnDevices, Scaling
from autotune.report.figures import measured_rate, times
from autotune.report.sections import Cell, Paragraph, Section, table
from autotune.techniques import Techniques
from autotune.units import format_bytes


def scaling_section(scaling: Scaling, techniques: Techniques) -> Section:
    """A row for each number of devices; in words, the throughput of each over that of the fewest, and why others have no answer."""
    fewest = scaling.rows[0]
    rows = [_row(one, techniques) for one in scaling.rows]
    head = (">processes", ">samples/s", ">efficiency", ">memory of each", "config")
    words = [
        f"{one.num_processes} processes: {times(one.samples_per_s / fewest.samples_per_s)} the throughput of "
        f"{fewest.num_processes}."
        for one in scaling.rows[1:]
    ]
    words += [f"{number}: {why}" for number, why in scaling.failed.items()]
    return Section("Devices", (table(head, rows), *map(Paragraph, words)), "each has a search and a study of its own")


def _row(one: OnDevices, techniques: Techniques) -> tuple[Cell, ...]:
    low, high = one.efficiency_ci
    return (
        str(one.num_processes),
        measured_rate(one),
        f"{one.efficiency:.0%} ({low:.0%} to {high:.0%})",
        format_bytes(one.peak_bytes),
        techniques.describe(one.config),
    )
