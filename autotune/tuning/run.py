"""`search()`: from a task and options to a recommendation. The main path of the package, told in order."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from autotune import __version__, techniques
from autotune.devices import open_device
from autotune.devices.targets import target_of
from autotune.errors import AutotuneError, ConfigError, StudyError, TaskError
from autotune.predict.cache import cached_traces
from autotune.predict.traces import Traces
from autotune.records.inspection import Inspection
from autotune.records.objective import Objective
from autotune.records.options import OBJECTIVES, SAMPLERS, SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.records.settings import ProbeSettings
from autotune.runners.local import ProcessProber
from autotune.space import Space, build_space
from autotune.study.store import Place, Store, locked, place_of, storage_errors, stored_attributes
from autotune.task.source import TaskSource
from autotune.tuning import why
from autotune.tuning.answer import NothingFeasible, Recommender
from autotune.tuning.events import Listener, Note, SearchStarted
from autotune.tuning.loop import MIN_TIMEOUT_S, Loop
from autotune.units import format_bytes

MIN_TRACE_S = 5.0
MAX_TRACE_SHARE = 0.1  # of the budget, for predicting memory


def search(source: TaskSource, options: SearchOptions, listener: Listener | None = None) -> Result:
    """Find the best config of a task on this machine.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can put it right; see the message.
        NothingFeasible: no config ran within the limits.
        Interrupted: by Ctrl-C; carries the best so far.
    """
    started = time.monotonic()
    _validate(options)
    if options.global_batch is not None:
        source = source.with_global_batch(options.global_batch)
    watch = listener or Listener()
    device = open_device(options.device)
    info = device.info()
    with contextlib.ExitStack() as stack:
        stack.enter_context(watch)
        place = place_of(options.storage, options.study, source.name)
        stack.enter_context(locked(place))
        stack.enter_context(storage_errors(place))
        stored = stored_attributes(place)
        limit = _memory_limit(options, place, stored, info.free_bytes)
        timeout_s = options.probe_timeout_s or max(MIN_TIMEOUT_S, 0.4 * options.budget_s)
        settings = ProbeSettings(
            device=info.name,
            memory_limit_bytes=limit,
            seed=options.seed,
            timeout_s=timeout_s,
            max_timed_s=min(10.0, max(1.0, options.budget_s / 60)),
            max_warmup_s=min(20.0, max(2.0, options.budget_s / 60)),
        )
        import_timeout_s = max(MIN_TIMEOUT_S, options.budget_s)
        prober = stack.enter_context(ProcessProber(source, logs=place.logs, import_timeout_s=import_timeout_s))
        if prober.mode_reason:
            watch.on(Note(text=f"every probe starts a new interpreter: {prober.mode_reason}", warning=True))
        for note in info.notes:
            watch.on(Note(text=note, warning=True))
        inspection = prober.inspect(info.name, limit, timeout_s)
        if isinstance(inspection, Outcome):
            raise inspection_failed(inspection, limit)
        space, notes = build_space(inspection, fix=options.fix, include=options.include, exclude=options.exclude)
        warnings = list(inspection.facts.get("warnings", ()))
        unsupported = {
            name: support.reason
            for name, support in inspection.support.items()
            if len(support.choices) < 2 and support.reason
        }
        store = Store(
            place,
            _fingerprint(inspection, options, limit),
            {
                "task": inspection.facts["name"],
                "model": source.spec,
                "asked": _asked(options, source, stored),
                "objective": options.objective,
                "memory_limit_bytes": limit,
                "headroom": options.headroom,
                "space": {name: list(choices) for name, choices in space.choices.items()},
                "unsupported": unsupported,
                "baseline_config": space.baseline.as_dict(),
            },
        )
        watch.on(
            SearchStarted(
                task=inspection.facts["name"],
                device=f"{info.name} ({info.model}" + (f", {info.num_threads} threads)" if info.num_threads else ")"),
                study=place.study,
                storage=place.storage,
                objective=options.objective,
                memory_limit_bytes=limit,
                headroom=options.headroom,
                budget_s=options.budget_s,
                space=dict(space.choices),
                num_configs=space.num_combinations,
                unsupported=unsupported,
                num_resumed=sum(probe.stage != "play-off" for probe in store.probed()),
            )
        )
        for note in notes:
            watch.on(Note(text=note))
        interrupted = stack.enter_context(_interruptible())
        peaks = _trace_memory(prober, inspection, space, store, options, watch)
        loop = Loop(
            prober=prober,
            store=store,
            space=space,
            objective=Objective(name=options.objective, memory_limit_bytes=limit, headroom=options.headroom),
            settings=settings,
            listener=watch,
            interrupted=interrupted,
            budget_s=options.budget_s,
            started=started,
            num_trials=options.num_trials,
            sampler=options.sampler,
            seed=options.seed,
            timeout_s=options.probe_timeout_s,
            peaks=peaks,
            outside_bytes=inspection.outside_bytes,
        )
        return Recommender(loop, prober, inspection, watch, warnings, interrupted).answer()


def _trace_memory(
    prober: ProcessProber,
    inspection: Inspection,
    space: Space,
    store: Store,
    options: SearchOptions,
    listener: Listener,
) -> Traces:
    """What the configs of the space need of the allocator, found without running them, in a share of the budget."""
    started = time.monotonic()
    traces = cached_traces(
        prober,
        space.tracing(),
        target_of(inspection.device),
        facts=inspection.facts,
        folder=store.place.traces,
        timeout_s=max(MIN_TRACE_S, MAX_TRACE_SHARE * options.budget_s),
    )
    wall_s = time.monotonic() - started
    if traces.models:
        listener.on(Note(text=f"memory of {len(traces.models)} groups of techniques predicted in {wall_s:.1f} s"))
    if traces.failures:
        label, why = next(iter(traces.failures.items()))
        others = f" (and {len(traces.failures) - 1} more)" if len(traces.failures) > 1 else ""
        listener.on(Note(text=f"memory is learned from probes where it cannot be traced: {label}{others}: {why}"))
    store.set_attribute(
        "traces", {"num_groups": len(traces.models), "failures": dict(traces.failures), "wall_s": wall_s}
    )
    return traces


def _validate(options: SearchOptions) -> None:
    for value, allowed, what in (
        (options.objective, OBJECTIVES, "objective"),
        (options.sampler, SAMPLERS, "sampler"),
    ):
        if value not in allowed:
            raise ConfigError(f"{value!r} is not a known {what}; expected one of {', '.join(allowed)}")
    if options.global_batch is not None and options.global_batch < 1:
        raise ConfigError(f"a global batch of {options.global_batch} is not possible; expected at least 1")
    for name, valid, expected in (
        ("headroom", 0 <= options.headroom < 1, "a share from 0% to below 100%"),
        ("budget_s", options.budget_s > 0, "more than 0 seconds"),
        ("probe_timeout_s", options.probe_timeout_s is None or options.probe_timeout_s > 0, "more than 0 seconds"),
        (
            "memory_limit_bytes",
            options.memory_limit_bytes is None or options.memory_limit_bytes > 0,
            "more than 0 bytes",
        ),
        ("seed", 0 <= options.seed < 2**32, "a number from 0 to 4294967295"),
    ):
        if not valid:
            raise ConfigError(f"{name} {getattr(options, name)} is not possible; expected {expected}")
    if options.num_trials is not None and options.num_trials < 1:
        raise ConfigError(f"{options.num_trials} trials are not possible; expected at least 1")


def _memory_limit(options: SearchOptions, place: Place, stored: Mapping[str, Any], free_bytes: int) -> int:
    """The user's limit, else the study's when it is resumed, else what the device has free."""
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    earlier: int | None = stored.get("fingerprint", {}).get("memory_limit_bytes")
    if earlier is None:
        return free_bytes
    if earlier > 1.1 * free_bytes:
        raise StudyError(
            f"the study {place.study} was made within {format_bytes(earlier)}, but only {format_bytes(free_bytes)} are free now; "
            "free memory, or start another study with --study NAME"
        )
    return earlier


def _asked(options: SearchOptions, source: TaskSource, stored: Mapping[str, Any]) -> dict[str, str | int]:
    """What whoever runs the answer has to ask for as well: nothing of what is a default."""
    earlier = stored.get("asked", {}).get("memory_limit")  # goes on to hold when the study is resumed without one
    asked = {
        "device": None if options.device == "auto" else options.device,
        "global_batch": source.overrides.get("global_batch"),
        "memory_limit": options.memory_limit_bytes or earlier,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _fingerprint(inspection: Inspection, options: SearchOptions, limit: int) -> dict[str, Any]:
    device, facts = inspection.device, inspection.facts
    choices = {
        name: sorted(map(str, {*support.choices, *support.optional}))
        for name, support in inspection.support.items()
        if not techniques.REGISTRY[name].ordered
    }
    return {
        "autotune": __version__,
        "choices": choices,
        "task": facts["source_hash"],
        # a model file may read its sizes from elsewhere
        **{name: facts[name] for name in ("num_parameters", "num_trainable", "parameter_bytes", "batch")},
        "device": f"{device.name} {device.model}",
        "num_threads": device.num_threads,
        "total_bytes": device.total_bytes,
        "driver": device.driver,
        "torch": device.torch_version,
        "memory_limit_bytes": limit,
        "headroom": options.headroom,
        "objective": options.objective,
        "global_batch": inspection.global_batch,
    }


def inspection_failed(outcome: Outcome, limit: int) -> AutotuneError:
    """The error for a task that could not be inspected."""
    if outcome.kind is Kind.OOM:
        return NothingFeasible(
            f"even two samples do not train within {format_bytes(limit)}: {why.describe_shortage([outcome], limit)}; "
            "raise --memory-limit, or make the model or the sample smaller"
        )
    if outcome.kind is Kind.ERROR:
        return why.as_error(outcome)
    return TaskError(
        f"one training step of two samples did not work: {outcome.cause}; `{Path(outcome.log).name}` in {Path(outcome.log).parent} "
        "holds what it printed",
        frames=outcome.detail,
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """First Ctrl-C: the search ends after the running probe. Second: at once, killing it."""
    asked = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
