"""What the user has to know about an answer before training with it: each rule is a function of the same facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from autotune.devices import capabilities_of
from autotune.records.config import Choice, Config
from autotune.records.measured import Measured
from autotune.records.outcome import THROTTLED, Kind, Outcome
from autotune.study.history import History, find_excused
from autotune.tuning import why
from autotune.tuning.budget import MOST_GAIN, SETUP_SHARE
from autotune.tuning.clearance import Finding
from autotune.tuning.entrant import Standing, failure
from autotune.tuning.state import Search
from autotune.units import format_bytes, format_seconds, plural

FEW_ROUNDS = 2  # of the play-off
CLEARLY_FASTER = 1.1  # times the answer's speed, by one process
BATCH_RULES = (
    "the answer takes {samples} per optimizer step where the baseline takes {old}: scale the learning rate by {linear:.3g} "
    "(linear rule, SGD) or {root:.3g} (square-root rule, Adam), or keep the global batch with --global-batch {old}"
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and what is known of it.

    Attributes:
        compared: the answer's comparison with plain fp32; None where there was none.
        is_cleared: whether a config is known to be one that may be recommended, as `Clearance` tells it.
        unchecked: why the answer was not compared; empty where it was.
        standing: how the play-off ended; None where no round was completed.
        outcomes: the processes behind the answer's figures.
        baseline: the figures of the baseline; None where it did not run.
    """

    search: Search
    config: Config
    compared: Finding | None
    is_cleared: Callable[[Config], bool]
    unchecked: str
    standing: Standing | None
    outcomes: Sequence[Outcome]
    baseline: Measured | None


Rule = Callable[[Answer], Iterator[str]]


def cautions(answer: Answer) -> Iterator[str]:
    """Every warning about an answer, in the order in which they matter."""
    for rule in RULES:
        yield from rule(answer)


def _unknown_gain(answer: Answer) -> Iterator[str]:
    if answer.baseline is None:
        history = answer.search.history
        outcome = history.baseline
        if outcome is not None and outcome.measurement is not None and not history.objective.is_known(outcome):
            yield f"the gain is unknown, because the baseline's is: {history.objective.why_unknown(outcome.measurement)}"
        else:
            yield f"the speed-up is unknown, because the baseline did not run: {_baseline_failure(history)}"


def _baseline_does_not_fit(answer: Answer) -> Iterator[str]:
    history = answer.search.history
    config = history.space.baseline
    if answer.baseline is None or answer.config == config:
        return
    measured = [trial.outcome for trial in history.trials if trial.config == config and trial.outcome.ok]
    if (outcome := next(filter(history.objective.beyond_memory, measured), None)) is not None:
        yield f"the baseline could not be recommended: {failure(outcome)}. It ran, so the answer is compared with it all the same"


def _earlier_answer(answer: Answer) -> Iterator[str]:
    is_confirmed = answer.standing is not None and answer.standing.answer is not None
    if not is_confirmed and (kept := answer.search.store.facts.result) and kept.play_off.confirmed:
        yield "the study keeps its earlier answer, which a play-off confirmed; `autotune show` shows it"


def _not_compared(answer: Answer) -> Iterator[str]:
    if answer.compared is not None and not answer.compared.comparable:
        yield f"the answer's gradients were not compared with plain fp32: {answer.compared.reason}"
    if answer.unchecked:
        yield f"this is the best so far and no recommendation: {answer.unchecked}"


def _baseline_unsaid(answer: Answer) -> Iterator[str]:
    search = answer.search
    if search.inspection.baseline_given:
        return
    of_command = bool(search.runner.command(answer.config))
    if search.runner.stated.baseline:
        unsaid, today = "the baseline names no batch_size", "its other settings"
    elif of_command:
        unsaid, today = "no --baseline is given", "the first choice of each setting"
    else:
        unsaid, today = "the model file sets no BASELINE", "plain fp32"
    yield (
        f"{unsaid}, so the gain is over {today} at batch size {search.history.space.baseline.batch_size}; "
        f"{'give --baseline batch_size=N' if of_command else 'set BASELINE to what you run today'} for a meaningful gain"
    )


def other_batch(answer: Answer) -> Iterator[str]:
    """That a step of the answer takes other samples than one of the baseline, where no global batch is given."""
    space = answer.search.history.space
    old, new = (config.plan_in(space.world).samples_per_step for config in (space.baseline, answer.config))
    if answer.search.inspection.global_batch is None and new != old:
        yield BATCH_RULES.format(samples=plural(new, "sample"), old=old, linear=new / old, root=(new / old) ** 0.5)


