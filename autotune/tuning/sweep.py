"""`sweep()`: a whole space, measured several times over in interleaved rounds, into a recorded table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.devices import capabilities_of
from autotune.devices.targets import target_of
from autotune.errors import ConfigError
from autotune.files import mend
from autotune.records.config import ACCUMULATION, BATCH_KEYS, Choice, Config, ProbeSettings
from autotune.records.inspection import Inspection
from autotune.records.options import SweepOptions
from autotune.records.outcome import Kind, Outcome, calmer
from autotune.runners import table
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Runner
from autotune.runners.table import Figure, Header, Row, Table, TableError, figures_of
from autotune.space import Space, build_space, require_possible
from autotune.task.source import TaskSource
from autotune.techniques import Techniques
from autotune.tuning.communicators import keep_communicators, know_communicators
from autotune.tuning.inspecting import calibrate_device, inspect
from autotune.version import __version__

MIN_REPEATS = 3  # below that an interval between processes says little
INSPECT_TIMEOUT_S = 600.0
COMPARING_S = 5.0  # for finding out whether a batch may be cut
TRACE_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A new row of the table. `left` is the number of configs left in this round."""

    row: Row
    round: int
    left: int


def sweep(source: TaskSource, options: SweepOptions, on_row: Callable[[Progress], None]) -> Table:
    """Measure every config of the grid. An existing table is continued. The traces are written beside the table.

    Raises:
        TaskError, ConfigError, DeviceError: the user can fix it; see the message.
        NothingFeasible: not even the model fits within the memory limit.
        TableError: the file is not a table, or records something else.
    """
    source = source.with_global_batch(options.global_batch)
    runner = LocalRunner(
        source,
        device=options.device,
        devices=options.devices,
        logs=options.out.with_suffix(".logs"),
        import_timeout_s=INSPECT_TIMEOUT_S,
    )
    runner.keep_compiled(options.out.with_suffix(".compiled"))
    require_possible(runner.techniques, {}, (*options.grid, *options.include), options.exclude)
    for name, wanted in options.grid.items():
        for choice in wanted:
            runner.techniques.validate(name, choice)
    trained = _trained_choices(options.grid, runner.techniques)
    begun = table.read(options.out, runner.techniques) if options.out.exists() else None
    limit_bytes = options.memory_limit_bytes or (
        begun.header.memory_limit_bytes if begun else runner.slots()[0].device.free_bytes
    )
    window_s = capabilities_of(runner.slots()[0].device.name).energy_window_s
    settings = ProbeSettings(
        memory_limit_bytes=limit_bytes,
        world=runner.world,
        min_timed_s=min(window_s, options.max_timed_s),
        max_timed_s=options.max_timed_s,
        max_warmup_s=options.max_warmup_s,
        timeout_s=options.probe_timeout_s,
        seed=options.seed,
    )
    with runner:
        calibration, _ = calibrate_device(runner, runner.slots()[0].device, options.out.parent)
        job = InspectJob(
            memory_limit_bytes=limit_bytes,
            timeout_s=INSPECT_TIMEOUT_S,
            calibration=calibration,
            trained=trained,
            comparing_s=COMPARING_S,
            world=runner.world,
        )
        inspection = know_communicators(runner, inspect(runner, job), options.out.parent)
        space, _ = build_space(inspection, runner.techniques, include=options.include, exclude=options.exclude)
        space = _restrict(space, options.grid)
        recorded = _carried_on(begun, options.out, _header(inspection, space, settings), space.techniques)
        if recorded.traces is None:
            traces = runner.trace(space.tracing(), target_of(inspection.device), TRACE_TIMEOUT_S, world=space.world)
            table.write_traces(options.out, traces)
        rows = list(recorded.rows)
        for number in range(options.max_repeats):
            known, done = figures_of(rows), {row.config for row in rows if row.repeat == number}
            configs = [config for config in dict.fromkeys((space.baseline, *space)) if config not in done]
            todo = [config for config in configs if _wants(known.get(config), options)]
            random.Random(f"{options.seed} {number}").shuffle(todo)
            # every round draws other samples, the same for all of its configs
            seeded = settings.replace(seed=options.seed + number)
            for position, config in enumerate(todo, start=1):
                row = Row(config=config, repeat=number, outcome=_run(runner, config, seeded))
                rows.append(row)
                keep_communicators(runner, inspection, options.out.parent, row.outcome)
                table.append(options.out, recorded.header, row)
                on_row(Progress(row=row, round=number, left=len(todo) - position))
    return table.read(options.out, runner.techniques)


