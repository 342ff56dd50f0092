"""Opens a search: its runner, its study, the inspection of the task, and the space of configs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.devices import capabilities_of
from autotune.devices.slots import Slots, find_slots
from autotune.errors import ConfigError
from autotune.lazy import import_ahead
from autotune.prediction.priors import Taught
from autotune.proposers import sampler_named
from autotune.proposers.cost_model import CostModel
from autotune.records.config import BATCH_KEYS, Choice
from autotune.records.device import Calibration, Slot
from autotune.records.inspection import Inspection
from autotune.records.objective import OBJECTIVES
from autotune.records.options import ONE_DEVICE, ONE_SLOT, SearchOptions
from autotune.records.study import Fingerprint
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Runner
from autotune.runners.slots import SlotsRunner
from autotune.space import Space, build_space, require_possible, trained_beside
from autotune.study.facts import stored_facts
from autotune.study.history import History
from autotune.study.place import Place
from autotune.study.priors import PriorStore
from autotune.study.storage import storage_errors
from autotune.study.store import Store
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.budget import MIN_TIMEOUT_S, Budget
from autotune.tuning.communicators import know_communicators
from autotune.tuning.events import Listener, SearchStarted, Working, interruptible
from autotune.tuning.find_eval_batch import is_asked_for
from autotune.tuning.inspecting import (
    calibrate_device,
    count_train_samples,
    drop_slow_setups,
    inspect_within,
    too_little_memory,
)
from autotune.tuning.state import Search
from autotune.tuning.teaching import in_words, recall, require_one_way
from autotune.tuning.trace_ahead import Tracing, trace_for
from autotune.tuning.where_kept import Kept, fingerprint, lock_places

MIN_COMPARING_S = 1.0
COMPARING_SHARE = 0.02  # of the budget, for finding out whether a batch may be cut
MAX_TRACE_SHARE = 0.05  # of the budget, for tracing between the probes
STEP_SHARE = 0.02  # of the budget: the longest micro step that is tried
EVALUATION_SHARE = 0.15  # of the budget that the start left, where the batch size for evaluation is asked for
OWN_SHARE = 0.5  # of the budget that the start left, for what the user trains, where something else is ranked beside it
# The study's file and the cost model need them; half a second, in which the search would wait for the process that imports torch.
LATER = ("alembic.command", "alembic.script", "sqlalchemy.dialects.sqlite", "scipy.linalg", "scipy.special")


@contextlib.contextmanager
def open_search(
    source: TaskSource | None,
    options: SearchOptions,
    runner: Runner | None,
    listener: Listener,
    began_s: float | None = None,
    priors: PriorStore | None = None,
    *,
    beside_one_device: bool = True,
) -> Iterator[Search]:
    """A search that is ready to probe. On exit the study is unlocked and no process is left.

    Args:
        priors: what earlier studies left; by default what they left beside the study, and nothing in a replay.
        began_s: what `time.monotonic()` read when the user began to wait; by default now.
        beside_one_device: whether one device is measured, too, where several train together.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can fix it; see the message.
    """
    if source is not None:
        source = source.with_global_batch(options.global_batch)
    require_one_way(options)
    found = _slots_for(options, runner)
    sampler_named(options.sampler)  # an unknown one is refused before anything takes seconds
    techniques = runner.techniques if runner is not None else find_techniques()
    fixed = require_possible(techniques, options.fix, options.include, options.exclude, options.frameworks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        interruption = stack.enter_context(interruptible(listener.tell))
        kept = stack.enter_context(lock_places(options, source, runner, fixed, techniques, found))
        if runner is None:
            assert source is not None
            runner = _local_runner(source, options, kept.place, found)
        budget = _budget(options, runner, listener, time.monotonic() - began_s if began_s is not None else 0.0)
        with budget.split("import"):
            slots = runner.slots()
            device, free_bytes = slots[0].device, min(slot.device.free_bytes for slot in slots)
            _require_figure(options, slots)
            options, kept = kept.with_what_is_free(options, free_bytes, listener.tell)
            for note in kept.notes(options):
                listener.tell(note)
            agreed = kept.agree(options, free_bytes, environment=runner.keeps_traces)
            asked = {**runner.devices_here, **kept.options_to_repeat(options, source)}
            stack.enter_context(runner)
            if source is not None and not runner.stated.model:  # a recorded table does not know the file
                runner.stated = replace(runner.stated, model=source.spec, made_by=source.made_by)
        own = techniques.complete(runner.stated.trained)
        others = {name: choice for name, choice in kept.place.trained.items() if choice != own[name]}
        kept = kept.training(others, techniques)
        kept.keep_compiled(runner)
        known = runner.notes
        for note in (*known, *device.notes):
            listener.warn(note)
        with budget.split("inspection"):
            calibration, why_none = calibrate_device(runner, device, kept.place.folder)
            if why_none:
                listener.warn(f"the device could not be measured: {why_none}")
        if priors is None and runner.keeps_traces:
            priors = PriorStore(kept.place.folder, listener.warn)
        search = _open_over(runner, kept, options, budget, agreed, asked, calibration, listener, interruption, priors)
        search.beside_one_device = beside_one_device and search.inspection.baseline_alone is not None
        for note in runner.notes[len(known) :]:  # of the inspection
            search.warn(note)
        stack.callback(search.store.close)
        stack.enter_context(search.tracing)
        interruption.is_ready = True
        yield search


def _slots_for(options: SearchOptions, runner: Runner | None) -> Slots | None:
    """The slots that were asked for; None for one.

    Raises:
        ConfigError: an option says what the runner, or another option, says otherwise.
        DeviceError: there are no such slots.
    """
    for name, usual in (("device", "auto"), ("devices", ONE_DEVICE), ("slots", ONE_SLOT)):
        if runner is not None and (asked := getattr(options, name)) != usual:
            raise ConfigError(f"{name} {asked} cannot be chosen: the runner has its own; leave the option out")
    if options.slots == ONE_SLOT:
        return None
    if options.devices != ONE_DEVICE:
        raise ConfigError(
            f"slots {options.slots} cannot be chosen: each slot is one device, and --devices {options.devices} trains with several; "
            "leave one of them out"
        )
    return find_slots(options.slots, options.device, memory_limit_bytes=options.memory_limit_bytes)


def _require_figure(options: SearchOptions, slots: Sequence[Slot]) -> None:
    """Refuse an objective whose figure cannot be had.

    Raises:
        ConfigError: there is such a slot, or the figure says nothing of compiling, which the length of the training asks for.
    """
    objective = OBJECTIVES[options.objective]
    if why := next(filter(None, (objective.why_not_on(slot.device) for slot in slots)), ""):
        raise ConfigError(f"--objective {objective.name}: {why}; or take another objective")
    length = next((name for name in ("train_steps", "train_epochs") if getattr(options, name) is not None), "")
    if objective.observed and length:
        raise ConfigError(
            f"{length} cannot be given with --objective {objective.name}: what compiling takes is not in its figure; leave one of them out"
        )


def _local_runner(source: TaskSource, options: SearchOptions, place: Place, found: Slots | None) -> Runner:
    """Processes on this machine, in one slot or in several."""
    import_timeout_s = max(MIN_TIMEOUT_S, options.longest_s)
    import_ahead(*LATER)
    if found is not None:
        return SlotsRunner(source, found, logs=place.logs, import_timeout_s=import_timeout_s)
    return LocalRunner(
        source,
        device=options.device,
        devices=options.devices,
        logs=place.logs,
        import_timeout_s=import_timeout_s,
    )


@contextlib.contextmanager
def open_search_beside(search: Search, choice: Mapping[str, Choice], budget_s: float) -> Iterator[Search]:
    """Another search of the same task by the same runner, in which `choice` is trained. Its study is in the same file.

    Raises:
        TaskError, ConfigError, StudyError: as `open_search`.
    """
    runner, listener, own = search.runner, search.listener, search.store.place
    options = replace(search.options, fix={**search.options.fix, **choice}, budget_s=budget_s)
    place = own.training(choice, search.history.space.techniques)
    stored = stored_facts(place)
    kept = Kept(place=place, stored=stored, own=own, earlier=stored)
    limit_bytes = search.history.objective.memory_limit_bytes
    agreed = kept.agree(options, limit_bytes, environment=runner.keeps_traces)
    asked = {**search.asked, **kept.options_to_repeat(options, None)}
    budget = _budget(options, runner, listener)
    with storage_errors(place):
        other = _open_over(
            runner,
            kept,
            options,
            budget,
            agreed,
            asked,
            search.calibration,
            listener,
            search.interrupted,
            search.priors,
            is_beside=True,
        )
        with contextlib.closing(other.store), other.tracing:
            kept.keep_compiled(runner)
            try:
                yield other
            finally:
                runner.keep_compiled(own.compiled)


def _open_over(
    runner: Runner,
    kept: Kept,
    options: SearchOptions,
    budget: Budget,
    agreed: Fingerprint,
    asked: Mapping[str, str | int],
    calibration: Calibration,
    listener: Listener,
    interrupted: Callable[[], bool],
    priors: PriorStore | None,
    *,
    is_beside: bool = False,
) -> Search:
    """A search over an open runner.

    Args:
        is_beside: it makes a ranking beside the user's own search. It repeats none of that one's notes, and ranks nothing beside
            itself.
    """
    limit_bytes = agreed.memory_limit_bytes
    assert limit_bytes is not None
    inspection = _inspect(runner, options, limit_bytes, calibration, budget)
    inspection = know_communicators(runner, inspection, kept.place.folder)
    if inspection.shortage:
        listener.warn(too_little_memory(inspection, limit_bytes))
    train_samples = count_train_samples(options, inspection)
    known = fingerprint(inspection, runner.techniques, agreed)
    is_resumed = kept.stored is not None
    inspection, taught = recall(priors, options, inspection, known, runner.techniques, is_resumed=is_resumed)
    inspection = drop_slow_setups(inspection, options.longest_s, train_samples, options.include)
    wanted: dict[str, Any] = {"fix": options.fix, "include": options.include, "exclude": options.exclude}
    space, notes = build_space(inspection, runner.techniques, **wanted, frameworks=options.frameworks)
    others = trained_beside(inspection, space.techniques, **wanted) if not is_beside else []
    if others:
        budget.budget_s -= (1 - OWN_SHARE) * max(0.0, budget.budget_s - budget.elapsed_s)
    if options.like is None:
        taught = replace(taught, choices=space.choices)
    store = Store(kept.place, kept.facts(options, inspection, space, agreed, asked, runner.stated.model), listener.warn)
    history = _history(store, space, options, limit_bytes, train_samples, budget)
    listener.on(SearchStarted.of(kept.place, inspection, history, budget.budget_s))
    warnings = _warnings(inspection, options)
    _tell(listener, in_words(taught), [] if is_beside else notes, [] if is_beside else warnings)
    if is_asked_for(options.eval, inspection):
        budget.keep_for_evaluation(EVALUATION_SHARE)
    least_s = capabilities_of(inspection.device.name).energy_window_s if history.objective.observed else 0.0
    settings = budget.first_settings(limit_bytes, inspection.known_world, options.seed, min_timed_s=least_s)
    tracing = trace_for(runner, kept.place.folder, inspection, history, MAX_TRACE_SHARE * budget.budget_s)
    return Search(
        runner=runner,
        store=store,
        history=history,
        inspection=inspection,
        options=options,
        settings=settings,
        budget=budget,
        tracing=tracing,
        cost_model=_cost_model(tracing, inspection, options, calibration, listener, taught),
        priors=priors,
        calibration=calibration,
        listener=listener,
        interrupted=interrupted,
        asked=asked,
        answer_before=kept.stored.result if kept.stored is not None else None,
        others=others,
        warnings=warnings,
    )


def _cost_model(
    tracing: Tracing,
    inspection: Inspection,
    options: SearchOptions,
    calibration: Calibration,
    listener: Listener,
    taught: Taught,
) -> CostModel:
    return CostModel(
        lambda: tracing.traces,
        inspection.outside_bytes,
        options.seed,
        tell=listener.warn,
        calibration=calibration,
        communicators=inspection.communicators,
        taught=taught,
        gradients_bytes=inspection.facts.gradients_bytes,
    )


def _history(
    store: Store, space: Space, options: SearchOptions, limit_bytes: int, train_samples: float | None, budget: Budget
) -> History:
    objective = OBJECTIVES[options.objective](
        memory_limit_bytes=limit_bytes, headroom=options.headroom, train_samples=train_samples
    )
    longest_step_s = STEP_SHARE * budget.budget_s
    return History(space, objective, store.trials(), budget.timeout_s, longest_step_s, budget.setup_left_s)


def _tell(listener: Listener, begins_with: str, notes: Sequence[str], warnings: Sequence[str]) -> None:
    for text in filter(None, (*notes, begins_with)):
        listener.tell(text)
    for text in warnings:
        listener.warn(text)


def _warnings(inspection: Inspection, options: SearchOptions) -> list[str]:
    """What the inspection warns of. Where the user has other batches tried all the same, not why they should stay as they are."""
    reasons = (inspection.support_of(name).reason for name in BATCH_KEYS if name in options.include)
    allowed = tuple(filter(None, reasons))  # a warning may begin with what stays
    return [text for text in inspection.facts.warnings if not text.endswith(allowed)]


def _inspect(
    runner: Runner, options: SearchOptions, limit_bytes: int, calibration: Calibration, budget: Budget
) -> Inspection:
    """Inspect the task.

    Raises:
        TaskError, DeviceError: it cannot be inspected.
        ConfigError: the runner's task has another global batch than the one asked for.
    """
    job = InspectJob(
        memory_limit_bytes=limit_bytes,
        timeout_s=budget.first_timeout_s,
        calibration=calibration,
        trained={name: options.fix[name] for name in runner.techniques.trained({}) if name in options.fix},
        comparing_s=max(MIN_COMPARING_S, COMPARING_SHARE * options.longest_s),
        world=runner.world,
    )
    with budget.split("inspection"):
        inspection = inspect_within(runner, job)
    if options.global_batch not in (None, inspection.global_batch):
        raise ConfigError(
            f"a global batch of {options.global_batch} cannot be searched here: the runner's task has "
            f"{inspection.global_batch or 'none'}; leave the option out"
        )
    budget.keeps_checks = inspection.comparable
    return inspection


def _budget(options: SearchOptions, runner: Runner, listener: Listener, waited_s: float = 0.0) -> Budget:
    return Budget(
        budget_s=options.longest_s,
        probe_timeout_s=options.probe_timeout_s,
        now_s=runner.now_s,
        started_s=runner.now_s() - waited_s,
        num_trials=options.num_trials,
        is_auto=options.budget_s is None,
        begins=lambda purpose: listener.on(Working(purpose=purpose)),
        spent_s={"import": waited_s} if waited_s else {},
    )
