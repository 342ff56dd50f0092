"""The file of a recorded table: plain CSV, and the traces of its memory as JSON beside it.

The first line names the format, the second holds the metadata as JSON, the rest is CSV with one row a probe:
`pandas.read_csv(path, comment="#")` reads it, too.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.prediction.traces import Traces
from autotune.records.config import Choice
from autotune.records.outcome import Bound, Kind, Measurement, Outcome
from autotune.runners.recorded import Header, Row, Table, TableError
from autotune.techniques import Techniques

FORMAT = 2  # format 1 holds less of the inspection, and opens
MAGIC = f"# autotune table, format {FORMAT}"
PHASES = ("data", "forward", "backward", "optimizer")


def start(path: Path, header: Header) -> None:
    """Write a table without rows."""
    path.write_text(f"{MAGIC}\n# {json.dumps(header.to_dict())}\n{','.join(_columns(header))}\n", encoding="utf-8")


def mend(path: Path) -> None:
    """Drop a last line that was cut short: what is appended next would go on in it."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def append(path: Path, header: Header, row: Row) -> None:
    """Add a row, at once, so that a sweep that dies loses nothing."""
    measured = row.outcome.measurement
    cells: dict[str, Any] = {name: row.config[name] for name in _swept(header)}
    cells |= {"repeat": row.repeat, "kind": str(row.outcome.kind), "wall_s": _short(row.outcome.wall_s)}
    if measured is None:
        cells |= {"peak_bytes": row.outcome.peak_bytes, "attempted_bytes": row.outcome.attempted_bytes}
        cells |= {"train_s": _short(row.outcome.train_s), "cause": row.outcome.cause}
        if (bound := row.outcome.bound) and bound.samples_per_s_high is not None:
            cells |= {"samples_per_s_high": _short(bound.samples_per_s_high), "peak_bytes": bound.peak_bytes_low}
    else:
        speeds = ("samples_per_s", "samples_per_s_low", "samples_per_s_high")
        cells |= {name: _short(getattr(measured, name)) for name in (*speeds, "train_s")}
        cells |= {name: getattr(measured, name) for name in ("peak_bytes", "num_steps")}
        cells |= {f"{phase}_s": _short(seconds) for phase, seconds in measured.phases_s.items() if phase in PHASES}
    line = io.StringIO()
    with path.open("r+", encoding="utf-8") as file:
        columns = [file.readline() for _ in range(3)][-1].strip().split(",")  # an older table has one that is gone
        csv.DictWriter(line, columns, lineterminator="\n").writerow(cells)
        file.seek(0, os.SEEK_END)
        file.write(line.getvalue())


