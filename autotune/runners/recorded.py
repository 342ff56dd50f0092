"""What a recorded table holds: every config of a space on one device, measured several times over, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from autotune.errors import AutotuneError
from autotune.prediction.traces import Traces
from autotune.records.batch_plan import ACCUMULATION, BATCH_SIZE
from autotune.records.config import Choice, Config
from autotune.records.device import DeviceInfo, same_memory
from autotune.records.formats import Record
from autotune.records.inspection import BatchSupport, Inspection, Support, TaskFacts
from autotune.records.intervals import NORMAL_95
from autotune.records.outcome import Kind, Outcome
from autotune.records.rounds import round_effects
from autotune.techniques import Technique, Techniques

# when a sweep goes on
_NOT_COMPARED = ("date", "outside_bytes", "baseline_given", "facts", "reasons", "notes", "always")


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
            baseline=techniques.complete(self.baseline, global_batch=self.global_batch).as_dict(),
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
