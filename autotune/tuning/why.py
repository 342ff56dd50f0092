"""The reasons for an answer: the figures, what each change did by itself, and what limits the speed; or why there is no answer.

What a change did is told by pairs of configs that differ in it alone. Where nothing fits into the memory: when to
stop trying, how much would be needed, and what would fit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import fmean

from autotune.errors import AutotuneError, DeviceError, OwnFault, TaskError
from autotune.proposers.cost_model import LIKELY, CostModel
from autotune.records.config import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, Choice, Config
from autotune.records.inspection import Inspection
from autotune.records.measured import Measured
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.result import DeviceUse, Effect
from autotune.records.study import Trial
from autotune.study.figures import at_one_time, measured, undisturbed, unrest
from autotune.study.history import History, feasible_each_time
from autotune.tuning.entrant import failure
from autotune.tuning.evidence import SEARCH, Evidence
from autotune.units import format_bytes, plural

DATA_BOUND = 0.25  # share of a step spent waiting for data that makes loading the limit
BUSY = 0.5  # share of the device's limit from which a resource is the bottleneck
IDLE = 0.15  # share below which it is not
GROWING = 1.03  # throughput gain per doubling of the batch that shows unused parallelism
OWN_STUDY = "in a new study (--study NAME)"  # a study cannot be resumed with another headroom
OTHERS = "end them, or set --memory-limit to what they leave free, and run again"
TRAINED_TODAY = (
    "If you train like this today, declare it in BASELINE: the baseline is the reference, and is not compared"
)
UNLIKELY_TO_FIT = 0.03  # a config with a smaller predicted chance to fit is given up
MOST_UNKNOWN = 2  # configs that are probed, each twice, without their figure being observed, before a search gives up
MOST_UNLIKELY = 3  # configs that are probed although they are unlikely to fit: a prediction may be wrong
TELLING = 2.0  # a prediction is told if its upper bound is less than so many times the lower one
MORE_ROOM = 0.1  # of the limit: how much more headroom to try where a config that fitted once did not fit again
TAIL = 0.025  # on either side of an interval

Pair = tuple[Config, Config]  # with a change and without it


def as_error(outcome: Outcome, consequence: str = "") -> AutotuneError:
    """The error to raise for an outcome of the kind `error`, or for a loss that is not finite.

    Args:
        consequence: text appended to the cause.
    """
    text = outcome.cause + (f"; {consequence}" if consequence else "")
    if outcome.own_fault:
        return OwnFault(f"{text}; please report it with the traceback above", frames=outcome.detail)
    if outcome.device_fault:
        return DeviceError(text)
    return TaskError(text, frames=outcome.detail)


def figures(probed: Sequence[Trial], confirmed: Sequence[Measured]) -> dict[Config, Measured]:
    """The figures of every config that was feasible each time: from the play-off if it took part, else from its one probe, as
    fast as the machine was in the play-off.

    Args:
        probed: every probe of the study, play-offs included.
        confirmed: the configs that finished the play-off.
    """
    first = {config: counted[0].outcome for config, counted in feasible_each_time(probed).items()}
    found = {config: measured(config, [outcome]) for config, outcome in first.items() if outcome.measurement}
    disturbed = [config for config, outcome in first.items() if outcome.disturbances]
    return at_one_time(found, {Config(tuple(found.config.items())): found for found in confirmed}, disturbed)


def break_even(samples_per_step: int, found: Measured, plain: Measured, compile_s: float) -> tuple[int, float] | None:
    """Optimizer steps of an answer, and seconds from the start of training, after which compiling has paid.

    Args:
        samples_per_step: of the answer, in all processes that train together.
        plain: what a config that compiles nothing was measured to do.
        compile_s: what the answer takes to compile.

    Returns:
        None where the answer compiles nothing, or is no faster.
    """
    step_s, plain_step_s = (samples_per_step / measured.samples_per_s for measured in (found, plain))
    if not compile_s or step_s >= plain_step_s:
        return None
    steps = math.ceil(compile_s / (plain_step_s - step_s))
    return steps, compile_s + steps * step_s


def limiting(
    answer: Config, found: Measurement, probed: Sequence[Trial], objective: Objective, use: DeviceUse | None = None
) -> str:
    """What limits the speed of the answer now, in one sentence; empty where nothing is known of it."""
    total_s = sum(found.phases_s.values())
    share = {name: seconds / total_s for name, seconds in found.phases_s.items()} if total_s else {}
    if share.get("data", 0.0) > DATA_BOUND:
        return f"Data loading: {share['data']:.0%} of a step is spent waiting for data; faster samples or more workers would help."
    if share.get("imbalance", 0.0) > DATA_BOUND:
        return f"Unequal ranks: {share['imbalance']:.0%} of a step the fastest waits for the slowest; equal devices would help."
    if share.get("communication", 0.0) > DATA_BOUND:
        return (
            f"Communication: {share['communication']:.0%} of a step is spent waiting for gradients of other devices; more samples "
            "per optimizer step would amortise it."
        )
    batches = [probe for probe in probed if differ(probe.config, answer) == ["batch_size"]]
    next_smaller = max((p.config.batch_size for p in batches if p.config.batch_size < answer.batch_size), default=0)
    smaller = [probe for probe in batches if probe.config.batch_size == next_smaller]
    larger = [probe for probe in batches if probe.config.batch_size > answer.batch_size]
    grows_by = GROWING ** math.log2(answer.batch_size / next_smaller) if smaller else math.inf
    growing = any(found.samples_per_s > grows_by * speed for speed in _speeds(smaller))
    if growing and any(objective.does_not_fit(probe.outcome) for probe in larger):
        usable = format_bytes(objective.usable_bytes)
        return f"Memory: throughput still rises with the batch size, and a larger batch does not fit in {usable}."
    utilization = found.telemetry.get("gpu_utilization")
    if utilization is not None and utilization < 70:
        return f"Launching work: the GPU was busy {utilization:.0f} % of the time; the host cannot feed it fast enough."
    if share.get("optimizer", 0.0) > DATA_BOUND:
        return f"The optimizer step: it takes {share['optimizer']:.0%} of the time; more samples per optimizer step would amortise it."
    if not share:
        return ""
    parts = ", ".join(f"{name} {portion:.0%}" for name, portion in share.items() if portion >= 0.01)
    fitting = [probe for probe in larger if not objective.does_not_fit(probe.outcome)]
    faster = max(_speeds(fitting), default=math.inf)
    tried = "; a larger batch was not faster" if faster < GROWING * found.samples_per_s else ""
    if larger and not fitting:
        tried = f"; no larger batch that was tried fits in {format_bytes(objective.usable_bytes)}"
    return f"{_resource(use)}: a step is {parts}{tried}."


def _resource(use: DeviceUse | None) -> str:
    """What a step is busy with, by how near it comes to the device's limits."""
    if use is not None and use.bandwidth_share >= max(use.flops_share, BUSY):
        return "Memory bandwidth"
    if use is not None and use.flops_share < IDLE and use.bandwidth_share < IDLE:
        return "Overhead, with arithmetic and memory far from their limits (operators too small for the device, Python)"
    return "Compute"


