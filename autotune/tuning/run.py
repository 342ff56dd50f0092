"""`search()`: from a task and options to a recommendation. The main path of the package, told in order."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from autotune import techniques
from autotune.config import Config
from autotune.devices import open_device
from autotune.errors import AutotuneError, ConfigError, StudyError, TaskError
from autotune.outcome import Kind, Outcome
from autotune.probe.inspection import Inspection
from autotune.probe.process import ProcessProber
from autotune.probe.settings import ProbeSettings
from autotune.tuning import explain
from autotune.tuning.events import Listener, Note, SearchStarted
from autotune.tuning.loop import MIN_TIMEOUT_S, Loop
from autotune.tuning.objective import Objective
from autotune.tuning.options import OBJECTIVES, SAMPLERS, SearchOptions
from autotune.tuning.playoff import Standing
from autotune.tuning.result import Check, Measured, Result
from autotune.tuning.space import build_space
from autotune.tuning.study import Place, Store, locked, place_of, stored_limit_bytes
from autotune.task.source import TaskSource
from autotune.units import format_bytes

CHECK_BATCH_SIZE = 4
MAX_CHECK_SHARE = 0.05  # of the budget, for one check
BATCH_RULES = (
    "the answer takes {new} samples per optimizer step where the baseline takes {old}: scale the learning rate by {linear:.3g} "
    "(linear rule, SGD) or {root:.3g} (square-root rule, Adam), or keep the global batch with --global-batch {old}"
)


class NothingFeasible(AutotuneError):
    """No config ran within the limits. Exit code 1."""


class Interrupted(AutotuneError):
    """The user interrupted the search; `result` is the best so far, or None. Exit code 130."""

    def __init__(self, result: Result | None) -> None:
        super().__init__("interrupted; the study is kept and the same command goes on with it")
        self.result = result


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
        limit = _memory_limit(options, place, info.free_bytes)
        timeout_s = options.probe_timeout_s or max(MIN_TIMEOUT_S, 0.4 * options.budget_s)
        settings = ProbeSettings(
            device=info.name,
            memory_limit_bytes=limit,
            seed=options.seed,
            timeout_s=timeout_s,
            max_timed_s=min(10.0, max(1.0, options.budget_s / 60)),
            max_warmup_s=min(20.0, max(2.0, options.budget_s / 60)),
        )
        prober = stack.enter_context(ProcessProber(source, logs=place.logs))
        if prober.mode_reason:
            watch.on(Note(text=f"every probe starts a new interpreter: {prober.mode_reason}", warning=True))
        for note in info.notes:
            watch.on(Note(text=note, warning=True))
        inspection = prober.inspect(info.name, limit, timeout_s)
        if isinstance(inspection, Outcome):
            raise _inspection_failed(inspection, limit)
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
                "model": source.label,
                "objective": options.objective,
                "memory_limit_bytes": limit,
                "headroom": options.headroom,
                "space": {name: list(choices) for name, choices in space.choices.items()},
                "unsupported": unsupported,
                "baseline_config": space.baseline.as_dict(),
            },
        )
        interrupted = stack.enter_context(_interruptible())
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
                num_resumed=len(loop.probed()),
            )
        )
        for note in notes:
            watch.on(Note(text=note))
        run = _Search(loop, prober, inspection, watch, warnings, interrupted)
        run.check_exactness()
        return run.answer()


class _Search:
    """The steps of one search that need the prober's checks beside the loop."""

    def __init__(
        self,
        loop: Loop,
        prober: ProcessProber,
        inspection: Inspection,
        listener: Listener,
        warnings: list[str],
        interrupted: Callable[[], bool],
    ) -> None:
        self.loop = loop
        self.prober = prober
        self.inspection = inspection
        self.listener = listener
        self.warnings = warnings
        self.interrupted = interrupted

    def check_exactness(self) -> None:
        """Drop from the space every exact technique that is not exact on this model."""
        known: dict[str, Any] = self.loop.store.attributes().get("exactness", {})
        for name, choices in self.loop.space.choices.items():
            technique = techniques.REGISTRY[name]
            if not technique.exact or technique.phase is techniques.Phase.LOADER or name == "accumulation_steps":
                continue
            dropped = set()
            for choice in _representative(
                [c for c in choices if c not in (technique.off, self.loop.space.baseline[name])]
            ):
                key = f"{name}={choice}"
                if key not in known and not self.interrupted():
                    known[key] = self._check_failure(techniques.complete({name: choice}))
                if known.get(key):
                    dropped.add(choice)
                    self.warn(f"{key} is left out: {known[key]}")
            if dropped:
                off = {technique.off, self.loop.space.baseline[name]}
                all_of_it = {c for c in choices if c not in off} if technique.ordered else dropped
                self.loop.space = self.loop.space.without(name, all_of_it)
        self.loop.store.set_attribute("exactness", known)

    def answer(self) -> Result:
        """Run the loop, the play-off and the checks of its answer, and put the result together."""
        loop = self.loop
        loop.measure_baseline(given=self.inspection.baseline_given)
        loop.explore()
        loop.undo_changes()
        if loop.best is None and not self.interrupted():
            raise NothingFeasible(explain.no_fit(loop.probed(), loop.objective.memory_limit_bytes))
        standing = loop.run_play_off() if not self.interrupted() else None
        if standing is not None and standing.answer is None and not self.interrupted():
            raise NothingFeasible(
                "none of the best configs ran through a second time; more headroom would help (--headroom 15%)"
            )
        result = self._result(standing)
        if result is not None:
            loop.store.set_attribute("result", result.to_dict())
            loop.store.set_attribute("warnings", list(result.warnings))
        if self.interrupted():
            raise Interrupted(result)
        assert result is not None
        return result

    def warn(self, text: str) -> None:
        """Tell the user, now and with the answer."""
        self.warnings.append(text)
        self.listener.on(Note(text=text, warning=True))

    def _check_failure(self, config: Config) -> str:
        """Why a config is not exact on this model; empty when it is, or when memory or time do not suffice to compare."""
        settings = self.loop.settings.replace(timeout_s=max(10.0, MAX_CHECK_SHARE * self.loop.budget_s))
        check = self.prober.check(config, settings, CHECK_BATCH_SIZE)
        if isinstance(check, Outcome):
            inconclusive = check.kind in (Kind.OOM, Kind.TIMEOUT)
            return "" if inconclusive else f"it did not run ({check.kind}: {check.cause})"
        return "" if check.passed else check.reason

    def _result(self, standing: Standing | None) -> Result | None:
        loop = self.loop
        probed = loop.probed()
        confirmed = standing.answer if standing is not None else None
        if confirmed is not None:
            answer, measured = confirmed.config, confirmed.measured()
        elif loop.best is not None and loop.best[1].measurement is not None:
            answer, measured = loop.best[0], explain.measured_once(loop.best[0], loop.best[1].measurement)
        else:
            return None
        baseline, speedup = self._baseline(standing, measured)
        verdict = "same" if answer == loop.space.baseline else "faster" if speedup and speedup[1] > 1 else "same"
        if baseline is None:
            verdict = "faster"
        checks = self._checks(answer) if standing is not None else ()
        self._collect_warnings(
            answer, baseline, confirmed.outcomes.values() if confirmed else [loop.best[1]] if loop.best else []
        )
        of_answer = [outcome for config, outcome in loop.known() if config == answer and outcome.measurement]
        found = of_answer[-1].measurement if of_answer else None
        entrants = [e for e in (standing.entrants if standing else ()) if any(o.ok for o in e.outcomes.values())]
        all_probes = loop.store.probed()
        return Result(
            config=answer.as_dict(),
            samples_per_s=measured.samples_per_s,
            samples_per_s_ci=measured.samples_per_s_ci,
            peak_bytes=measured.peak_bytes,
            memory_limit_bytes=loop.objective.memory_limit_bytes,
            headroom=loop.objective.headroom,
            baseline=baseline,
            speedup=speedup[0] if speedup else None,
            speedup_ci=(speedup[1], speedup[2]) if speedup else None,
            verdict=verdict,
            objective=loop.objective.name,
            confirmed=confirmed is not None,
            finalists=tuple(entrant.measured() for entrant in entrants),
            front=explain.front(probed),
            effects=explain.effects(answer, loop.space.baseline, probed),
            checks=checks,
            limit=explain.limiting(answer, found, probed, loop.objective) if found else "",
            outcomes=dict(Counter(str(probe.outcome.kind) for probe in all_probes)),
            probes=len(all_probes),
            wall_s=loop.elapsed_s,
            train_s=loop.train_s,
            storage=loop.store.place.storage,
            study=loop.store.place.study,
            device=self.inspection.device.name,
            warnings=tuple(dict.fromkeys(self.warnings)),
        )

    def _baseline(
        self, standing: Standing | None, answer: Measured
    ) -> tuple[Measured | None, tuple[float, float, float] | None]:
        """The baseline's figures and the answer's throughput over them: from the play-off, else from the search's own probes."""
        if standing is not None and standing.baseline is not None:
            return standing.baseline.measured(), standing.speedup
        found = self.loop.baseline.measurement if self.loop.baseline else None
        if (
            standing is not None
            or found is None
            or self.loop.baseline is None
            or not self.loop.objective.feasible(self.loop.baseline)
        ):
            return None, None
        measured = explain.measured_once(self.loop.space.baseline, found)
        low, high = answer.samples_per_s_ci
        ratio = answer.samples_per_s / found.samples_per_s
        return measured, (ratio, low / found.samples_per_s_high, high / found.samples_per_s_low)

    def _checks(self, answer: Config) -> tuple[Check, ...]:
        """Checks G, B and N of the answer on the user's own model, at a small batch."""
        check = self.prober.check(answer, self.loop.settings, CHECK_BATCH_SIZE)
        if isinstance(check, Outcome):
            self.warn(f"the answer's gradients could not be compared with plain fp32 ({check.kind}: {check.cause})")
            return ()
        if not check.passed:
            self.warn(f"the answer's gradients differ from plain fp32: {check.reason}")
        return (check,)

    def _collect_warnings(self, answer: Config, baseline: Measured | None, outcomes: Any) -> None:
        if baseline is None:
            self.warn("the baseline does not run within the memory limit, so there is no speed-up to state")
        old, new = self.loop.space.baseline.samples_per_step, answer.samples_per_step
        if self.inspection.global_batch is None and new != old:
            self.warn(BATCH_RULES.format(new=new, old=old, linear=new / old, root=(new / old) ** 0.5))
        for name in answer.differences(self.loop.space.baseline):
            if note := self.inspection.support[name].note:
                self.warn(f"{name}: {note}")
        growth = max((o.measurement.growth_bytes_per_step for o in outcomes if o.measurement), default=0.0)
        if growth > 0:
            self.warn(
                f"memory grows by {format_bytes(growth)} ({growth:.0f} bytes) per optimizer step: the training code keeps "
                "something from every step (a list of losses with their graphs, say), and a long run will run out of memory"
            )
        if any(o.measurement and o.measurement.disturbances for o in outcomes):
            self.warn("other work disturbed the machine during the play-off; a quiet machine gives narrower intervals")


