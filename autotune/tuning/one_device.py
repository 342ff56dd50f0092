"""What several devices add to one: the baseline on one of them alone, in rounds of the play-off of all.

There it takes turns with the same baseline on all devices and with the answer, so both are compared with it within rounds. It is no point
of the searched space: the study keeps it beside the trials, and neither the search nor the choice of the answer sees it.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.records.config import ALONE, BATCH_SIZE, Config, ProbeSettings
from autotune.records.measured import Measured, OneDevice
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import OneDeviceRun
from autotune.runners.jobs import ProbeJob
from autotune.runners.runner import ProbeFault
from autotune.study.figures import measured, times_as_fast
from autotune.tuning.budget import COMPILING_PATIENCE
from autotune.tuning.entrant import NOTHING, Ratio, failure, samples_per_s
from autotune.tuning.guest import NUM_ROUNDS, Guest
from autotune.tuning.later import widen
from autotune.tuning.state import Search

PURPOSE = "one device"


def keep_time_for_one_device(search: Search) -> None:
    """Keep time for its rounds, once the baseline has shown how long a process takes."""
    if search.beside_one_device:
        num_known = sum(run.outcome.ok for run in _kept(search))
        search.budget.guest_s = max(0, NUM_ROUNDS - num_known) * _expected_s(search)


def invite_one_device(search: Search, settings: ProbeSettings, timed_s: Callable[[], float]) -> Guest | None:
    """One device as a guest of the play-off, with what earlier searches of the study found of it; None where it is not asked for.

    Args:
        settings: of the play-off's processes.
        timed_s: returns how long the next process is timed.
    """
    if not search.beside_one_device:
        return None
    kept = _kept(search)

    def run(config: Config, number: int) -> Outcome | None:
        outcome = _run(search, config, settings.replace(max_timed_s=timed_s()))
        if outcome is not None:
            kept.append(OneDeviceRun(config=config.as_dict(), round=number, outcome=outcome))
            search.store.keep(one_device=tuple(kept))
            found = outcome.measurement
            told = f"{found.samples_per_s:.3g} samples/s" if found else f"{outcome.kind}: {outcome.cause}"
            search.listener.tell(f"one device, {search.history.space.techniques.describe(config)}: {told}")
        return outcome

    guest = Guest(
        config=_first_config(search),
        run=run,
        does_not_fit=search.history.objective.does_not_fit,
        smaller=lambda config: _smaller(search, config),
        wall_s=_expected_s(search),
    )
    for known in tuple(kept):
        guest.note(Config(tuple(known.config.items())), known.round, known.outcome)
    return guest


def one_device_of(
    search: Search, answer: Config, figures: Measured, baseline: Measured | None, later: float
) -> OneDevice | None:
    """What was found of one device beside an answer for several; None where it is not asked for.

    Args:
        figures: of the answer, as users are told them; `baseline`: the same of the baseline, where it ran.
        later: by how much a gain differs in a later run, as `later_std` tells it.
    """
    if not search.beside_one_device:
        return None
    guest = search.play_off.guest if search.play_off is not None else None
    if search.play_off is None or guest is None or not guest.ran:
        config = _first_config(search) if guest is None else guest.config
        return OneDevice(**{**vars(NOTHING), "config": config.as_dict()}, failure=_why_not(guest))
    space = search.history.space
    told = {answer: figures} if baseline is None else {space.baseline: baseline, answer: figures}
    ran = [*guest.ran.values()]
    own = measured(guest.config, ran)
    found = {config: search.play_off.over_guest(config) for config in told}
    gains = {config: gain for config, gain in found.items() if gain is not None}
    for config, (gain, _, _) in (*gains.items(),)[
        :1
    ]:  # as the play-off tells speeds: by a gain, as far as a process has shown it
        speeds = [*map(samples_per_s, ran)]
        speed = min(max(told[config].samples_per_s / gain, min(speeds)), max(speeds))
        own = times_as_fast(own, speed / own.samples_per_s)
    ratios = {
        config: widen(_as_told(told[config].samples_per_s / own.samples_per_s, gain), later)
        for config, gain in gains.items()
    }
    each, speedup = ratios.get(space.baseline), ratios.get(answer)
    return OneDevice(
        **vars(own),
        efficiency=each and each[0] / space.world.size,
        efficiency_ci=each and (each[1] / space.world.size, each[2] / space.world.size),
        speedup=speedup and speedup[0],
        speedup_ci=speedup and speedup[1:],
    )


def _kept(search: Search) -> list[OneDeviceRun]:
    """What earlier searches of the study found that still counts: processes of whole rounds, and what did not fit."""
    facts, does_not_fit = search.store.facts, search.history.objective.does_not_fit
    return [
        run
        for run in facts.one_device
        if does_not_fit(run.outcome) or (run.outcome.ok and run.round in facts.whole_rounds)
    ]


def _as_told(ratio: float, estimate: Ratio) -> Ratio:
    """A ratio of two speeds that are told, with the interval of its estimate."""
    _, low, high = estimate
    return ratio, min(low, ratio), max(high, ratio)


def _why_not(guest: Guest | None) -> str:
    """Why there are no figures of one device, as a sentence."""
    if guest is None or (failed := guest.failed) is None:
        return "one device was not measured, because the search ended before; a larger --budget leaves time for it"
    if guest.does_not_fit(failed):
        return f"the baseline does not fit on one device: {failed.cause or failure(failed)}"
    return f"the baseline does not run on one device: {failure(failed)}"


def _first_config(search: Search) -> Config:
    """What the user would run on one device; where the baseline was halved to fit on each of several, no larger a micro batch than that."""
    inspection, space = search.inspection, search.history.space
    assert inspection.baseline_alone is not None
    config, most = Config(tuple(inspection.baseline_alone.items())), space.baseline.batch_size
    if most < int(inspection.baseline[BATCH_SIZE]):
        while config.batch_size > most:
            config = config.halved(inspection.global_batch)
    return config


def _smaller(search: Search, config: Config) -> Config | None:
    """The config in place of one that does not fit, as the baseline of several devices would be halved."""
    inspection = search.inspection
    if inspection.keeps_baseline_batch or inspection.batch.stays_whole or config.batch_size == 1:
        return None
    return config.halved(inspection.global_batch)


def _expected_s(search: Search) -> float:
    """Seconds that a process on one device is expected to take: it warms up by steps, which may be as many times as long as there are
    devices; everything else takes as long as on all of them.
    """
    history = search.history
    outcome = history.baseline
    if outcome is None or outcome.measurement is None:
        return search.budget.expected_probe_s(history)
    return outcome.running_s + (history.space.world.size - 1) * outcome.measurement.warmup_s


def _run(search: Search, config: Config, settings: ProbeSettings) -> Outcome | None:
    """Run a process on one device; None where it was cut short."""
    if search.interrupted() or search.left_s <= 0:
        return None
    size, setup_s = search.history.space.world.size, COMPILING_PATIENCE * search.history.setup_s(config)
    settings = settings.replace(
        world=ALONE, timeout_s=min(size * settings.timeout_s + setup_s, max(1.0, search.left_s))
    )
    try:
        with search.budget.split(PURPOSE):
            outcome = search.runner.run(ProbeJob(config=config, settings=settings))
    except ProbeFault as fault:
        return Outcome(kind=Kind.CRASHED, cause=str(fault))
    cut_short = outcome.kind is Kind.TIMEOUT and search.left_s <= 0
    ended_with_all = outcome.kind is Kind.CRASHED and search.interrupted()  # a batch system signals every process
    return None if cut_short or ended_with_all else outcome