def _speeds(probed: Sequence[Trial]) -> list[float]:
    calm = undisturbed(probe.outcome for probe in probed)
    return [outcome.measurement.samples_per_s for outcome in calm if outcome.measurement]


def no_fit(probed: Sequence[Trial], objective: Objective, predicted: str = "") -> str:
    """Why nothing was feasible, by how much, and what to try.

    Args:
        predicted: how much is predicted to be needed, in words; empty where nothing is known.
    """
    if not probed:
        return "; ".join(filter(None, (predicted, "no config was tried in the time there was: give a larger --budget")))
    failed = [probe.outcome for probe in probed]
    kinds = {outcome.kind for outcome in failed if outcome.kind is not Kind.UNSUPPORTED}
    ran = [outcome.measurement for outcome in failed if outcome.measurement]
    limit_bytes = objective.memory_limit_bytes
    if fits := [found for found in ran if found.long_run_peak_bytes <= objective.usable_bytes]:
        return _why_not_even_so(fits, objective)
    over = [found.long_run_peak_bytes for found in ran]
    if over:
        grows = any(found.long_run_growth_bytes for found in ran)
        later = " in a long run" if grows else ""
        return (
            f"the smallest config that ran needs {format_bytes(min(over))}{later}, "
            f"more than the limit of {format_bytes(limit_bytes)} less headroom; "
            f"raise --memory-limit, lower --headroom {OWN_STUDY}, or make the model or the sample smaller"
        )
    if all(outcome.crowded for outcome in failed):
        return f"other processes took the memory that was free when the search began ({failed[-1].cause}); {OTHERS}"
    if all(outcome.on_host for outcome in failed):
        return (
            f"in every probe {failed[-1].cause}; use fewer data workers, build and load less in the model file, or use a host "
            "with more memory"
        )
    if kinds == {Kind.OOM}:  # choices that do not go together are left out: they say nothing of what fits
        return f"{predicted or _describe_shortage(failed, limit_bytes)}; raise --memory-limit, or make the model or the sample smaller"
    listed = "; ".join(
        sorted(
            {
                f"{outcome.kind}: {outcome.cause}"
                for outcome in failed
                if outcome.kind is not Kind.OOM or outcome.on_host
            }
        )
    )
    return f"no config finished a probe ({listed}); `autotune probe` runs one and shows its log"


