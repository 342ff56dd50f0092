"""`autotune devices`: what there is to train on, and how busy it is."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TextIO

from autotune.devices import available, nvml
from autotune.devices.base import Telemetry
from autotune.errors import DeviceError
from autotune.records.device import DeviceInfo
from autotune.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_S = 1.0


@dataclass(frozen=True)
class _Reading:
    info: DeviceInfo
    telemetry: Telemetry


def render_devices(*, as_json: bool = False) -> str:
    """Every device with its memory, load, temperature, power and processes, as text or as one JSON document.

    The JSON has `devices` (a list: the fields of `DeviceInfo`, and `telemetry` with `values`, `throttle_reasons` and
    `processes`) and `no_gpu` (why there is none, else null).
    """
    from rich.console import Console

    readings, remarks = _read()
    if as_json:
        devices = [
            asdict(reading.info)
            | {
                "telemetry": {
                    "values": reading.telemetry.values,
                    "throttle_reasons": reading.telemetry.throttle_reasons,
                    "processes": [
                        {"pid": pid, "used_bytes": used_bytes, "name": name}
                        for pid, used_bytes, name in reading.telemetry.processes
                    ],
                }
            }
            for reading in readings
        ]
        return json.dumps({"devices": devices, "no_gpu": None if _has_gpu(readings) else nvml.why_no_gpu()}, indent=2)
    text = io.StringIO()
    width = Console().width if sys.stdout.isatty() else 160  # a pipe wraps nothing that a device usually says
    Console(file=text, width=width, highlight=False, color_system=None).print(_renderable(readings, remarks))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def watch_devices(stream: TextIO | None = None, interval_s: float = _REFRESH_S) -> None:
    """Show the devices until Ctrl-C, read again every `interval_s` seconds.

    Args:
        stream: where to; standard output by default. If it is not a terminal, one reading after the other is written.
        interval_s: seconds between readings.
    """
    from rich.console import Console
    from rich.live import Live

    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    try:
        if not console.is_terminal or console.is_dumb_terminal:
            while True:
                print(render_devices(), file=stream, flush=True)
                time.sleep(interval_s)
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                live.update(_renderable(*_read()), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return


def _read() -> tuple[list[_Reading], list[str]]:
    """Every device that answers, and remarks about the others and on what stands out."""
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
    return any(reading.info.driver for reading in readings)


def _renderable(readings: list[_Reading], remarks: list[str]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    rows = [_row(reading) for reading in readings]
    shown = [heading for heading in rows[0] if any(row[heading] for row in rows)] if rows else []
    for heading in shown:
        table.add_column(heading, no_wrap=heading not in ("model", "slowed by"))
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    parts: list[RenderableType] = [table]
    processes = [(reading.info.name, *process) for reading in readings for process in reading.telemetry.processes]
    if processes:
        listing = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for heading in ("device", "pid", "memory", "process"):
            listing.add_column(heading)
        for name, pid, used_bytes, process_name in sorted(processes):
            listing.add_row(name, str(pid), format_bytes(used_bytes) if used_bytes else "", process_name or "?")
        parts.append(Padding(listing, (1, 0, 0, 0)))
    if remarks:
        parts.append(Padding(Text("\n".join(remarks)), (1, 0, 0, 0)))
    return Group(*parts)


def _row(reading: _Reading) -> dict[str, str]:
    info, values = reading.info, reading.telemetry.values
    used_bytes = values.get("used_bytes", info.total_bytes - info.free_bytes)
    if info.num_threads:
        load = f"{values['load_1m']:.2f} on {info.num_threads} thread{'' if info.num_threads == 1 else 's'}"
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
