"""Opens a search: its runner, its study, the inspection of the task, and the space of configs."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.devices.targets import target_of
from autotune.errors import ConfigError
from autotune.proposers import sampler_named
from autotune.proposers.cost_model import CostModel
from autotune.records.batch_plan import BATCH_KEYS, BATCH_SIZE, BatchPlan
from autotune.records.calibration import Calibration
from autotune.records.config import Choice
from autotune.records.inspection import Inspection
from autotune.records.objective import OBJECTIVES
from autotune.records.options import SearchOptions
from autotune.records.settings import ProbeSettings
from autotune.records.study import Fingerprint, SearchFacts
from autotune.records.world import World
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Runner
from autotune.space import Space, build_space, require_possible, trained_beside
from autotune.study.caches import TraceCache
from autotune.study.history import History
from autotune.study.place import Place
from autotune.study.store import Store, storage_errors, stored_facts
from autotune.task.source import TaskSource
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.frameworks import FRAMEWORKS
from autotune.tuning.budget import MIN_TIMEOUT_S, Budget
from autotune.tuning.evaluation import is_asked_for
from autotune.tuning.events import Listener, Note, SearchStarted, Working
from autotune.tuning.inspecting import calibrate_device, drop_slow_setups, inspect_within, too_little_memory
from autotune.tuning.interruption import interruptible
from autotune.tuning.resuming import Kept, fingerprint, lock_places
from autotune.tuning.state import Search
from autotune.tuning.tracing import Tracing
from autotune.units import plural

MAX_TRACE_SHARE = 0.05  # of the budget
MIN_COMPARING_S = 1.0
COMPARING_SHARE = 0.02  # of the budget, for finding out whether a batch may be cut
STEP_SHARE = 0.02  # of the budget, that a micro step may take
EVALUATION_SHARE = 0.15  # of the budget that the start left, where the batch size for evaluation is asked for
OWN_SHARE = 0.5  # of the budget that the start left, for what the user trains, where something else is ranked beside it


@contextlib.contextmanager
def open_search(
    source: TaskSource | None,
    options: SearchOptions,
    runner: Runner | None,
    listener: Listener,
    began_s: float | None = None,
) -> Iterator[Search]:
    """A search that is ready to probe. On exit the study is unlocked and no process is left.

    Args:
        began_s: what `time.monotonic()` read when the user began to wait; by default now.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can fix it; see the message.
    """
    if source is not None and options.global_batch is not None:
        source = source.with_global_batch(options.global_batch)
    techniques = runner.techniques if runner is not None else find_techniques()
    fixed = _require_known(options, runner, techniques)  # before anything takes seconds
    names = _name_study(source, options.study, runner)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        interruption = stack.enter_context(interruptible(lambda text: listener.on(Note(text=text))))
        kept = stack.enter_context(lock_places(options, *names, fixed, techniques))
        if kept.own.beside:
            text = f"the study {kept.own.beside} has another memory limit; this search is kept beside it, in {kept.place.study!r}"
            listener.on(Note(text=text))
        if runner is None:
            assert source is not None
            runner = LocalRunner(
                source,
                device=options.device,
                devices=options.devices,
                logs=kept.place.logs,
                import_timeout_s=max(MIN_TIMEOUT_S, options.budget_s),
                compiled=kept.place.compiled,
            )
        waited_s = time.monotonic() - began_s if began_s is not None else 0.0
        budget = _budget(options, runner, listener, waited_s)
        with budget.split("import"):
            device = runner.slots()[0].device
            agreed = kept.agree(options, device.free_bytes, environment=runner.keeps_traces)
            if not kept.earlier:  # the cache of a deleted study: how long compiling takes is measured without it
                shutil.rmtree(kept.place.compiled, ignore_errors=True)
            stack.enter_context(runner)
            if source is not None and not runner.stated.model:  # a recorded table does not know the file
                runner.stated = replace(runner.stated, model=source.spec)
        own = techniques.complete(runner.stated.trained)
        others = {name: choice for name, choice in kept.place.trained.items() if choice != own[name]}
        place = kept.own.training(others, techniques)
        for note in (*runner.notes, *device.notes):
            listener.on(Note(text=note, warning=True))
        with budget.split("inspection"):
            calibration, why_none = calibrate_device(runner, device, place.folder)
            if why_none:
                listener.on(Note(text=f"the device could not be measured: {why_none}", warning=True))
        shared = _Shared(
            runner=runner,
            agreed=agreed,
            calibration=calibration,
            asked=kept.options_to_repeat(options, source),
            listener=listener,
            interrupted=interruption,
        )
        search = stack.enter_context(_open_over(shared, place, options, budget))
        interruption.is_ready = True
        yield search


@contextlib.contextmanager
def open_search_beside(search: Search, choice: Mapping[str, Choice], budget_s: float) -> Iterator[Search]:
    """Another search of the same task by the same runner, in which `choice` is trained. Its study is in the same file.

    Raises:
        TaskError, ConfigError, StudyError: as `open_search`.
    """
    options = replace(search.options, fix={**search.options.fix, **choice}, budget_s=budget_s)
    own, limit_bytes = search.store.place, search.history.objective.memory_limit_bytes
    place = own.training(choice, search.runner.techniques)
    stored = stored_facts(place)
    kept = Kept(place=place, stored=stored, own=own, earlier=stored)
    shared = _Shared(
        runner=search.runner,
        agreed=kept.agree(options, limit_bytes, environment=search.runner.keeps_traces),
        calibration=search.calibration,
        asked={**search.asked, **kept.options_to_repeat(options, None)},
        listener=search.listener,
        interrupted=search.interrupted,
    )
    with (
        storage_errors(place),
        _open_over(shared, place, options, _budget(options, search.runner, search.listener), own) as other,
    ):
        yield other


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What several searches over one runner have in common."""

    runner: Runner
    agreed: Fingerprint
    calibration: Calibration
    asked: Mapping[str, str | int]
    listener: Listener
    interrupted: Callable[[], bool]

    @property
    def limit_bytes(self) -> int:
        """The memory limit of one training process."""
        assert self.agreed.memory_limit_bytes is not None
        return self.agreed.memory_limit_bytes