def _why_not_even_so(fits: Sequence[Measurement], objective: Objective) -> str:
    """Why nothing is feasible although some configs took less than the usable memory."""
    fastest = max(found.samples_per_s for found in fits)
    if (needed := objective.least_samples_per_s) is not None and fastest < needed:
        return (
            f"the fastest config that fits trains {fastest:.3g} samples/s; expected at least {needed:.3g}, {objective.kept_speed:.0%} of "
            f"the baseline's, which --objective {objective.name} keeps; fix or exclude less, or take another objective"
        )
    return (
        f"the smallest config that ran takes {format_bytes(min(found.long_run_peak_bytes for found in fits))}, and even so the device's "
        f"allocator found no room in {format_bytes(objective.memory_limit_bytes)} before it had emptied its cache; raise --memory-limit, "
        "or make the model or the sample smaller"
    )


def never_ran(probed: Sequence[Trial], baseline: Config) -> dict[str, tuple[Outcome, ...]]:
    """The choices (`name=choice`) whose every probe ended in an error or a crash while probes without them ran, each with its outcomes.

    Choices that failed only together are named together. A choice is not named if each of its failures has another choice that
    also failed without it. A batch larger than the training set says nothing of the choices beside it.
    """
    told = [probe for probe in probed if not probe.outcome.too_few_samples]
    broken = {Kind.ERROR, Kind.CRASHED}
    if all(probe.outcome.kind in broken for probe in probed):
        return {}

    def changes(probe: Trial) -> list[str]:
        differences = probe.config.differences(baseline).items()
        return [f"{name}={choice}" for name, choice in differences if name not in BATCH_KEYS]

    ran = {named for probe in told if probe.outcome.kind not in broken for named in changes(probe)}
    suspects = [(probe.outcome, frozenset(changes(probe)) - ran) for probe in told if probe.outcome.kind in broken]
    ended: dict[str, list[Outcome]] = {}
    for outcome, together in suspects:
        least = [other for _, other in suspects if other and other <= together]
        for blamed in {other for other in least if not any(less < other for less in least)}:
            ended.setdefault(" with ".join(sorted(blamed)), []).append(outcome)
    return {named: tuple(each) for named, each in ended.items()}


def none_again(failed: Mapping[Config, Outcome], baseline: Config, objective: Objective) -> str:
    """Why the play-off left no answer, and what to try.

    Args:
        failed: the configs that ran in the search but failed in the play-off.
    """
    causes = "; ".join(f"{_named(config, baseline)}: {failure(outcome)}" for config, outcome in failed.items())
    kinds = {Kind.OOM if objective.beyond_memory(outcome) else outcome.kind for outcome in failed.values()}
    remedies = []
    if Kind.OOM in kinds:
        remedies.append(f"leave more room with --headroom {min(objective.headroom + MORE_ROOM, 0.5):.0%}, {OWN_STUDY}")
    if Kind.TIMEOUT in kinds:
        remedies.append("give probes more time with --probe-timeout")
    if kinds - {Kind.OOM, Kind.TIMEOUT}:
        remedies.append("`autotune probe` runs one config and shows its log")
    return f"none of the best configs succeeded again in the play-off ({causes}); {', or '.join(remedies)}"


def _named(config: Config, baseline: Config) -> str:
    changes = config.differences(baseline)
    return ", ".join(f"{name}={c}" for name, c in changes.items() if name != "accumulation_steps") or "the baseline"


def _describe_shortage(failed: Sequence[Outcome], limit_bytes: int) -> str:
    """By how much the smallest config that failed exceeded the limit, as far as that is known."""
    needs = [outcome.peak_bytes + outcome.attempted_bytes for outcome in failed if outcome.attempted_bytes]
    smallest = min(needs, default=0)
    if smallest <= limit_bytes:
        return f"every config that was tried ran out of memory within a limit of {format_bytes(limit_bytes)}"
    return (
        f"the smallest config that was tried needs at least {format_bytes(smallest)}, "
        f"{format_bytes(smallest - limit_bytes)} more than the limit of {format_bytes(limit_bytes)}"
    )