def _notes_of_techniques(answer: Answer) -> Iterator[str]:
    space = answer.search.history.space
    trained_otherwise = space.fixed.keys() & space.techniques.trained({})
    for name in (*answer.config.differences(space.baseline), *sorted(trained_otherwise)):
        if note := answer.search.inspection.support_of(name).note:
            yield f"{name}: {note}"


def _growing_memory(answer: Answer) -> Iterator[str]:
    measured = [outcome.measurement for outcome in answer.outcomes if outcome.measurement]
    # in one process the allocator's ups and downs may look like a leak
    growth = median(one.growth_bytes_per_step for one in measured) if measured else 0.0
    # a process of the play-off tells it only where it took many micro batches
    known = answer.search.history.known.get(answer.config)
    probed = [known.measurement] if known is not None and known.measurement is not None else []
    later = max((one.long_run_growth_bytes for one in [*measured, *probed]), default=0)
    keeping = [one.kept for one in [*measured, *probed] if one.kept]
    kept = keeping[0] if keeping and (growth > 0 or 2 * len(keeping) > len(measured)) else ""
    if growth <= 0 and later <= 0 and not kept:
        return
    limit_bytes, peak_bytes = (
        answer.search.history.objective.memory_limit_bytes,
        max(one.peak_bytes for one in measured),
    )
    grows = f"memory grows by {format_bytes(growth)} ({growth:.0f} bytes) per optimizer step. " if growth > 0 else ""
    num_left = max(0, int((limit_bytes - peak_bytes) / growth)) if growth > 0 else 0
    soon = f"about {plural(num_left, 'step')}" if num_left else "soon"
    exceeds = (
        f"a training run exceeds the limit of {format_bytes(limit_bytes)} {soon} after the point where a probe ends"
    )
    if kept:
        rate = f"{grows}At this rate {exceeds}: " if growth > 0 else "memory grows: "
        yield f"{rate}from every micro batch the training code keeps {kept}. A long run will run out of memory"
    elif later > 0:
        held_bytes = max(one.long_run_peak_bytes for one in [*measured, *probed])
        need = f"about {format_bytes(held_bytes)} of the limit of {format_bytes(limit_bytes)}"
        yield (
            f"memory still grows where a probe ends. No tensors were found that the training code keeps. {_caches(answer)}. "
            f"Such growth ends once every shape has occurred or that cache is full: a long run is expected to need {need}. "
            "`autotune verify` with many --steps measures it"
        )
    else:
        yield (
            f"{grows}At this rate {exceeds}. No tensors were found that the training code keeps. If `autotune verify` with many --steps "
            "reports growth too, a long run will run out of memory"
        )


def _faster_but_growing(answer: Answer) -> Iterator[str]:
    """The fastest config that ran within the limit, and whose memory is expected to outgrow it, where it was clearly faster."""
    history = answer.search.history
    objective = history.objective
    ran = [outcome.measurement.samples_per_s for outcome in answer.outcomes if outcome.measurement]
    growing = {
        config: found
        for config, outcome in history.known.items()
        if (found := outcome.measurement) and found.peak_bytes <= objective.usable_bytes < found.long_run_peak_bytes
    }
    if not ran or not growing or not objective.rests_on_speed:
        return
    config, found = max(growing.items(), key=lambda item: item[1].samples_per_s)
    if (ratio := found.samples_per_s / median(ran)) < CLEARLY_FASTER:
        return
    needed_bytes = found.long_run_peak_bytes / (1 - objective.headroom)
    yield (
        f"{history.space.techniques.describe(config)} ran {ratio:.2f} times as fast as the answer in {format_bytes(found.peak_bytes)}, but "
        f"its memory still grew. {_caches(answer)}. A long run is expected to need about {format_bytes(found.long_run_peak_bytes)}, which "
        f"the limit of {format_bytes(objective.memory_limit_bytes)} less headroom does not hold. The estimate is rough: `autotune verify` "
        f"of that config with many --steps measures it, and a --memory-limit of {format_bytes(needed_bytes)} lets it take part"
    )


def _caches(answer: Answer) -> str:
    """Where such memory may go, and on a CPU how to limit what oneDNN caches."""
    may_cache = "Libraries may cache something for each new batch shape"
    if capabilities_of(answer.search.inspection.device.name).own_memory:
        return may_cache
    return (
        f"{may_cache} (oneDNN keeps up to 1024 kernels; ONEDNN_PRIMITIVE_CACHE_CAPACITY=64, set for the search and the training, lowers "
        "that to 64 and costs some speed)"
    )