@contextlib.contextmanager
def _open_over(
    shared: _Shared, place: Place, options: SearchOptions, budget: Budget, own: Place | None = None
) -> Iterator[Search]:
    """A search over an open runner.

    Args:
        own: where the search is kept beside which this one makes a ranking; None for the user's own.
    """
    runner, listener, limit_bytes = shared.runner, shared.listener, shared.limit_bytes
    inspection = _inspect(shared, options, budget)
    train_samples = _train_samples(options, inspection)
    inspection = drop_slow_setups(inspection, options.budget_s, train_samples, options.include)
    wanted: dict[str, Any] = {"fix": options.fix, "include": options.include, "exclude": options.exclude}
    space, notes = build_space(inspection, runner.techniques, **wanted, frameworks=options.frameworks)
    others = trained_beside(inspection, runner.techniques, **wanted) if own is None else []
    if others:
        budget.budget_s -= (1 - OWN_SHARE) * max(0.0, budget.budget_s - budget.elapsed_s)
    store = Store(place, _search_facts(shared, place, options, own, inspection, space))
    objective = OBJECTIVES[options.objective](
        memory_limit_bytes=limit_bytes, headroom=options.headroom, train_samples=train_samples
    )
    history = History(
        space,
        objective,
        store.trials(),
        budget.timeout_s,
        longest_step_s=STEP_SHARE * budget.budget_s,
        setup_left_s=budget.setup_left_s,
    )
    listener.on(_describe_start(place, inspection, history, options, limit_bytes, budget.budget_s))
    warnings = [text for text in inspection.facts.warnings if text not in _allowed(inspection, options)]
    if own is None:  # beside it they would be told again
        for note in notes:
            listener.on(Note(text=note))
        for text in warnings:
            listener.on(Note(text=text, warning=True))
    if is_asked_for(options, inspection):
        budget.keep_for_evaluation(EVALUATION_SHARE)
    with _tracing(runner, place, inspection, history, MAX_TRACE_SHARE * budget.budget_s) as tracing:
        yield Search(
            runner=runner,
            store=store,
            history=history,
            inspection=inspection,
            options=options,
            settings=_settings(options.seed, limit_bytes, inspection.known_world, budget),
            budget=budget,
            tracing=tracing,
            cost_model=CostModel(
                lambda: tracing.traces,
                inspection.outside_bytes,
                options.seed,
                tell=lambda text: listener.on(Note(text=text, warning=True)),
                calibration=shared.calibration,
            ),
            calibration=shared.calibration,
            listener=listener,
            interrupted=shared.interrupted,
            asked=shared.asked,
            others=others,
            warnings=warnings,
        )