def effects(answer: Config, baseline: Config, probed: Sequence[Trial]) -> tuple[Effect, ...]:
    """The effect of each choice that differs from the baseline's. Pairs that nothing disturbed are used where there are any.

    Args:
        probed: every probe of the study, play-offs included.
    """
    known = feasible_each_time(probed)
    calm = {config for config, trials in known.items() if not all(trial.outcome.disturbances for trial in trials)}
    disturbances: dict[Hashable, dict[int, float]] = {
        config: {_round(t): unrest(t.outcome) for t in trials} for config, trials in known.items()
    }
    evidence = Evidence({config: _logs(trials) for config, trials in known.items()}, {}, disturbances)
    found = []
    for name, choice in answer.differences(baseline).items():
        if name == ACCUMULATION:
            continue
        pairs = [
            (config, other)
            for config in known
            for other in known
            if config[name] == choice and other[name] == baseline[name] and differ(config, other) == [name]
        ]
        undisturbed = [(config, other) for config, other in pairs if config in calm and other in calm]
        used = undisturbed or pairs
        ratio, interval = _speed_ratio(evidence, used)
        peaks = [_log_peak(known[config]) - _log_peak(known[other]) for config, other in used]
        found.append(
            Effect(
                technique=name,
                choice=choice,
                baseline_choice=baseline[name],
                speed_ratio=ratio,
                speed_ratio_ci=interval,
                memory_ratio=math.exp(fmean(peaks)) if peaks else None,
                num_pairs=len(used),
                disturbed=bool(pairs) and not undisturbed,
            )
        )
    return tuple(found)


def differ(config: Config, other: Config) -> list[str]:
    """What two configs differ in, but for the accumulation that follows from the batch."""
    return [name for name in config.differences(other) if name != ACCUMULATION]


def _logs(trials: Sequence[Trial]) -> Mapping[int, float]:
    """A config's throughput by round, in logarithms. The search's round ties configs that did not play to the others, and stays."""
    calm = any(trial.in_play_off and not trial.outcome.disturbances for trial in trials)
    used = [trial for trial in trials if not (calm and trial.in_play_off and trial.outcome.disturbances)]
    found = [(_round(trial), trial.outcome.measurement) for trial in used]
    return {number: math.log(measured.samples_per_s) for number, measured in found if measured is not None}


def _round(trial: Trial) -> int:
    """The round of the play-off that a trial belongs to; the search counts as one."""
    return SEARCH if trial.round is None else trial.round


def _speed_ratio(evidence: Evidence, pairs: Sequence[Pair]) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """The ratio of throughputs, with its 95 % interval by the noise between equal processes. Pairs count as independent of each other."""
    if not pairs:
        return None, None
    found = [evidence.difference(config, other) for config, other in pairs]
    mean = fmean(one.mean for one in found)
    half = math.hypot(*((one.quantile(1 - TAIL) - one.quantile(TAIL)) / 2 for one in found)) / len(found)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def _log_peak(trials: Sequence[Trial]) -> float:
    return math.log(max(trial.outcome.measurement.peak_bytes for trial in trials if trial.outcome.measurement))


def may_fit(history: History, cost_model: CostModel, config: Config) -> bool:
    """Whether there is any hope that a config fits."""
    prediction = cost_model.predict(history, config)
    return prediction is None or prediction.chance_to_fit >= UNLIKELY_TO_FIT


def is_hopeless(history: History, cost_model: CostModel) -> bool:
    """Whether nothing fits, some probes failed as predicted, and the config that is next (the likeliest to fit, or the leanest) is
    predicted to fail too; or whether what is searched for was observed of none of several configs that ran.
    """
    if history.best is not None:
        return False
    if sum(not history.objective.is_known(outcome) for outcome in history.known.values()) >= MOST_UNKNOWN:
        return True
    foreseen = [
        trial
        for trial in history.searched
        if trial.prediction is not None
        and trial.prediction.chance_to_fit < UNLIKELY_TO_FIT
        and history.objective.does_not_fit(trial.outcome)
    ]
    if len(foreseen) < MOST_UNLIKELY:
        return False
    following = cost_model.propose(history)
    return following is not None and not may_fit(history, cost_model, following.config)


