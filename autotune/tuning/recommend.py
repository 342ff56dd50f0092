"""The recommendation: the answer, its verdict, the evidence for it, and its warnings.

The verdict is decided here alone, so that its word, its interval and its confirmation agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune.devices import capabilities_of
from autotune.devices.calibration import holds_for
from autotune.errors import AutotuneError
from autotune.prediction.time import Roofline
from autotune.records.config import Config
from autotune.records.measured import Measured, Rival, front_of
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.result import Compiling, EnergyUse, Goal, Money, PlayOffOutcome, Reasons, Result, Subject
from autotune.records.scaling import Scaling
from autotune.study.caches import RecheckCache
from autotune.study.figures import measured as measured_by
from autotune.study.figures import undisturbed, unrest
from autotune.study.history import History
from autotune.tuning import why
from autotune.tuning.anytime import answer_so_far
from autotune.tuning.cautions import Answer, cautions
from autotune.tuning.clearance import Clearance
from autotune.tuning.entrant import Ratio, Standing
from autotune.tuning.evidence import Evidence, Searched
from autotune.tuning.find_eval_batch import evaluation_of
from autotune.tuning.later import later_std, widen
from autotune.tuning.one_device import one_device_of
from autotune.tuning.playoff import MIN_ROUNDS
from autotune.tuning.state import Search
from autotune.tuning.why import effects
from autotune.units import format_chance, format_exact_seconds, plural

UNCHECKED = "its gradients were not compared with plain fp32 before the search ended; run the same command again, and it goes on"
AS_FAST = 1.05  # an interval that reaches above leaves open whether there is a gain; one below the inverse, a loss
DECIDING_WIDTH = 0.1  # of the gain's interval, in logarithms
MOST_BUDGETS = 10  # times the budget: no larger one is proposed
ROUNDED_S = 30.0  # to which a proposed budget is rounded up
MILLION = 1_000_000  # samples, for which the price is told
NAMED = 6  # so many of the choices that were not tried are named


class NothingFeasible(AutotuneError):
    """No config ran within the limits."""

    exit_code = 1


class Interrupted(AutotuneError):
    """The user interrupted the search. Each process of a launched script that was told of it raises it, too.

    Attributes:
        result: the best so far of the search that was running; None where nothing was measured.
        scaling: where several numbers of devices are searched, what was found of each; None where that is nothing, or for one search.
    """

    exit_code = 130
    scaling: Scaling | None = None

    def __init__(self, result: Result | None) -> None:
        super().__init__("interrupted; the study is kept, and the same command continues it")
        self.result = result


def recommend(search: Search, clearance: Clearance, standing: Standing | None) -> Result | None:
    """The play-off's answer, or the best so far if there was no play-off; None if nothing is feasible.

    The study keeps it, unless it already holds a confirmed answer and this one is not confirmed.
    """
    result, kept = _result(search, clearance, standing), search.store.facts.result
    if result is not None and (result.play_off.confirmed or kept is None or not kept.play_off.confirmed):
        search.store.keep(result=result, warnings=tuple(result.warnings), no_answer="")
    return result


def _result(search: Search, clearance: Clearance, standing: Standing | None) -> Result | None:
    history = search.history
    confirmed = standing.answer if standing is not None else None
    if standing is not None and confirmed is not None:
        answer, measured = confirmed.config, standing.figures[confirmed.config]
        outcomes = list(confirmed.outcomes.values())
    elif (best := _best(search, clearance)) is not None:
        answer, outcomes = best[0], _processes(history, *best)
        measured = measured_by(answer, outcomes)
    else:
        return None
    baseline, speedup = _baseline(search, standing, measured, outcomes)
    is_baseline = answer == history.space.baseline
    played = standing if confirmed is not None else None
    later, num_rechecks = _later(search)
    gain = None if is_baseline or speedup is None else speedup
    told = gain and widen(gain, later)
    judged = gain_of(search, played, speedup, kept=is_baseline)
    verdict, undecided = verdict_of(search, played, judged, kept=is_baseline)
    found = clearance.of_answer(answer)
    unchecked = "" if clearance.is_cleared(answer) else UNCHECKED
    known = Answer(
        search=search,
        config=answer,
        compared=found,
        is_cleared=clearance.is_cleared,
        unchecked=unchecked,
        standing=standing,
        outcomes=outcomes,
        baseline=baseline,
    )
    for caution in cautions(known):
        search.warn(caution)
    ran_through = [*_ran_through(standing, history.objective)]
    return Result(
        config=answer.as_dict(),
        samples_per_s=measured.samples_per_s,
        samples_per_s_ci=measured.samples_per_s_ci,
        peak_bytes=measured.peak_bytes,
        goal=_goal(search),
        baseline=baseline,
        speedup=1.0 if is_baseline else speedup[0] if speedup else None,
        speedup_ci=told and told[1:],
        verdict=verdict,
        undecided=undecided,
        play_off=_play_off(standing, history.objective, gain, (later, num_rechecks), kept=is_baseline),
        front=front_of(why.figures(history.trials, ran_through).values()),
        reasons=_reasons(search, answer, measured),
        checks=() if found is None or found.check is None else (found.check,),
        unchecked=unchecked,
        compiling=_compiling(history, answer, ran_through),
        evaluation=evaluation_of(search, answer),
        energy=_energy(search, measured, outcomes, None if is_baseline else played, later),
        money=_money(search, measured, baseline),
        one_device=one_device_of(search, answer, measured, baseline, later),
        cost=search.cost(),
        storage=search.store.place.storage,
        study=search.store.place.study,
        subject=_subject(search),
        places=next((o.measurement.places for o in outcomes if o.measurement), {}),
        command=search.runner.command(answer),
        warnings=tuple(search.warnings),
    )


def _play_off(
    standing: Standing | None, objective: Objective, gain: Ratio | None, rechecks: tuple[float, int], *, kept: bool
) -> PlayOffOutcome:
    """What the play-off was.

    Args:
        gain: of the answer over the baseline, as the pairs tell it.
        rechecks: as `_later` returns it.
        kept: the answer is the baseline.
    """
    played = standing if standing is not None and standing.answer is not None else None
    later, num_rechecks = rechecks
    return PlayOffOutcome(
        confirmed=played is not None,
        finalists=_finalists(standing),
        num_rounds=played.num_together if played is not None else 0,
        rival=_rival(standing, objective) if kept else None,
        training_speedup=None if kept else _training_speedup(played, objective, later),
        paired_ci=gain and gain[1:],
        paired_std=played.speedup_std if played is not None and gain is not None else None,
        later_std=later,
        num_rechecks=num_rechecks,
    )


def _goal(search: Search) -> Goal:
    objective = search.history.objective
    return Goal(
        memory_limit_bytes=objective.memory_limit_bytes,
        headroom=objective.headroom,
        objective=objective.name,
        price=search.options.price,
        train_samples=objective.train_samples,
        asked=dict(search.asked),
    )


def _subject(search: Search) -> Subject:
    facts = search.inspection.facts
    return Subject(
        device=search.inspection.device.name,
        num_processes=search.inspection.known_world.size,
        model=search.runner.stated.model,
        made_by=search.runner.stated.made_by,
        parts=facts.parts,
        optimizer=facts.optimizer,
        trained=dict(search.store.place.trained),
        coupling=search.inspection.coupling,
        has_batchnorm=facts.has_batchnorm,
    )


def _reasons(search: Search, answer: Config, measured: Measured) -> Reasons:
    history, traces, techniques = search.history, search.tracing.traces, search.history.space.techniques
    own = history.known[answer].measurement if answer in history.known else None
    roofline = Roofline.of(search.calibration, traces)
    speed = measured.samples_per_s / _num_devices(search)  # of the one device whose rates are known
    use = roofline.use(answer, speed, techniques) if roofline is not None else None
    roles = (("baseline", history.space.baseline), ("answer", answer))
    tokens_per_sample = search.inspection.facts.tokens_per_sample
    return Reasons(
        effects=effects(answer, history.space.baseline, history.trials),
        limit=why.limiting(answer, own, history.searched, history.objective, use) if own else "",
        use=use,
        peak_by_kind={
            role: peak.breakdown.by_kind() for role, config in roles if (peak := traces.peak(config, techniques))
        },
        tokens_per_s=tokens_per_sample and tokens_per_sample * measured.samples_per_s,
    )


def _compiling(history: History, answer: Config, ran_through: Sequence[Measured]) -> Compiling:
    """What compiling costs, against the fastest config that compiles nothing."""
    cold_s, known = history.compile_cold_s(answer), why.figures(history.searched, ran_through)
    plain = [found for config, found in known.items() if not history.space.setting_up(config)]
    won = None
    if plain and answer in known:
        fastest = max(plain, key=lambda found: found.samples_per_s)
        samples_per_step = answer.plan_in(history.space.world).samples_per_step
        won = why.break_even(samples_per_step, known[answer], fastest, cold_s)
    steps, seconds = won or (None, None)
    return Compiling(compile_cold_s=cold_s or None, break_even_steps=steps, break_even_s=seconds)


def _energy(
    search: Search, answer: Measured, outcomes: Sequence[Outcome], standing: Standing | None, later: float
) -> EnergyUse:
    """The energy of the answer, or why it is not known.

    Args:
        outcomes: the processes behind the answer's figures.
        standing: None where the answer is the baseline, or was not confirmed.
        later: as `_later` tells it; what a sample takes of time and of energy differs alike.
    """
    if answer.joules_per_sample is None:
        told = (outcome.measurement.no_energy for outcome in outcomes if outcome.measurement)
        return EnergyUse(no_energy=search.inspection.device.no_energy or next(filter(None, told), ""))
    ratio = widen(standing.energy, later) if standing is not None and standing.energy is not None else None
    return EnergyUse(
        joules_per_sample=answer.joules_per_sample,
        joules_per_sample_ci=answer.joules_per_sample_ci,
        energy_ratio=ratio and ratio[0],
        energy_ratio_ci=ratio and ratio[1:],
    )


def _num_devices(search: Search) -> int:
    """The devices that train together. The processes on a CPU train on one machine."""
    has_own = capabilities_of(search.inspection.device.name).own_processors
    return search.inspection.known_world.size if has_own else 1


def _money(search: Search, answer: Measured, baseline: Measured | None) -> Money | None:
    """What a million samples cost; None where no price was given."""
    if (price := search.options.price) is None:
        return None
    num_devices = _num_devices(search)
    return Money(
        num_devices=num_devices,
        per_million_samples=price.of(MILLION, answer.samples_per_s, num_devices),
        baseline_per_million_samples=None
        if baseline is None
        else price.of(MILLION, baseline.samples_per_s, num_devices),
    )


def _best(search: Search, clearance: Clearance) -> tuple[Config, Outcome] | None:
    """The best feasible config that may be recommended; after an interrupt the best of all, compared with plain fp32 or not."""
    history = search.history
    may_be = {c: o for c, o in history.feasible.items() if search.interrupted() or clearance.is_cleared(c)}
    return max(may_be.items(), key=lambda item: history.objective.score(item[1]), default=None)


def _training_speedup(standing: Standing | None, objective: Objective, later: float = 0.0) -> Ratio | None:
    """The candidate's throughput over the whole training, over the baseline's; None where its length is not known or neither compiles.

    Args:
        later: by how much a later run may differ besides, as `later_std` says.
    """
    if standing is None or standing.gain is None or not objective.is_training_speed:
        return None
    both = filter(None, (standing.candidate, standing.baseline))
    ran = (outcome.measurement for entrant in both for outcome in entrant.outcomes.values())
    if not any(found is not None and found.compile_cold_s for found in ran):
        return None
    return widen(standing.gain, later)


def _rival(standing: Standing | None, objective: Objective) -> Rival | None:
    if standing is None or standing.candidate is None or standing.speedup is None:
        return None
    speedup, low, high = standing.speedup
    energy = standing.energy
    return Rival(
        **vars(standing.figures[standing.candidate.config]),
        speedup=speedup,
        speedup_ci=(low, high),
        energy_ratio=energy and energy[0],
        energy_ratio_ci=energy and (energy[1], energy[2]),
        training_speedup=_training_speedup(standing, objective),
    )


def _finalists(standing: Standing | None) -> tuple[Measured, ...]:
    """What the play-off found of each, those that failed in it included."""
    if standing is None:
        return ()
    return tuple(entrant.finalist(standing.figures) for entrant in standing.entrants if entrant.outcomes)


def _later(search: Search) -> tuple[float, int]:
    """How much a gain differs between a search and a later run here, as `later_std` says, and the number of rechecks behind it.

    A recorded table and a closed form are the same at any time.
    """
    if not search.runner.keeps_traces:
        return 0.0, 0
    kept = RecheckCache(search.store.place.folder, holds_for(search.inspection.device)).read()
    rechecks = kept.rechecks if kept is not None else ()
    return later_std(rechecks), len(rechecks)


def _ran_through(standing: Standing | None, objective: Objective) -> Iterable[Measured]:
    """The figures of the entrants that finished the play-off and fit."""
    if standing is None:
        return
    for entrant in (*standing.entrants, standing.baseline):
        if entrant is None or not entrant.outcomes or entrant.failed:
            continue
        # the baseline may need too much memory, and is compared with all the same
        if not any(map(objective.beyond_memory, entrant.outcomes.values())):
            yield standing.figures[entrant.config]


def _baseline(
    search: Search, standing: Standing | None, answer: Measured, outcomes: list[Outcome]
) -> tuple[Measured | None, Ratio | None]:
    """The baseline's figures and the speed-up over them: from the play-off, else from the search's own probes.

    Args:
        outcomes: the processes behind the answer's figures.
    """
    history = search.history
    if standing is not None and standing.answer is not None:
        base = standing.baseline
        return (standing.figures[base.config], standing.speedup) if base is not None else (None, None)
    config, outcome = history.space.baseline, history.baseline_that_runs
    if outcome is None:
        return None, None
    own = _processes(history, config, outcome)
    baseline = measured_by(config, own)
    if answer.config == baseline.config:
        return baseline, None
    once = Evidence({}, {"answer": _once(answer, outcomes), "baseline": _once(baseline, own)})
    return baseline, once.difference("answer", "baseline").ratio()


def _once(found: Measured, outcomes: list[Outcome]) -> Searched:
    """A speed that was not measured in rounds, with the unrest of the least disturbed process behind it."""
    return Searched(math.log(found.samples_per_s), unrest=min(map(unrest, outcomes)))


def _processes(history: History, config: Config, outcome: Outcome) -> list[Outcome]:
    """The outcomes that the speed of a config follows from where no play-off confirmed an answer.

    That is its outcome in the search if nothing disturbed it, else its undisturbed ones in the play-off, else that of the search.
    """
    played = (trial.outcome for trial in history.trials if trial.in_play_off and trial.config == config)
    return undisturbed([outcome]) or undisturbed(played) or [outcome]


def gain_of(search: Search, standing: Standing | None, speedup: Ratio | None, *, kept: bool) -> Ratio | None:
    """What the verdict is on: the speed-up; that of the whole training where its length is known; where something else is observed, the
    gain in that; of a baseline that is kept, what the best of the others would gain by the objective. None without one.

    Args:
        standing: None where the answer was not confirmed.
        speedup: of the answer over the baseline, or of the best of the others where that is kept.
        kept: the answer is the baseline.
    """
    objective = search.history.objective
    by_objective = kept or objective.observed or _training_speedup(standing, objective) is not None
    return standing.gain if standing is not None and by_objective else speedup


def verdict_of(search: Search, standing: Standing | None, gain: Ratio | None, *, kept: bool) -> tuple[str, str]:
    """The verdict's word, and for `undecided` what is open and would decide it.

    Args:
        standing: None where the answer was not confirmed: then it is not said to be faster or slower.
        gain: of the answer over the baseline, or of the best of the others where that is kept; None without one of them.
        kept: the answer is the baseline.
    """
    objective = search.history.objective
    better, worse = (objective.better, objective.worse) if objective.observed else ("faster", "slower")
    if kept:
        question = _open_question(search, standing, gain)
        return "undecided" if question else "same", question
    if standing is None:
        said = [f"{_not_played(search)}, so its figure is from one process"]
        _, chance = answer_so_far(search.history, search.cost_model, search.play_off)
        if chance is not None:
            said.append(
                f"by what the search found, it is better than the baseline with a chance of {format_chance(chance)}"
            )
        return "undecided", "; ".join([*said, *_would_do(search, standing, gain, 0)])
    if gain is None:
        return better, ""  # than a baseline that does not run
    _, low, high = gain
    if low > 1 or high < 1:
        return better if low > 1 else worse, ""
    if low >= 1 / AS_FAST and high <= AS_FAST:
        return "same", ""
    said = [f"its interval holds 1 after {plural(standing.num_rounds, 'round')} of the play-off"]
    return "undecided", "; ".join([*said, *_would_do(search, standing, gain, 0)])


def _open_question(search: Search, standing: Standing | None, gain: Ratio | None) -> str:
    """Why the evidence is too thin to say that nothing beats the baseline; empty where it is not."""
    history = search.history
    left = [switch for switch, _ in search.untried().left(history)]
    tried = {config for config, outcome in history.known.items() if outcome.ok} - {history.space.baseline}
    speedup = standing.speedup if standing is not None else None
    too_slow = speedup is not None and speedup[2] < history.objective.kept_speed
    may_be_better = gain is not None and gain[2] > AS_FAST and not too_slow
    not_played = standing is None and any(config in history.feasible for config in tried)
    late = None if standing is None else _ahead_and_not_played(history, standing)
    if not (may_be_better or left or not_played or late):
        return ""
    said = [f"{plural(len(tried), 'config') if tried else 'nothing'} ran beside the baseline"]
    said += [_not_played(search)] if not_played else []
    if late:
        said.append(
            f"{late}, which was {history.objective.better} in the search, took part in no round of the play-off"
        )
    if left:
        names = ", ".join(f"{name}={choice}" for name, choice in left[:NAMED])
        said.append(f"never run: {names}" + (f" and {len(left) - NAMED} more" if len(left) > NAMED else ""))
    return "; ".join([*said, *_would_do(search, standing, gain if may_be_better else None, len(left))])


def _ahead_and_not_played(history: History, standing: Standing) -> str:
    """The fastest of the configs that one probe found clearly better than the baseline and that did not play; empty if there is none."""
    played = {entrant.config for entrant in standing.entrants if entrant.outcomes}
    merits = {config: history.objective.merit(outcome) for config, outcome in history.feasible.items()}
    clearly = AS_FAST * merits.get(history.space.baseline, math.inf)
    unplayed = {config: merit for config, merit in merits.items() if merit > clearly and config not in played}
    if not unplayed:
        return ""
    fastest = max(unplayed, key=lambda config: unplayed[config])
    return history.space.techniques.describe(fastest, history.space.baseline)


def _not_played(search: Search) -> str:
    if search.store.facts.whole_rounds:
        return "the answer took part in no round of the play-off that was completed"
    return "no round of the play-off was completed"


def _would_do(search: Search, standing: Standing | None, gain: Ratio | None, num_left: int) -> list[str]:
    """Which budget would decide it: for the choices that were not tried, and for rounds until the interval is narrow enough."""
    budget, probe_s = search.budget, search.budget.expected_probe_s(search.history)
    if search.interrupted():
        return []
    if budget.num_trials is not None and num_left and budget.elapsed_s < budget.budget_s / 2:
        return [f"more than --trials {budget.num_trials} would be enough"]
    rounds_s = 0.0
    if standing is None:
        rounds_s = 2 * MIN_ROUNDS * probe_s
    elif gain is not None:
        pair_s = sum(entrant.wall_s for entrant in (standing.baseline, standing.candidate) if entrant is not None)
        ratio, low, high = gain
        width = max(DECIDING_WIDTH, 2 * math.log(ratio))
        more = standing.num_rounds * ((math.log(high / low) / width) ** 2 - 1)
        if standing.num_rounds < MIN_ROUNDS:  # too few to know how much processes differ
            more = min(more, MIN_ROUNDS)
        rounds_s = max(0.0, more) * pair_s
    if rounds_s > MOST_BUDGETS * budget.budget_s:
        return ["processes differ too much here for any budget: try on a quieter machine"]
    asked_s = search.options.longest_s  # of which evaluation and other rankings have their shares
    needed_s = (budget.elapsed_s + num_left * probe_s + rounds_s) * asked_s / budget.budget_s
    would_do_s = ROUNDED_S * math.ceil(max(needed_s, asked_s + 1) / ROUNDED_S)
    return [f"--budget {format_exact_seconds(would_do_s)} would be enough"]