def _compile_trouble(answer: Answer) -> Iterator[str]:
    if trouble := next((o.measurement.compile_trouble for o in answer.outcomes if o.measurement), ""):
        yield f"the answer's compiled code has {trouble}; TORCH_LOGS=graph_breaks,recompiles shows where"


def _raised_by_batch(answer: Answer) -> Iterator[str]:
    techniques = answer.search.history.space.techniques
    for one in answer.search.history.raised_by_batch():
        labels = ", ".join(techniques.label(name, choice) for name, choice in sorted(one.choices))
        beside = f" with {labels}" if labels else ""
        yield f"batches from {one.size} on raise an error{beside}, and {one.largest} ran: {one.cause}"


def _never_ran(answer: Answer) -> Iterator[str]:
    history = answer.search.history
    by_batch = history.raised_by_batch()
    own = [
        trial
        for trial in history.trials
        if trial.outcome.kind is not Kind.ERROR or not any(one.holds_for(trial.config) for one in by_batch)
    ]
    for named, failed in why.never_ran(own, history.space.baseline).items():
        *_, last = failed
        log = f"; {last.log} holds what it printed" if last.log else ""
        yield f"{named} failed each time it was run ({plural(len(failed), 'probe')}): {last.cause}{log}"
    # where the answer is the baseline, the verdict says so already
    if answer.config != history.space.baseline and (never := _asked_and_never_run(answer)):
        more = "the same command goes on" if answer.search.interrupted() else "a larger --budget leaves time for it"
        yield f"never run, though you asked for it: {', '.join(never)}; {more}"


def _asked_and_never_run(answer: Answer) -> list[str]:
    """What was asked for (all choices of a command, those of included techniques), may make a difference, and was never run."""
    search, in_vain = answer.search, dict(_included_in_vain(answer))
    asked = search.history.space.techniques.keys() if search.runner.command(answer.config) else search.options.include
    left = (switch for switch, _ in search.untried().left(search.history))
    return [f"{name}={choice}" for name, choice in left if name in asked and name not in in_vain]


def _included_and_never_run(answer: Answer) -> Iterator[str]:
    for name, reason in _included_in_vain(answer):
        yield f"{name} was included, and no config with it was run: {reason}"


def _included_in_vain(answer: Answer) -> Iterator[tuple[str, str]]:
    """The techniques that the user included and of which no choice was run, with the reason."""
    search, history = answer.search, answer.search.history
    if search.interrupted():
        return
    space, left = history.space, {name for (name, _), _ in search.untried().left(history)}
    for name in search.options.include:
        others = {choice for choice in space.choices.get(name, ()) if choice != space.baseline[name]}
        if not others or not others.isdisjoint(trial.config[name] for trial in history.trials):
            continue
        setup_s = min(_own_setup_s(history, name, choice) for choice in others)
        if not setup_s and name not in left:
            yield name, "none was expected to fit and to make a difference"
        elif setup_s:
            yield (
                name,
                f"it takes about {format_seconds(setup_s)} before its first step, {_why_not_set_up(history, setup_s)}",
            )


def _own_setup_s(history: History, name: str, choice: Choice) -> float:
    """Seconds before its first step that the baseline would take for a choice; 0 where it takes none for it."""
    space = history.space
    config = space.complete({**space.baseline, name: choice})
    return history.setup_s(config) if (name, choice) in space.setting_up(config) else 0.0


def _why_not_set_up(history: History, setup_s: float) -> str:
    samples, best = history.objective.train_samples, history.best
    if samples is not None and best is not None and best[1].measurement is not None:
        train_s = samples / best[1].measurement.samples_per_s
        if MOST_GAIN * train_s < setup_s:
            return f"which a training of about {format_seconds(train_s)} is too short to win back"
    return (
        f"for which no time was left; a --budget of {format_seconds(setup_s / SETUP_SHARE)} or more leaves time for it"
    )


