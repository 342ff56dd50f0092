"""`sweep()`: a whole space, measured several times over in interleaved rounds, into a recorded table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune import __version__, techniques
from autotune.devices import open_device
from autotune.errors import ConfigError
from autotune.records.config import Choice, Config
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome, calmer
from autotune.records.settings import ProbeSettings
from autotune.runners import table
from autotune.runners.local import ProcessProber
from autotune.runners.table import Figure, Header, Row, Table, TableError, figures_of
from autotune.space import ACCUMULATION, Space, build_space, distributions_of
from autotune.task.source import TaskSource
from autotune.tuning.run import inspection_failed

MIN_REPEATS = 3  # below that an interval between processes says little
INSPECT_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What to sweep and how well.

    Attributes:
        grid: technique -> the choices to sweep; a technique that is not named is swept over all that are searched.
        include, exclude: as in a search.
        interval: a config is repeated until the 95 % interval of its throughput is within this share of it, either side,
        max_repeats: or until it was repeated so often.
        max_timed_s, max_warmup_s: of each probe: processes differ more than blocks within one, so many short ones do best.
    """

    out: Path
    device: str = "auto"
    memory_limit_bytes: int | None = None
    global_batch: int | None = None
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    interval: float = 0.03
    max_repeats: int = 8
    max_timed_s: float = 0.5
    max_warmup_s: float = 1.0
    probe_timeout_s: float = 120.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One more row of the table. `left` is how many this round still has."""

    row: Row
    round: int
    left: int


def sweep(source: TaskSource, options: SweepOptions, on_row: Callable[[Progress], None]) -> Table:
    """Measure every config of the grid; a table that is there already is carried on with.

    Raises:
        TaskError, ConfigError, DeviceError: the user can put it right; see the message.
        NothingFeasible: not even two samples train within the memory limit.
        TableError: the file is no table, or was recorded of something else.
    """
    if options.global_batch is not None:
        source = source.with_global_batch(options.global_batch)
    info = open_device(options.device).info()
    begun = table.read(options.out) if options.out.exists() else None
    limit_bytes = options.memory_limit_bytes or (begun.header.memory_limit_bytes if begun else info.free_bytes)
    settings = ProbeSettings(
        device=info.name,
        memory_limit_bytes=limit_bytes,
        max_timed_s=options.max_timed_s,
        max_warmup_s=options.max_warmup_s,
        timeout_s=options.probe_timeout_s,
        seed=options.seed,
    )
    with ProcessProber(source, logs=options.out.with_suffix(".logs"), import_timeout_s=INSPECT_TIMEOUT_S) as prober:
        inspection = prober.inspect(info.name, limit_bytes, INSPECT_TIMEOUT_S)
        if isinstance(inspection, Outcome):
            raise inspection_failed(inspection, limit_bytes)
        space, _ = build_space(inspection, fix={}, include=options.include, exclude=options.exclude)
        space = _restricted(space, options.grid)
        recorded = _carried_on(begun, options.out, _header(inspection, space, settings))
        rows = list(recorded.rows)
        for number in range(options.max_repeats):
            known, done = figures_of(rows), {row.config for row in rows if row.repeat == number}
            configs = [config for config in dict.fromkeys((space.baseline, *space)) if config not in done]
            todo = [config for config in configs if _wants(known.get(config), options)]
            random.Random(f"{options.seed} {number}").shuffle(todo)
            # every round draws other samples, the same for all of its configs
            seeded = settings.replace(seed=options.seed + number)
            for position, config in enumerate(todo, start=1):
                row = Row(config=config, repeat=number, outcome=_run(prober, config, seeded))
                rows.append(row)
                table.append(options.out, recorded.header, row)
                on_row(Progress(row=row, round=number, left=len(todo) - position))
    return table.read(options.out)


def space_of(header: Header) -> Space:
    """The space that a table was swept over, as a search sees it."""
    baseline = techniques.complete(header.baseline, global_batch=header.global_batch)
    choices = dict(header.choices)
    accumulations = frozenset(choices[ACCUMULATION])
    if header.global_batch is not None:
        del choices[ACCUMULATION]
    return Space(
        choices=choices,
        distributions=distributions_of(choices),
        baseline=baseline,
        global_batch=header.global_batch,
        accumulations=accumulations,
    )


def _wants(known: Figure | None, options: SweepOptions) -> bool:
    """Whether a config is to be measured once more: what failed once is not tried again."""
    if known is None:
        return True
    if known.kind is not Kind.OK:
        return False
    return known.num_repeats < MIN_REPEATS or known.half_width > options.interval


def _run(prober: ProcessProber, config: Config, settings: ProbeSettings) -> Outcome:
    outcome = prober.run(config, settings)
    disturbed = outcome.measurement is not None and outcome.measurement.disturbances
    return calmer(outcome, prober.run(config, settings)) if disturbed else outcome


def _restricted(space: Space, grid: Mapping[str, Sequence[Any]]) -> Space:
    """The space over the grid's choices alone; the baseline's own are part of any grid.

    Raises:
        ConfigError: an unknown technique, or a choice that is not searched for this task on this device.
    """
    choices: dict[str, tuple[Choice, ...]] = dict(space.choices)
    for name, wanted in grid.items():
        technique = techniques.known(name)
        possible = choices.get(name, ())
        for choice in wanted:
            if techniques.validate(name, choice) not in possible:
                listed = ", ".join(map(str, possible)) or "what follows from batch_size and the global batch"
                raise ConfigError(
                    f"--grid {name}={choice} cannot be swept here; possible: {listed} (--include adds optional ones)"
                )
        kept = [choice for choice in possible if choice in wanted or choice == space.baseline[name]]
        choices[name] = tuple(sorted(kept)) if technique.ordered else tuple(kept)
    return replace(space, choices=choices, distributions=distributions_of(choices))


def _header(inspection: Inspection, space: Space, settings: ProbeSettings) -> Header:
    device = inspection.device
    assert settings.memory_limit_bytes is not None
    every = {**space.choices, ACCUMULATION: tuple(sorted({int(config[ACCUMULATION]) for config in space}))}
    return Header(
        task=inspection.facts["name"],
        source_hash=inspection.facts["source_hash"],
        num_parameters=inspection.facts["num_parameters"],
        device=device.name,
        model=device.model,
        num_threads=device.num_threads,
        total_bytes=device.total_bytes,
        memory_limit_bytes=settings.memory_limit_bytes,
        outside_bytes=inspection.outside_bytes,
        driver=device.driver,
        torch=device.torch_version,
        autotune=__version__,
        global_batch=inspection.global_batch,
        baseline=space.baseline.as_dict(),
        choices={name: every[name] for name in techniques.REGISTRY},
        seed=settings.seed,
        max_timed_s=settings.max_timed_s,
        max_warmup_s=settings.max_warmup_s,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _carried_on(begun: Table | None, path: Path, header: Header) -> Table:
    """The table to add to: what an earlier sweep left, or a new one."""
    if begun is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.start(path, header)
        except OSError as error:
            raise TableError(f"the table {path} cannot be written: {error.strerror}; choose another file") from None
        return table.read(path)
    if differences := begun.header.differences(header):
        raise TableError(
            f"the table {path} cannot be carried on with, since its measurements would not compare: "
            f"{'; '.join(differences)}. Choose another file, or move this one away"
        )
    table.mend(path)
    return begun


__all__ = ["Progress", "SweepOptions", "space_of", "sweep"]
