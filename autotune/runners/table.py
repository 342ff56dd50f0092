"""A recorded table: every config of a space on one device, measured several times over, in one plain CSV file.

The first line names the format, the second holds the metadata as JSON, the rest is CSV with one row a probe:
`pandas.read_csv(path, comment="#")` reads it, too.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.errors import AutotuneError
from autotune.records.config import Choice, Config
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.rounds import round_effects

MAGIC = "# autotune table, format 1"
Z95 = 1.96
PHASES = ("data", "forward", "backward", "optimizer")


class TableError(AutotuneError):
    """A table's file is not one, is another's, or lacks a config that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a table's measurements depend on.

    Attributes:
        task, source_hash, num_parameters: of the model file; `source_hash` changes with its code.
        device: as the user writes it; `model` is the hardware's name; `num_threads` of torch on a CPU.
        total_bytes: memory of the device; `memory_limit_bytes` what the probes were allowed.
        outside_bytes: what a probe's process held before it built the model, on the scale of the peaks.
        global_batch: samples per optimizer step, or None.
        baseline: the baseline's config, complete.
        choices: technique -> choices swept, every technique present; one choice means that it was left at that.
        seed, max_timed_s, max_warmup_s: of the probes.
        date: of the first probe, ISO 8601.
    """

    task: str
    source_hash: str
    num_parameters: int
    device: str
    model: str
    num_threads: int
    total_bytes: int
    memory_limit_bytes: int
    outside_bytes: int
    driver: str
    torch: str
    autotune: str
    global_batch: int | None
    baseline: Mapping[str, Choice]
    choices: Mapping[str, tuple[Choice, ...]]
    seed: int
    max_timed_s: float
    max_warmup_s: float
    date: str

    def differences(self, other: Header) -> list[str]:
        """What keeps two sweeps from sharing a table, in words; dates and free memory may differ."""
        ours, theirs = json.loads(self.to_json()), json.loads(other.to_json())
        for ignored in ("date", "outside_bytes"):
            ours.pop(ignored), theirs.pop(ignored)
        return [f"{key} was {ours[key]!r} and is {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Header:
        """Rebuild a header; raises ValueError, TypeError or KeyError when it is none."""
        data = json.loads(text)
        data["choices"] = {name: tuple(choices) for name, choices in data["choices"].items()}
        return Header(**{field.name: data[field.name] for field in fields(Header)})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One probe of a table."""

    config: Config
    repeat: int  # counted from 0
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a table says of one config, over its repeats.

    Attributes:
        samples_per_s: geometric mean; 0 for a config that did not run.
        half_width: half the 95 % interval of that mean, as a share of it, from the noise of all the table's repeats
            (one config's few say little of it); endless where nothing was repeated.
        peak_bytes: the largest peak of any repeat.
    """

    kind: Kind
    samples_per_s: float
    half_width: float
    peak_bytes: int
    num_repeats: int


@dataclass(frozen=True)
class Table:
    """A header and its rows, in the order in which they were measured."""

    header: Header
    rows: tuple[Row, ...]
    path: Path

    @cached_property
    def repeats(self) -> dict[Config, tuple[Row, ...]]:
        """Every config's rows."""
        return _by_config(self.rows)

    @cached_property
    def figures(self) -> dict[Config, Figure]:
        """What is known of each config."""
        return figures_of(self.rows)


def figures_of(rows: Sequence[Row]) -> dict[Config, Figure]:
    """What repeated probes say of each config. A config that failed once counts as failed.

    What a round as a whole was faster or slower by (other samples, the machine's mood) is taken out first.
    """
    by_config = _by_config(rows)
    logs = {
        config: {row.repeat: math.log(row.outcome.measurement.samples_per_s) for row in mine if row.outcome.measurement}
        for config, mine in by_config.items()
        if all(row.outcome.ok for row in mine)
    }
    effects = round_effects(logs)
    residuals = {
        config: [value - effects[number] for number, value in values.items()] for config, values in logs.items()
    }
    noise = _noise(residuals.values())
    figures = {}
    for config, mine in by_config.items():
        peak_bytes = max(
            row.outcome.measurement.peak_bytes if row.outcome.measurement else row.outcome.peak_bytes for row in mine
        )
        if config not in logs:
            kind = next(row.outcome.kind for row in mine if not row.outcome.ok)
            figures[config] = Figure(
                kind=kind, samples_per_s=0.0, half_width=math.inf, peak_bytes=peak_bytes, num_repeats=len(mine)
            )
            continue
        values = residuals[config]
        figures[config] = Figure(
            kind=Kind.OK,
            samples_per_s=math.exp(fmean(values)),
            half_width=Z95 * noise / math.sqrt(len(values)),
            peak_bytes=peak_bytes,
            num_repeats=len(values),
        )
    return figures


def _by_config(rows: Sequence[Row]) -> dict[Config, tuple[Row, ...]]:
    found: dict[Config, list[Row]] = {}
    for row in rows:
        found.setdefault(row.config, []).append(row)
    return {config: tuple(mine) for config, mine in found.items()}


def _noise(values: Iterable[Sequence[float]]) -> float:
    """Standard deviation of one probe around its config's mean, pooled over the configs that were repeated."""
    repeated = [mine for mine in values if len(mine) > 1]
    freedom = sum(len(mine) - 1 for mine in repeated)
    if not freedom:
        return math.inf
    return math.sqrt(sum((value - fmean(mine)) ** 2 for mine in repeated for value in mine) / freedom)


def start(path: Path, header: Header) -> None:
    """Write a table without rows."""
    path.write_text(f"{MAGIC}\n# {header.to_json()}\n{','.join(_columns(header))}\n")


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
    else:
        speeds = ("samples_per_s", "samples_per_s_low", "samples_per_s_high")
        cells |= {name: _short(getattr(measured, name)) for name in (*speeds, "train_s")}
        cells |= {name: getattr(measured, name) for name in ("peak_bytes", "num_steps")}
        cells |= {f"{phase}_s": _short(seconds) for phase, seconds in measured.phases_s.items()}
    line = io.StringIO()
    with path.open("r+") as file:
        columns = [file.readline() for _ in range(3)][-1].strip().split(",")  # an older table has one that is gone
        csv.DictWriter(line, columns, lineterminator="\n").writerow(cells)
        file.seek(0, os.SEEK_END)
        file.write(line.getvalue())


def read(path: str | Path) -> Table:
    """Read a table.

    Raises:
        TableError: no such file, not a table, or a table whose columns do not belong to its header.
    """
    path = Path(path)
    try:
        lines = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(
            f"the table {path} cannot be read: {error}; expected a file that `autotune sweep` wrote"
        ) from None
    if not lines or lines[0].rstrip() != MAGIC:
        first = lines[0].rstrip()[:60] if lines else ""
        raise TableError(
            f"{path} is no table of this format: it begins with {first!r}, expected {MAGIC!r}; "
            "`autotune sweep` writes one"
        )
    try:
        header = Header.from_json(lines[1].removeprefix("# "))
    except (IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(
            f"the second line of {path} is not a table's metadata ({type(error).__name__}: {error}); record it anew "
            "with `autotune sweep`"
        ) from None
    reader = csv.DictReader(lines[2:])
    missing = [name for name in _columns(header) if name not in (reader.fieldnames or ())]
    if missing:
        raise TableError(f"the table {path} has no column {missing[0]!r}, which its metadata asks for; record it anew")
    rows = []
    for number, cells in enumerate(reader, start=4):
        if lines[-1].endswith("\n") or number < len(lines):  # a last line that was cut short is measured again
            try:
                rows.append(_row(header, cells))
            except (ValueError, KeyError, TypeError) as error:
                raise TableError(
                    f"line {number} of {path} is not a probe: {error}; remove it, or record anew"
                ) from None
    return Table(header=header, rows=tuple(rows), path=path)


def _row(header: Header, cells: Mapping[str, str]) -> Row:
    choices: dict[str, Choice] = {name: options[0] for name, options in header.choices.items()}
    choices |= {name: {str(c): c for c in header.choices[name]}[cells[name]] for name in _swept(header)}
    kind = Kind(cells["kind"])
    wall_s, train_s, peak_bytes = float(cells["wall_s"]), float(cells["train_s"]), int(cells["peak_bytes"])
    config = Config(tuple(choices.items()))
    if kind is not Kind.OK:
        outcome = Outcome(
            kind=kind,
            cause=cells["cause"],
            wall_s=wall_s,
            train_s=train_s,
            peak_bytes=peak_bytes,
            attempted_bytes=int(cells["attempted_bytes"]),
        )
        return Row(config=config, repeat=int(cells["repeat"]), outcome=outcome)
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
    outcome = Outcome(kind=Kind.OK, measurement=measured, wall_s=wall_s)
    return Row(config=config, repeat=int(cells["repeat"]), outcome=outcome)


def _swept(header: Header) -> list[str]:
    """The techniques that a row has to name."""
    derived = ["accumulation_steps"] if header.global_batch is not None else []
    return [name for name, choices in header.choices.items() if len(choices) > 1 or name in derived]


def _columns(header: Header) -> list[str]:
    figures = ["samples_per_s", "samples_per_s_low", "samples_per_s_high", "peak_bytes", "attempted_bytes"]
    times = ["wall_s", "train_s", *(f"{phase}_s" for phase in PHASES)]
    return [*_swept(header), "repeat", "kind", *figures, "num_steps", *times, "cause"]


def _short(value: float) -> str:
    """Five significant digits: finer than any repeat agrees with another."""
    return f"{value:.5g}"


__all__ = ["Figure", "Header", "Row", "Table", "TableError", "append", "figures_of", "mend", "read", "start"]