def _inspect(shared: _Shared, options: SearchOptions, budget: Budget) -> Inspection:
    """Inspect the task, and tell where it is short of memory.

    Raises:
        TaskError, DeviceError: it cannot be inspected.
        ConfigError: the runner's task has another global batch than the one asked for.
    """
    trained = {name: options.fix[name] for name in shared.runner.techniques.trained({}) if name in options.fix}
    job = InspectJob(
        memory_limit_bytes=shared.limit_bytes,
        timeout_s=budget.first_timeout_s,
        calibration=shared.calibration,
        trained=trained,
        comparing_s=max(MIN_COMPARING_S, COMPARING_SHARE * options.budget_s),
        world=shared.runner.world,
    )
    with budget.split("inspection"):
        inspection = inspect_within(shared.runner, job, shared.limit_bytes)
    if options.global_batch not in (None, inspection.global_batch):
        raise ConfigError(
            f"a global batch of {options.global_batch} cannot be searched here: the runner's task has "
            f"{inspection.global_batch or 'none'}; leave the option out"
        )
    budget.keeps_checks = inspection.comparable
    if inspection.shortage:
        shared.listener.on(Note(text=too_little_memory(inspection, shared.limit_bytes), warning=True))
    return inspection


def _search_facts(
    shared: _Shared, place: Place, options: SearchOptions, own: Place | None, inspection: Inspection, space: Space
) -> SearchFacts:
    """What a study says of its search beside the trials."""
    return SearchFacts(
        fingerprint=fingerprint(inspection, space.techniques, shared.agreed),
        task=inspection.facts.name,
        model=shared.runner.stated.model,
        asked=dict(shared.asked),
        objective=options.objective,
        memory_limit_bytes=shared.limit_bytes,
        headroom=options.headroom,
        space={name: tuple(choices) for name, choices in space.choices.items()},
        unsupported={n: why for n, why in inspection.unsupported.items() if n not in options.include},
        baseline_config=space.baseline.as_dict(),
        limited_beside=place.beside,
        ranked_beside=(own.study if own else place.name) if place.trained else "",
        signature=inspection.signature,
    )


def _tracing(runner: Runner, place: Place, inspection: Inspection, history: History, max_trace_s: float) -> Tracing:
    """Tracing beside the probes, with what earlier searches have traced."""
    space, target = history.space, target_of(inspection.device)
    sizes = [int(size) for size in space.choices[BATCH_SIZE]]
    cache = TraceCache(place.folder, inspection.facts, target, sizes, space.techniques.trained(space.baseline))
    kept = cache if runner.keeps_traces else None
    return Tracing(runner, lambda: history.space.tracing(), target, kept, max_trace_s, runner.tracer())