def _trained_choices(grid: Mapping[str, Sequence[Any]], techniques: Techniques) -> dict[str, Choice]:
    """What the grid says is trained. Raises ConfigError where it says several: the configs of a table must be comparable."""
    asked = {name: grid[name] for name in techniques.trained({}) if name in grid}
    for name, wanted in asked.items():
        if len(wanted) > 1:
            raise ConfigError(
                f"--grid {name}={','.join(map(str, wanted))} are trainings that do not compare; sweep each into a table of "
                f"its own, with --grid {name}={wanted[0]}"
            )
    return {name: techniques.validate(name, wanted[0]) for name, wanted in asked.items()}


def _wants(known: Figure | None, options: SweepOptions) -> bool:
    """Whether to measure a config once more. A config that failed is not tried again."""
    if known is None:
        return True
    if known.kind is not Kind.OK:
        return False
    return known.num_repeats < MIN_REPEATS or known.half_width > options.interval


def _run(runner: Runner, config: Config, settings: ProbeSettings) -> Outcome:
    outcome = runner.probe(config, settings)
    disturbed = outcome.crowded or outcome.disturbances
    return calmer(outcome, runner.probe(config, settings)) if disturbed else outcome


def _restrict(space: Space, grid: Mapping[str, Sequence[Any]]) -> Space:
    """The space restricted to the grid's choices. Every grid includes the baseline's choices.

    Raises:
        ConfigError: an unknown technique, or a choice that is not searched for this task on this device.
    """
    choices, techniques = dict(space.choices), space.techniques
    for name, wanted in grid.items():
        possible = choices.get(techniques.known(name), ())
        for choice in wanted:
            if techniques.validate(name, choice) not in possible:
                listed = ", ".join(map(str, possible)) or "what follows from batch_size and the global batch"
                raise ConfigError(
                    f"--grid {name}={choice} cannot be swept here; possible: {listed} (--include adds optional ones)"
                )
        kept = [choice for choice in possible if choice in wanted or choice == space.baseline[name]]
        choices[name] = tuple(sorted(kept)) if techniques.is_ordered(name) else tuple(kept)
    return replace(space, choices=choices, supported={name: kept for name, kept in choices.items() if len(kept) > 1})


def _header(inspection: Inspection, space: Space, settings: ProbeSettings) -> Header:
    device = inspection.device
    assert settings.memory_limit_bytes is not None
    keys = (*BATCH_KEYS, *space.techniques)
    every = {**space.choices, ACCUMULATION: tuple(sorted({int(config[ACCUMULATION]) for config in space}))}
    return Header(
        task=inspection.facts.name,
        source_hash=inspection.facts.source_hash,
        num_parameters=inspection.facts.num_parameters or 0,
        device=device.name,
        model=device.model,
        num_threads=device.num_threads,
        total_bytes=device.total_bytes,
        memory_limit_bytes=settings.memory_limit_bytes,
        outside_bytes=inspection.outside_bytes,
        communicators=inspection.communicators,
        driver=device.driver,
        torch=device.torch_version,
        autotune=__version__,
        global_batch=inspection.global_batch,
        world=space.world,
        baseline=space.baseline.as_dict(),
        choices={name: every[name] for name in keys},
        capability=device.capability,
        baseline_given=inspection.baseline_given,
        reasons={name: inspection.support_of(name).reason for name in keys if inspection.support_of(name).reason},
        notes={name: inspection.support_of(name).note for name in keys if inspection.support_of(name).note},
        always={name: support.always for name, support in inspection.support.items() if support.always},
        facts=replace(inspection.facts, widest=()),
        signature=inspection.signature,
        seed=settings.seed,
        max_timed_s=settings.max_timed_s,
        max_warmup_s=settings.max_warmup_s,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _carried_on(begun: Table | None, path: Path, header: Header, techniques: Techniques) -> Table:
    """The table to add to: an earlier sweep's, or a new one."""
    if begun is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            table.start(path, header)
        except OSError as error:
            raise TableError(f"the table {path} cannot be written: {error.strerror}; choose another file") from None
        return table.read(path, techniques)
    if differences := begun.header.differences(header):
        raise TableError(
            f"the table {path} cannot be continued, because new measurements would not be comparable with it: "
            f"{'; '.join(differences)}. Choose another file, or move this one away"
        )
    mend(path)
    return begun
