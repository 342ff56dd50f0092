"""The reasons for an answer: the figures, the limit of the speed, and why nothing fitted. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from autotune.errors import AutotuneError, DeviceError, OwnFault, TaskError
from autotune.records.config import BATCH_KEYS, Config
from autotune.records.measured import Measured
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.result import DeviceUse
from autotune.records.study import Trial
from autotune.study.figures import at_one_time, measured, undisturbed
from autotune.study.history import feasible_each_time
from autotune.tuning.effects import differ
from autotune.tuning.entrant import failure
from autotune.units import format_bytes, plural

DATA_BOUND = 0.25  # share of a step spent waiting for data that makes loading the limit
BUSY, IDLE = 0.5, 0.15  # share of the device's limit from which a resource is the limit, and below which it is none
GROWING = 1.03  # throughput gain per doubling of the batch that shows unused parallelism
OWN_STUDY = "in a new study (--study NAME)"  # a study cannot be resumed with another headroom
OTHERS = "end them, or leave them their memory with --memory-limit, and run again"
TRAINED_TODAY = "If you train so today, say it in BASELINE: what you run is the measure, and is not compared"
MORE_ROOM = 0.1  # of the limit: how much more headroom to try where what fitted once did not again


def as_error(outcome: Outcome, consequence: str = "") -> AutotuneError:
    """The error to raise for an outcome of the kind `error`.

    Args:
        consequence: text appended to the cause.
    """
    text = outcome.cause + (f"; {consequence}" if consequence else "")
    if outcome.own_fault:
        return OwnFault(f"{text}; please report it with the traceback above", frames=outcome.detail)
    if outcome.device_fault:
        return DeviceError(text)
    return TaskError(text, frames=outcome.detail)


def without_digits(cause: str) -> str:
    """A cause without digits: the same error may name other shapes in another config."""
    return re.sub(r"\d+", "", cause)


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
    batches = [probe for probe in probed if differ(probe.config, answer) == ["batch_size"]]
    smaller = [probe for probe in batches if probe.config.batch_size < answer.batch_size]
    larger = [probe for probe in batches if probe.config.batch_size > answer.batch_size]
    growing = any(found.samples_per_s > GROWING * speed for speed in _speeds(smaller))
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
    faster = max(_speeds(larger), default=math.inf)
    tried = "; a larger batch was not faster" if faster < GROWING * found.samples_per_s else ""
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


def no_fit(probed: Sequence[Trial], limit_bytes: int, predicted: str = "") -> str:
    """Why nothing was feasible, by how much, and what to try.

    Args:
        predicted: how much is predicted to be needed, in words; empty where nothing is known.
    """
    if not probed:
        return "; ".join(filter(None, (predicted, "no config was tried in the time there was: give a larger --budget")))
    failed = [probe.outcome for probe in probed]
    kinds = {outcome.kind for outcome in failed if outcome.kind is not Kind.UNSUPPORTED}
    over = [outcome.measurement.peak_bytes for outcome in failed if outcome.measurement]
    if over:
        return (
            f"the smallest config that ran needs {format_bytes(min(over))}, "
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
    if kinds == {Kind.OOM}:  # beside choices that do not go together, which say nothing of what fits
        return f"{predicted or describe_shortage(failed, limit_bytes)}; raise --memory-limit, or make the model or the sample smaller"
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


def never_ran(probed: Sequence[Trial], baseline: Config) -> dict[str, tuple[Outcome, ...]]:
    """The choices, `name=choice`, whose every probe ended in an error or a crash, while probes without them ran: what came of each.

    Choices that failed together alone are named together, and one whose failures all have a choice that failed without it is
    not named. A batch larger than the training set says nothing of the choices beside it.
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


def none_passed(num_ran: int, refused: Sequence[str]) -> str:
    """Why configs ran within the memory and none of them may be recommended, and what to try."""
    said = "; ".join(refused)
    return f"{plural(num_ran, 'config')} ran within the memory, but none may be recommended: {said}. {TRAINED_TODAY}"


def _named(config: Config, baseline: Config) -> str:
    changes = config.differences(baseline)
    return ", ".join(f"{name}={c}" for name, c in changes.items() if name != "accumulation_steps") or "the baseline"


def describe_shortage(failed: Sequence[Outcome], limit_bytes: int) -> str:
    """By how much the smallest config that failed exceeded the limit, as far as that is known."""
    needs = [outcome.peak_bytes + outcome.attempted_bytes for outcome in failed if outcome.attempted_bytes]
    smallest = min(needs, default=0)
    if smallest <= limit_bytes:
        return f"every config that was tried ran out of memory within a limit of {format_bytes(limit_bytes)}"
    return (
        f"the smallest config that was tried needs at least {format_bytes(smallest)}, "
        f"{format_bytes(smallest - limit_bytes)} more than the limit of {format_bytes(limit_bytes)}"
    )