def _name_study(source: TaskSource | None, study: str | None, runner: Runner | None) -> tuple[str | None, str, str]:
    """The name of the study, where the user or the runner gives one, and the task's name and version.

    Raises:
        ConfigError: there is no task.
    """
    if runner is not None:
        return study or runner.default_study, runner.task_name, ""
    if source is not None:
        return study, source.name, source.version
    raise ConfigError("no task was given; expected a task, or a runner that has one")


def _require_known(options: SearchOptions, runner: Runner | None, techniques: Techniques) -> dict[str, Choice]:
    """What is fixed, once every name that the user gave is known.

    Raises:
        ConfigError: one is not, or options contradict each other.
    """
    sampler_named(options.sampler)
    if unknown := {*options.frameworks} - {*FRAMEWORKS}:
        raise ConfigError(f"frameworks: {min(unknown)!r} is not known; expected some of {', '.join(FRAMEWORKS)}")
    if runner is not None and options.device != "auto":
        raise ConfigError(f"device {options.device} cannot be chosen: the runner has its own; leave the option out")
    return require_possible(techniques, options.fix, options.include, options.exclude)


def _allowed(inspection: Inspection, options: SearchOptions) -> set[str]:
    """Why batches stay as they are, where the user has other ones tried all the same."""
    reasons = {name: inspection.support_of(name).reason for name in BATCH_KEYS}
    return {reason for name, reason in reasons.items() if name in options.include}


def _budget(options: SearchOptions, runner: Runner, listener: Listener, waited_s: float = 0.0) -> Budget:
    return Budget(
        budget_s=options.budget_s,
        probe_timeout_s=options.probe_timeout_s,
        now_s=runner.now_s,
        started_s=runner.now_s() - waited_s,
        num_trials=options.num_trials,
        begins=lambda purpose: listener.on(Working(purpose=purpose)),
        spent_s={"import": waited_s} if waited_s else {},
    )


def _settings(seed: int, limit_bytes: int, world: World, budget: Budget) -> ProbeSettings:
    return ProbeSettings(
        memory_limit_bytes=limit_bytes,
        world=world,
        seed=seed,
        timeout_s=budget.first_timeout_s,
        max_timed_s=min(10.0, max(1.0, budget.budget_s / 60)),
        max_warmup_s=min(20.0, max(2.0, budget.budget_s / 60)),
    )


def _describe_start(
    place: Place,
    inspection: Inspection,
    history: History,
    options: SearchOptions,
    limit_bytes: int,
    budget_s: float,
) -> SearchStarted:
    device = inspection.device
    threads = f", {plural(device.num_threads, 'thread')}" if device.num_threads else ""
    return SearchStarted(
        task=inspection.facts.name,
        device=f"{device.name} ({device.model}{threads})",
        study=place.study,
        storage=place.storage,
        objective=options.objective,
        memory_limit_bytes=limit_bytes,
        headroom=options.headroom,
        budget_s=budget_s,
        space=history.space.in_reach,
        num_configs=history.space.num_combinations,
        known=history.trials,
        best=history.best,
        techniques=history.space.techniques,
        baseline=history.baseline,
    )


def _train_samples(options: SearchOptions, inspection: Inspection) -> float | None:
    """How many samples the training is to take; None where the user does not say.

    Raises:
        ConfigError: the user says so in two ways, or by a dataset that there is not.
    """
    if options.train_epochs is None:
        batch_size, accumulation_steps = (int(inspection.baseline[name]) for name in BATCH_KEYS)
        plan = BatchPlan(batch_size, accumulation_steps, inspection.known_world)
        return options.train_steps and options.train_steps * plan.samples_per_step
    if options.train_steps is not None:
        raise ConfigError("train_steps and train_epochs both say how long the training is; leave one out")
    dataset_size = inspection.facts.dataset_size
    if dataset_size is None:
        raise ConfigError("train_epochs: the task has no dataset of known length; give the length as --train-steps")
    return int(options.train_epochs * dataset_size)