def read(path: str | Path, techniques: Techniques) -> Table:
    """Read a table.

    Args:
        techniques: those of its configs; what is younger than the table was off.

    Raises:
        TableError: no such file, not a table, or a table whose columns do not belong to its header.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(
            f"the table {path} cannot be read: {error}; expected a file that `autotune sweep` wrote"
        ) from None
    _require_known_format(path, lines[0].rstrip() if lines else "")
    try:
        header = Header.from_dict(json.loads(lines[1].removeprefix("# ")))
    except (IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(
            f"the second line of {path} is not a table's metadata ({type(error).__name__}: {error}); record it again "
            "with `autotune sweep`"
        ) from None
    reader = csv.DictReader(lines[2:])
    missing = [name for name in _columns(header) if name not in (reader.fieldnames or ())]
    if missing:
        raise TableError(f"the table {path} has no column {missing[0]!r}, which its metadata asks for; record it again")
    rows = []
    for number, cells in enumerate(reader, start=4):
        if lines[-1].endswith("\n") or number < len(lines):  # a last line that was cut short is measured again
            try:
                rows.append(_row(header, cells, techniques))
            except (ValueError, KeyError, TypeError) as error:
                raise TableError(
                    f"line {number} of {path} is not a probe: {error}; remove the line, or record the table again"
                ) from None
    return Table(header=header, rows=tuple(rows), path=path, traces=_read_traces(path))


def traces_path(path: Path) -> Path:
    """Where the traces of a table are: `cpu.traces.json` beside `cpu.csv`."""
    return path.with_suffix(".traces.json")


def write_traces(path: Path, traces: Traces) -> None:
    """Write the traces of the table at `path` beside it."""
    traces_path(path).write_text(json.dumps(traces.to_dict()) + "\n", encoding="utf-8")


def _read_traces(path: Path) -> Traces | None:
    """None also for traces of another format: memory is then learned from probes."""
    try:
        return Traces.from_dict(json.loads(traces_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _require_known_format(path: Path, first_line: str) -> None:
    found = re.fullmatch(r"# autotune table, format (\d+)", first_line)
    if found is None:
        raise TableError(
            f"{path} is not a recorded table: it begins with {first_line[:60]!r}, expected {MAGIC!r}; "
            "`autotune sweep` writes one"
        )
    if int(found[1]) > FORMAT:
        raise TableError(
            f"{path} has format {found[1]}, and this autotune reads formats up to {FORMAT}; "
            "upgrade it (pip install --upgrade autotune-torch), or record the table again with `autotune sweep`"
        )


def _row(header: Header, cells: Mapping[str, str], techniques: Techniques) -> Row:
    choices: dict[str, Choice] = {name: options[0] for name, options in header.choices.items()}
    choices |= {name: {str(c): c for c in header.choices[name]}[cells[name]] for name in _swept(header)}
    kind, repeat = Kind(cells["kind"]), int(cells["repeat"])
    wall_s, train_s, peak_bytes = float(cells["wall_s"]), float(cells["train_s"]), int(cells["peak_bytes"])
    config = techniques.complete(choices)  # a technique that is younger than the table was off
    if kind is not Kind.OK:
        high = cells["samples_per_s_high"]
        outcome = Outcome(
            kind=kind,
            cause=cells["cause"],
            wall_s=wall_s,
            train_s=train_s,
            peak_bytes=0 if high else peak_bytes,
            attempted_bytes=int(cells["attempted_bytes"]),
            bound=Bound(samples_per_s_high=float(high), peak_bytes_low=peak_bytes) if high else None,
        )
        return Row(config=config, repeat=repeat, outcome=outcome)
    speed = float(cells["samples_per_s"])
    measured = Measurement(
        samples_per_s=speed,
        samples_per_s_low=float(cells["samples_per_s_low"]),
        samples_per_s_high=float(cells["samples_per_s_high"]),
        step_s=config.samples_per_step / speed,
        peak_bytes=peak_bytes,
        block_samples_per_s=(speed,),
        num_steps=int(cells["num_steps"]),
        setup_s=0.0,
        warmup_s=0.0,
        timed_s=train_s,
        phases_s={phase: float(cells[f"{phase}_s"]) for phase in PHASES if cells[f"{phase}_s"]},
    )
    return Row(config=config, repeat=repeat, outcome=Outcome(kind=Kind.OK, measurement=measured, wall_s=wall_s))


def _swept(header: Header) -> list[str]:
    """The keys of a config that a row has to name."""
    derived = ["accumulation_steps"] if header.global_batch is not None else []
    return [name for name, choices in header.choices.items() if len(choices) > 1 or name in derived]


def _columns(header: Header) -> list[str]:
    figures = ["samples_per_s", "samples_per_s_low", "samples_per_s_high", "peak_bytes", "attempted_bytes"]
    times = ["wall_s", "train_s", *(f"{phase}_s" for phase in PHASES)]
    return [*_swept(header), "repeat", "kind", *figures, "num_steps", *times, "cause"]


def _short(value: float) -> str:
    """Five significant digits: finer than any repeat agrees with another."""
    return f"{value:.5g}"