def nothing(history: History, cost_model: CostModel, inspection: Inspection, refused: Sequence[str]) -> str:
    """Why no config can be recommended, and what to try.

    Args:
        refused: what did not pass its comparison with plain fp32, each with the reason.
    """
    space, objective = history.space, history.objective
    if history.failed_again:
        return none_again(history.failed_again, space.baseline, objective)
    num_ran = sum(map(objective.feasible, history.known.values()))
    if refused and num_ran:
        ran = f"{plural(num_ran, 'config')} ran within the memory, but none may be recommended"
        return f"{ran}: {'; '.join(refused)}. {TRAINED_TODAY}"
    tried = [trial for trial in history.searched if space.answers(trial.config)]
    if unknown := _unknown(tried, objective):
        return unknown
    left = cost_model.propose(history)
    need = _least_need(history, cost_model, [left.config] if left is not None else [])
    reasons = [no_fit(tried, objective, need)]
    is_whole = space.stays_whole and space.baseline.accumulation_steps == 1
    if tried and is_whole and all(objective.does_not_fit(trial.outcome) for trial in tried):
        reasons.append(
            f"the batch of {space.baseline.batch_size} is not cut, as smaller ones learn, or may learn, something else: a smaller "
            "--global-batch takes less memory"
        )
    if history.searched and left is not None and may_fit(history, cost_model, left.config):
        reasons.append(_what_was_left(history, left.config))
    if space.fixed:
        reasons[0] = f"nothing feasible with {', '.join(f'{n}={c}' for n, c in space.fixed.items())}: {reasons[0]}"
        reasons += _what_would_fit(history, cost_model, inspection)
    return "; ".join(filter(None, reasons))


def _unknown(tried: Sequence[Trial], objective: Objective) -> str:
    """The sentence that configs ran without their figure being observed; empty where none did."""
    fitting = [t.outcome for t in tried if t.outcome.ok and not objective.beyond_memory(t.outcome)]
    whys = {objective.why_unknown(o.measurement) for o in fitting if o.measurement and not objective.is_known(o)}
    if not whys:
        return ""
    ran = f"{plural(len(fitting), 'probe')} ran within the memory, but their {objective.name} is not known"
    return f"{ran}: {'; '.join(sorted(whys))}. Try again, or take another --objective"


def _least_need(history: History, cost_model: CostModel, left: Sequence[Config]) -> str:
    """How much the config that needs least is predicted to need, in words; empty unless that is more than the usable memory.

    Args:
        left: the likeliest to fit of those that were not tried.
    """
    objective = history.objective
    failed = [config for config, outcome in history.known.items() if objective.does_not_fit(outcome)]
    found = [cost_model.predict(history, config) for config in (*failed, *left) if history.space.answers(config)]
    known = [p for p in found if p and p.peak_high_bytes and p.peak_high_bytes < TELLING * (p.peak_low_bytes or 0)]
    least_bytes = min((p.peak_bytes for p in known if p.peak_bytes), default=0)
    if least_bytes <= objective.usable_bytes:
        return ""
    return (
        f"the smallest config is predicted to need about {format_bytes(least_bytes)}, and the limit of "
        f"{format_bytes(objective.memory_limit_bytes)} leaves {format_bytes(objective.usable_bytes)}"
    )


def _what_was_left(history: History, left: Config) -> str:
    """The sentence that a config which may fit was not tried yet."""
    named = history.space.techniques.describe(left, history.space.baseline)
    failed = [trial.outcome for trial in history.searched if not trial.outcome.ok]
    if all(o.kind is Kind.UNSUPPORTED or history.objective.does_not_fit(o) for o in failed):
        left_over = f"the next to try ({named}) may fit"
    else:  # some failed for other reasons, which say nothing of what fits
        left_over = f"not all was tried (next: {named})"
    return f"{left_over}: the same command with a larger --budget, or more --trials, goes on with it"


def _what_would_fit(history: History, cost_model: CostModel, inspection: Inspection) -> Iterator[str]:
    """What to fix instead, and whether the baseline fits: where the user's `--fix` leaves nothing."""
    for name in history.space.fixed:
        if (choice := next(_fitting(history, cost_model, inspection, name), None)) is not None:
            yield f"{name}={choice} is predicted to fit"
    if history.baseline is not None and history.objective.feasible(history.baseline):
        baseline = history.space.baseline
        yield f"the baseline (batch {baseline.batch_size} x{baseline.accumulation_steps}) fits, but is not what was fixed"


def _fitting(history: History, cost_model: CostModel, inspection: Inspection, name: str) -> Iterator[Choice]:
    """Choices of a fixed key with which some config is likely to fit; the largest batch size first."""
    space = history.space
    if name == BATCH_SIZE:
        choices: list[Choice] = [size for size in reversed(inspection.batch.sizes) if size < int(space.fixed[name])]
    elif name in space.techniques:
        choices = [choice for choice in inspection.support_of(name).choices if choice != space.fixed[name]]
    else:
        choices = []
    kept = [config for config in space.tracing() if space.answers(config)]
    for choice in choices:
        configs = (space.complete({**config.as_dict(), name: choice}) for config in kept)
        predictions = (cost_model.predict(history, config) for config in configs)
        if any(p is not None and p.peak_bytes and p.chance_to_fit > LIKELY for p in predictions):
            yield choice