def _faster_once_compiled(answer: Answer) -> Iterator[str]:
    """The fastest config that compiles, where it is clearly faster than the answer and the training too short for it.

    What failed its check is barred, and so not feasible. A config that is no finalist may not have been compared; that is told.
    """
    history = answer.search.history
    space, samples = history.space, history.objective.train_samples
    ran = [outcome.measurement.samples_per_s for outcome in answer.outcomes if outcome.measurement]
    feasible = {config: outcome.measurement for config, outcome in history.feasible.items() if outcome.measurement}
    compiled = {config: found.samples_per_s for config, found in feasible.items() if space.setting_up(config)}
    if samples is None or not ran or not compiled or space.setting_up(answer.config):
        return
    config = max(compiled, key=lambda each: compiled[each])
    if compiled[config] < CLEARLY_FASTER * median(ran):
        return
    cold_s, saved_s = history.compile_cold_s(config), 1 / median(ran) - 1 / compiled[config]
    if cold_s / saved_s < samples:
        return
    per_step = config.plan_in(space.world).samples_per_step
    won = plural(round(cold_s / saved_s / per_step), "optimizer step")
    unchecked = "" if answer.is_cleared(config) else "; its gradients were not compared with plain fp32"
    yield (
        f"{space.techniques.describe(config)} ran {compiled[config] / median(ran):.2f} times as fast as the answer, and takes "
        f"{format_seconds(cold_s)} to compile at first: that is won back after about {won}, and the training has "
        f"{round(samples / per_step):,}{unchecked}"
    )


def _overflows(answer: Answer) -> Iterator[str]:
    overflows = Counter(trial.outcome.overflow for trial in answer.search.history.trials if trial.outcome.overflow)
    for overflow, number in overflows.items():
        yield f"{plural(number, 'probe')} ended with a value that is not finite: {overflow}"


def _disturbed(answer: Answer) -> Iterator[str]:
    history = answer.search.history
    both = [trial.outcome for trial in history.trials if trial.config in (answer.config, history.space.baseline)]
    disturbed = {text for outcome in both for text in outcome.disturbances}
    throttled = {text for text in disturbed if text.startswith(THROTTLED)}
    if throttled:
        reasons = " and ".join(sorted(text.removeprefix(THROTTLED) for text in throttled))
        device = answer.search.inspection.device.name
        yield f"the clock of {device} was throttled ({reasons}); better cooling or its full power supply makes it faster"
    if disturbed - throttled or find_excused(history.trials):
        yield "other work disturbed the machine; a quiet one gives narrower intervals"


def _unequal_ranks(answer: Answer) -> Iterator[str]:
    """One rank is slower than another in most probes, whatever the config."""
    told = [m for trial in answer.search.history.trials if (m := trial.outcome.measurement) and m.waits_s]
    slow = Counter(m.slow_rank for m in told if m.slow_rank is not None)
    for rank, number in slow.items():
        if number > max(1, len(told) / 2):
            words = next(m.unequal for m in reversed(told) if m.slow_rank == rank)
            yield f"{words} ({number} of {plural(len(told), 'probe')}); equal devices, with no other work on them, train faster"


def _crowded(answer: Answer) -> Iterator[str]:
    search = answer.search
    if crowded := sum(trial.outcome.crowded for trial in search.history.trials):
        yield (
            f"{plural(crowded, 'probe')} found that other processes had taken memory since the search began, so larger "
            f"configs may fit than were tried; search again on a free {search.inspection.device.name}, or set "
            "--memory-limit to what the others leave free"
        )


def _few_rounds(answer: Answer) -> Iterator[str]:
    standing = answer.standing
    if standing is None or standing.is_decided or not 0 < standing.num_telling <= FEW_ROUNDS:
        return
    rounds = plural(standing.num_telling, "round")
    if answer.search.interrupted():
        yield f"the search was interrupted after {rounds} of the play-off; the same command goes on and gives a more certain answer"
    else:
        yield f"the budget left the answer time for only {rounds} of the play-off; a larger --budget gives a more certain answer"


RULES: tuple[Rule, ...] = (
    _unknown_gain,
    _baseline_does_not_fit,
    _earlier_answer,
    _not_compared,
    _baseline_unsaid,
    other_batch,
    _notes_of_techniques,
    _growing_memory,
    _faster_but_growing,
    _compile_trouble,
    _raised_by_batch,
    _never_ran,
    _included_and_never_run,
    _faster_once_compiled,
    _overflows,
    _disturbed,
    _unequal_ranks,
    _crowded,
    _few_rounds,
)


def _baseline_failure(history: History) -> str:
    """Why the baseline has no figures."""
    again = history.failed_again.get(history.space.baseline)
    if again is not None:
        return f"in the play-off, {failure(again)}"
    return failure(history.baseline) if history.baseline is not None else "it was not measured"
