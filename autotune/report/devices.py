"""`autotune devices`: the devices to train on, and how busy they are."""

from __future__ import annotations

import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autotune.devices import available, capabilities_of, nvml
from autotune.devices.base import Telemetry
from autotune.devices.calibration import holds_for
from autotune.errors import DeviceError
from autotune.records.device import CALLED, Calibration, DeviceInfo, Rate
from autotune.report.sections import Paragraph, Section, document, table
from autotune.report.terminal import as_text
from autotune.study.caches import CalibrationCache
from autotune.study.place import DEFAULT_FOLDER
from autotune.units import format_bytes, format_per_s, format_seconds, plural

PIPE_WIDTH = 160  # wide enough for what a device usually says
REFRESH_S = 1.0  # interval of `--watch`


@dataclass(frozen=True)
class _Reading:
    info: DeviceInfo
    telemetry: Telemetry

    @property
    def cache(self) -> CalibrationCache:
        """The file with the device's calibration."""
        return CalibrationCache(Path(DEFAULT_FOLDER), holds_for(self.info))

    @property
    def calibration(self) -> Calibration | None:
        """What a search measured of the device in its present state; None where none has."""
        return self.cache.read()


def render_devices(*, as_json: bool = False) -> str:
    """Every device with its memory, load, temperature, power and processes, as text or as one JSON document.

    The JSON has `devices` (a list: the fields of `DeviceInfo`; `telemetry` with `values`, `throttle_reasons` and
    `processes`; `calibration` with the fields of `Calibration` and its file as `kept`, null where there is none) and
    `no_gpu` (why there is none, else null).
    """
    readings, remarks = _read()
    if as_json:
        no_gpu = None if _has_gpu(readings) else nvml.why_no_gpu()
        return document({"devices": [_plain(reading) for reading in readings], "no_gpu": no_gpu})
    width = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    sections = [*_sections(readings, remarks), *map(_calibrated, readings)]
    return textwrap.dedent(as_text(sections, width))


def watch_devices(stream: TextIO | None = None, interval_s: float = REFRESH_S) -> None:
    """Show the devices until Ctrl-C, read again every `interval_s` seconds.

    Args:
        stream: standard output by default. If it is not a terminal, the readings are written one after the other.
        interval_s: seconds between readings.
    """
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    try:
        if not console.is_terminal or console.is_dumb_terminal:
            while True:
                print(render_devices(), file=stream, flush=True)
                time.sleep(interval_s)
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                live.update(Text(as_text(_sections(*_read()), console.width)), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return


def _read() -> tuple[list[_Reading], list[str]]:
    """Every device that answers; remarks on the others, and on anything unusual."""
    readings: list[_Reading] = []
    remarks: list[str] = []
    for device in available():
        try:
            reading = _Reading(device.info(), device.telemetry())
        except DeviceError as error:
            remarks.append(str(error))
            continue
        readings.append(reading)
        remarks += reading.info.notes
    if not _has_gpu(readings):
        remarks.append(f"no GPU: {nvml.why_no_gpu()}")
    return readings, list(dict.fromkeys(remarks))


def _has_gpu(readings: list[_Reading]) -> bool:
    return any(capabilities_of(reading.info.name).own_processors for reading in readings)


def _plain(reading: _Reading) -> dict[str, object]:
    processes = [{"pid": pid, "used_bytes": held, "name": name} for pid, held, name in reading.telemetry.processes]
    found = reading.calibration
    return {
        **asdict(reading.info),
        "telemetry": {**asdict(reading.telemetry), "processes": processes},
        "calibration": None if found is None else {**found.to_dict(), "kept": str(reading.cache.path)},
    }


def _calibrated(reading: _Reading) -> Section:
    """What was measured of a device, and how to measure it again."""
    name, found = reading.info.name, reading.calibration
    if found is None:
        return Section("", (Paragraph(f"{name}, as it is now, was not measured yet: the next search measures it."),))
    rows = [
        (
            rate.arithmetic,
            CALLED[rate.work],
            *(_at_a_size(rate, place) for place in (0, -1)),
            "" if (gain := found.gain(rate.work, rate.arithmetic)) is None else f"{gain:.3g}x",
            rate.failure,
        )
        for rate in found.rates
    ]
    headings = ("type", "of " + name, "small (size)", "large (size)", "to fp32", "stopped by")
    figures = [
        f"{words} {text}"
        for words, text in (
            ("memory", found.bytes_per_s and format_per_s(found.bytes_per_s, "B")),
            ("launching an operator", found.launch_s and format_seconds(found.launch_s)),
            ("from the host", found.host_to_device_bytes_per_s and format_per_s(found.host_to_device_bytes_per_s, "B")),
            ("allocating", found.allocation_s and format_seconds(found.allocation_s)),
        )
        if text
    ]
    again = f"Measured {found.measured_at} in {format_seconds(found.wall_s)}. To measure again, delete {reading.cache.path} and search."
    return Section("", (table(headings, rows), Paragraph(", ".join(figures)), Paragraph(again)))


def _at_a_size(rate: Rate, place: int) -> str:
    return f"{format_per_s(rate.flops_per_s[place], 'FLOP')} ({rate.sizes[place]})" if rate.sizes else ""


def _sections(readings: list[_Reading], remarks: list[str]) -> list[Section]:
    rows = [_row(reading) for reading in readings]
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)] if rows else []
    sections = [Section("", (table(shown, ([row[heading] for heading in shown] for row in rows)),))]
    processes = sorted(
        (reading.info.name, str(pid), format_bytes(used_bytes) if used_bytes else "", name or "?")
        for reading in readings
        for pid, used_bytes, name in reading.telemetry.processes
    )
    if processes:
        sections.append(Section("", (table(("device", "pid", "memory", "process"), processes),)))
    if remarks:
        sections.append(Section("", tuple(map(Paragraph, remarks))))
    return sections


def _row(reading: _Reading) -> dict[str, str]:
    info, values = reading.info, reading.telemetry.values
    used_bytes = values.get("used_bytes", info.total_bytes - info.free_bytes)
    if info.num_threads:
        load = f"{values['load_1m']:.2f} on {plural(info.num_threads, 'thread')}"
    else:
        load = _shown(values, "gpu_utilization", "{:.0f} %")
    power = _shown(values, "power_w", "{:.0f} W")
    if power and "power_limit_w" in values:
        power += f" of {values['power_limit_w']:.0f} W"
    return {
        "device": info.name,
        "model": info.model,
        "memory used": f"{format_bytes(used_bytes)} of {format_bytes(info.total_bytes)}",
        "load": load,
        "temperature": _shown(values, "temperature_c", "{:.0f} °C"),
        "power": power,
        "slowed by": ", ".join(reading.telemetry.throttle_reasons),
    }


def _shown(values: dict[str, float], name: str, form: str) -> str:
    return form.format(values[name]) if name in values else ""
