"""A recorded table: every config of a space on one device, measured several times over, and the file that keeps it.

The file is plain CSV, and the traces of its memory are JSON beside it. The first line names the format, the second holds the metadata
as JSON, the rest is CSV with one row a probe: `pandas.read_csv(path, comment="#")` reads it, too.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.errors import AutotuneError
from autotune.prediction.traces import Traces
from autotune.records.config import ACCUMULATION, ALONE, BATCH_SIZE, Choice, Config, World
from autotune.records.device import NO_COMMUNICATORS, Communicators, DeviceInfo, same_memory
from autotune.records.formats import Record
from autotune.records.inspection import BatchSupport, Inspection, ModelSignature, Support, TaskFacts
from autotune.records.measured import NORMAL_95, round_effects
from autotune.records.outcome import Bound, Kind, Measurement, Outcome
from autotune.techniques import Technique, Techniques

FORMAT = 2  # format 1 holds less of the inspection, and opens
MAGIC = f"# autotune table, format {FORMAT}"
SPEEDS = ("samples_per_s", "samples_per_s_low", "samples_per_s_high")
JOULES = "joules_per_sample"  # its column is missing in older tables
PHASES = ("data", "forward", "backward", "optimizer")
# when a sweep goes on
_NOT_COMPARED = (
    "date",
    "signature",
    "outside_bytes",
    "communicators",
    "baseline_given",
    "facts",
    "reasons",
    "notes",
    "always",
)


class TableError(AutotuneError):
    """A file is not a table, belongs to another sweep, or lacks a config that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Header(Record):
    """What a table's measurements depend on: the inspection (`Inspection` says what is what) and the probes' settings.

    Attributes:
        choices: key of a config -> choices swept, every key present; one choice means that it was left at that.
        reasons, notes: key of a config -> `Support.reason` and `Support.note` of the inspection, where there is one.
        always: technique -> `Support.always` of the inspection, where there is any; older tables do not hold it.
        facts: of the task, from the inspection, but for the dataset's positions; tables of format 1 do not hold them.
        date: of the first probe, ISO 8601.
        world: the processes that trained each config together.
        signature: the model's signature; None in older tables.
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
    choices: dict[str, tuple[Choice, ...]]
    seed: int
    max_timed_s: float
    max_warmup_s: float
    date: str
    # since format 2
    capability: tuple[int, int] = (0, 0)
    baseline_given: bool = True
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    always: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    facts: TaskFacts | None = None
    world: World = ALONE
    communicators: Communicators = NO_COMMUNICATORS
    signature: ModelSignature | None = None

    def differences(self, other: Header) -> list[str]:
        """What keeps two sweeps from sharing a table, in words; dates and free memory may differ."""
        ours, theirs = self.to_dict(), other.to_dict()
        compared = [key for key in ours if key not in _NOT_COMPARED]
        if same_memory(self.total_bytes, other.total_bytes):
            compared.remove("total_bytes")
        return [f"{key} was {ours[key]!r} and is {theirs[key]!r}" for key in compared if ours[key] != theirs[key]]

    def device_info(self) -> DeviceInfo:
        """The device that the table was recorded on; what the probes were allowed counts as free."""
        return DeviceInfo(
            name=self.device,
            model=self.model,
            total_bytes=self.total_bytes,
            free_bytes=self.memory_limit_bytes,
            num_threads=self.num_threads,
            driver=self.driver,
            capability=self.capability,
            torch_version=self.torch,
        )

    def inspection(self, techniques: Techniques) -> Inspection:
        """What the task's inspection would say if nothing but what was swept applied.

        Where the table does not hold the facts, parameters are taken for trainable ones of four bytes.
        """
        return Inspection(
            facts=self.facts
            or TaskFacts(
                name=self.task,
                source_hash=self.source_hash,
                num_parameters=self.num_parameters,
                num_trainable=self.num_parameters,
                parameter_bytes=4 * self.num_parameters,
            ),
            device=self.device_info(),
            global_batch=self.global_batch,
            world=self.world,
            baseline=techniques.complete(self.baseline, global_batch=self.global_batch, world=self.world).as_dict(),
            baseline_given=self.baseline_given,
            batch=BatchSupport(
                sizes=tuple(map(int, self.choices[BATCH_SIZE])),
                accumulation_steps=tuple(map(int, self.choices[ACCUMULATION])),
                sizes_reason=self.reasons.get(BATCH_SIZE, ""),
                reason=self.reasons.get(ACCUMULATION, ""),
                note=self.notes.get(ACCUMULATION, ""),
            ),
            support={name: self._support(technique) for name, technique in techniques.items()},
            outside_bytes=self.outside_bytes,
            communicators=self.communicators,
            signature=self.signature,
        )

    def _support(self, technique: Technique) -> Support:
        """Of a technique that is younger than the table only `off` was swept."""
        name = technique.name
        choices = tuple(self.choices.get(name, ())) or (technique.off,)
        return Support(
            choices=choices,
            reason=self.reasons.get(name, ""),
            note=self.notes.get(name, ""),
            always=self.always.get(name, ()),
        )


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
    """A header and its rows, in the order in which they were measured.

    Attributes:
        traces: of the space's memory, from the file beside the table; None where there is none.
    """

    header: Header
    rows: tuple[Row, ...]
    path: Path
    traces: Traces | None = None

    @cached_property
    def repeats(self) -> dict[Config, tuple[Row, ...]]:
        """Every config's rows."""
        return _by_config(self.rows)

    @property
    def no_energy(self) -> str:
        """Why it tells no energy; empty where every config that ran has a probe that tells it."""
        ran = {row.config for row in self.rows if row.outcome.measurement}
        known = {row.config for row in self.rows if (m := row.outcome.measurement) and m.joules_per_sample is not None}
        if ran == known:
            return ""
        again = "record it again where energy can be read, on a GPU with --timed 2s or more"
        return f"the table {self.path} holds no energy of {len(ran - known)} of its configs; {again}"

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
        values = residuals.get(config)
        figures[config] = Figure(
            kind=next((row.outcome.kind for row in mine if not row.outcome.ok), Kind.OK),
            samples_per_s=math.exp(fmean(values)) if values else 0.0,
            half_width=NORMAL_95 * noise / math.sqrt(len(values)) if values else math.inf,
            peak_bytes=max((row.outcome.measurement or row.outcome).peak_bytes for row in mine),
            num_repeats=len(mine),
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
    path.write_text(f"{MAGIC}\n# {json.dumps(header.to_dict())}\n{','.join(_columns(header))}\n", encoding="utf-8")


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
        cells |= {name: _short(getattr(measured, name)) for name in (*SPEEDS, "train_s")}
        cells |= {name: getattr(measured, name) for name in ("peak_bytes", "num_steps")}
        cells |= {} if measured.joules_per_sample is None else {JOULES: _short(measured.joules_per_sample)}
        cells |= {f"{phase}_s": _short(seconds) for phase, seconds in measured.phases_s.items() if phase in PHASES}
    line = io.StringIO()
    with path.open("r+", encoding="utf-8") as file:
        columns = [file.readline() for _ in range(3)][-1].strip().split(",")  # an older table has other ones
        csv.DictWriter(line, columns, extrasaction="ignore", lineterminator="\n").writerow(cells)
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
    missing = [name for name in _columns(header) if name not in (*(reader.fieldnames or ()), JOULES)]
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
        at_most = cells["samples_per_s_high"]
        outcome = Outcome(
            kind=kind,
            cause=cells["cause"],
            wall_s=wall_s,
            train_s=train_s,
            peak_bytes=0 if at_most else peak_bytes,
            attempted_bytes=int(cells["attempted_bytes"]),
            bound=Bound(samples_per_s_high=float(at_most), peak_bytes_low=peak_bytes) if at_most else None,
            world=header.world,
        )
        return Row(config=config, repeat=repeat, outcome=outcome)
    speed, low, high = (float(cells[name]) for name in SPEEDS)
    measured = Measurement(
        samples_per_s=speed,
        samples_per_s_low=low,
        samples_per_s_high=high,
        step_s=config.plan_in(header.world).samples_per_step / speed,
        peak_bytes=peak_bytes,
        block_samples_per_s=(speed,),
        num_steps=int(cells["num_steps"]),
        setup_s=0.0,
        warmup_s=0.0,
        timed_s=train_s,
        phases_s={phase: float(cells[f"{phase}_s"]) for phase in PHASES if cells[f"{phase}_s"]},
        joules_per_sample=float(cells[JOULES]) if cells.get(JOULES) else None,
    )
    outcome = Outcome(kind=Kind.OK, measurement=measured, wall_s=wall_s, world=header.world)
    return Row(config=config, repeat=repeat, outcome=outcome)


def _swept(header: Header) -> list[str]:
    """The keys of a config that a row has to name."""
    derived = ["accumulation_steps"] if header.global_batch is not None else []
    return [name for name, choices in header.choices.items() if len(choices) > 1 or name in derived]


def _columns(header: Header) -> list[str]:
    times = ["wall_s", "train_s", *(f"{phase}_s" for phase in PHASES)]
    figures = [*SPEEDS, "peak_bytes", "attempted_bytes", "num_steps"]
    return [*_swept(header), "repeat", "kind", *figures, *times, JOULES, "cause"]


def _short(value: float) -> str:
    """Five significant digits: finer than any repeat agrees with another."""
    return f"{value:.5g}"