def _validate(options: SearchOptions) -> None:
    for value, allowed, what in (
        (options.objective, OBJECTIVES, "objective"),
        (options.sampler, SAMPLERS, "sampler"),
    ):
        if value not in allowed:
            raise ConfigError(f"{value!r} is not a known {what}; expected one of {', '.join(allowed)}")
    if options.global_batch is not None and options.global_batch < 1:
        raise ConfigError(f"a global batch of {options.global_batch} is not possible; expected at least 1")
    if options.num_trials is not None and options.num_trials < 1:
        raise ConfigError(f"{options.num_trials} trials are not possible; expected at least 1")


def _memory_limit(options: SearchOptions, place: Place, free_bytes: int) -> int:
    """The user's limit, else the study's when it is resumed, else what the device has free."""
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    stored = stored_limit_bytes(place)
    if stored is None:
        return free_bytes
    if stored > 1.1 * free_bytes:
        raise StudyError(
            f"the study {place.study} was made within {format_bytes(stored)}, but only {format_bytes(free_bytes)} are free now; "
            "free memory, or start another study with --study NAME"
        )
    return stored


def _fingerprint(inspection: Inspection, options: SearchOptions, limit: int) -> dict[str, Any]:
    device = inspection.device
    return {
        "task": inspection.facts["source_hash"],
        "num_parameters": inspection.facts["num_parameters"],  # a model file may read its size from elsewhere
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


def _inspection_failed(outcome: Outcome, limit: int) -> AutotuneError:
    if outcome.kind is Kind.OOM:
        return NothingFeasible(
            f"even two samples do not train within {format_bytes(limit)}: {explain.describe_shortage([outcome], limit)}; "
            "raise --memory-limit, or make the model or the sample smaller"
        )
    if outcome.kind is Kind.ERROR:
        return TaskError(outcome.cause, frames=outcome.detail)
    return TaskError(
        f"one training step of two samples did not work: {outcome.cause}; `{Path(outcome.log).name}` in {Path(outcome.log).parent} "
        "holds what it printed",
        frames=outcome.detail,
    )


def _representative(choices: list[Any]) -> list[Any]:
    """Of a scale of numbers the middle one stands for all; of categories each."""
    numbers = [c for c in choices if isinstance(c, int) and not isinstance(c, bool)]
    return [numbers[len(numbers) // 2]] if numbers else choices


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
