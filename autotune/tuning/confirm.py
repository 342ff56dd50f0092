"""Holds the play-off of a search: who takes part and who comes in later, how long a process is timed, and until when it goes on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from autotune.devices import capabilities_of
from autotune.probe.timing import OVERTIME
from autotune.proposers.cost_model import CostModel
from autotune.records.config import Config, ProbeSettings
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.study import PLAY_OFF, Proposal
from autotune.study.figures import unrest
from autotune.study.history import History
from autotune.tuning.budget import FEWEST_ROUNDS, MOST_FINALISTS, WANTED_ROUNDS, play_off_process_s
from autotune.tuning.entrant import Entrant, Standing
from autotune.tuning.evidence import Searched
from autotune.tuning.one_device import invite_one_device
from autotune.tuning.playoff import CLOSE, MIN_ROUNDS, RISK, SHORTEST_TIMED_S, PlayOff
from autotune.tuning.state import Search
from autotune.units import plural

PLAY_OFF_INTERVAL = 0.01
SURE_TO_FIT = 0.97  # of the usable memory: peaks of single processes differ by a few per cent
SAFE = 0.9  # of the usable memory: a substitute for a config that failed must not fail too
NEAR_BEST = 0.93  # single processes differ by this much on a busy machine: a config this near the best may be the best
AS_GOOD = 0.98  # of the best's merit: one process of each cannot tell such configs apart
MAY_WIN_Z = 1.2816  # a config so many standard deviations below the leader has a chance of 10 % to win: worth a place
BETTER = math.log(1.01)
ROUNDS_AHEAD = (1, 2, 4, 8, 16)  # of which one number has to pay: a single round may tell nothing where several do


def finalists_of(search: Search) -> list[Config]:
    """The best few configs, ranked by all probes together: as many as the remaining time can confirm."""
    history, budget = search.history, search.budget
    ranked = _ranked(history, search.cost_model.untaught)
    near = near_the_best(ranked, history.objective)
    others = [config for config in near if config != history.space.baseline]
    if not others:  # the baseline is far ahead, perhaps by luck: the best of the others plays all the same
        others = [config for config in ranked if config != history.space.baseline][:1]
    if not others:
        return []
    processes_s = [play_off_process_s(config, history.known[config]) for config in others[:MOST_FINALISTS]]
    baseline = history.space.baseline
    known = history.baseline_that_runs
    baseline_s = play_off_process_s(baseline, known) if known is not None else 0.0
    num = budget.num_finalists(processes_s, baseline_s)
    best = ranked[others[0]].measurement
    if best is None or history.objective.is_short_of_memory(best.long_run_peak_bytes):
        return others[:num]
    merits = {config: history.objective.merit(ranked[config]) for config in others}
    return with_the_simplest(merits, num, lambda config: len(history.space.changes(config)))


def confirm(
    search: Search,
    admit: Callable[[Config], bool] = lambda config: True,
    *,
    share: float = 1.0,
    until_ahead_by: float = math.inf,
) -> Standing | None:
    """Go on with the play-off of the best few and the baseline; None when no round was completed.

    Args:
        admit: whether a config may play.
        share: of the time left, that the play-off may take.
        until_ahead_by: once the leader is expected to gain more than this over the baseline, as a logarithm, the play-off may take all the
            time that is left.
    """
    if search.play_off is None:
        search.play_off = _open_play_off(search)
    play_off, ranked = search.play_off, _ranked(search.history, search.cost_model.untaught)
    playing = list(filter(admit, finalists_of(search)))
    merits = {config: search.history.objective.merit(outcome) for config, outcome in ranked.items()}
    candidates = [config for config in ranked if config != search.history.space.baseline]
    for config in playing:
        others = [other for other in candidates if other != config]
        play_off.enter(_entrant(search, config, chosen(config, others, len(playing), merits)))
    if (num := len(play_off.playing)) and not search.interrupted():
        search.listener.tell(f"play-off: {plural(num, 'config')} and the baseline, in fresh processes")
    taken = (*playing, search.history.space.baseline)
    waiting = filter(admit, substitutes(ranked, search.history.objective, taken))  # lazily: to admit takes time
    others_s = (1 - share) * max(0.0, search.budget.free_s)

    def keep_s() -> float:
        return others_s if not others_s or play_off.ahead() <= until_ahead_by else 0.0

    play_off.left_s = lambda: search.budget.free_s - keep_s()

    def has_time(round_s: float, number: int) -> bool:
        pays = number < MIN_ROUNDS or any(
            search.budget.is_worth(play_off.stake(num), num * round_s, search.history) for num in ROUNDS_AHEAD
        )
        return pays and search.budget.allows_a_round(round_s + (keep_s() if number else 0.0), number)

    standing = play_off.play(
        has_time,
        substitutes=(_entrant(search, config, None) for config in waiting),
        challenger=lambda: _challenger(search, play_off, candidates, admit),
    )
    if (guest := play_off.guest) is not None:
        search.budget.guest_s = guest.num_missing * guest.wall_s
    return standing


def overtaken(search: Search, standing: Standing, admit: Callable[[Config], bool]) -> bool:
    """Whether the best config of the search came too late to play, and is beyond doubt clearly better than the play-off's answer.

    Args:
        admit: whether a config may take part.
    """
    history, play_off = search.history, search.play_off
    if play_off is None or standing.answer is None or history.best is None:
        return False
    best, _ = history.best
    has_played = any(entrant.outcomes for entrant in play_off.entrants if entrant.config == best)
    if best == history.space.baseline or has_played:
        return False
    logs = {config: math.log(history.objective.merit(outcome)) for config, outcome in history.feasible.items()}
    others = (log for config, log in logs.items() if config != best)
    bar = max(others, default=None)  # it is looked at because it came out above all others: a selected figure
    searched = {
        config: Searched(log, bar if config == best else None, unrest(history.known[config]))
        for config, log in logs.items()
    }
    ahead = play_off.evidence(searched=searched).difference(best, standing.answer.config)
    return ahead.chance_below(CLOSE) < RISK and admit(best)


def _open_play_off(search: Search) -> PlayOff:
    """A play-off that goes on with the rounds of earlier searches of the study."""
    history = search.history
    baseline, outcome = history.space.baseline, history.baseline_that_runs
    runs = outcome is not None
    fits = outcome is not None and history.objective.feasible(outcome) and baseline not in history.failed_again
    settings = search.budget.paced(search.settings, history)
    settings = settings.replace(
        interval=PLAY_OFF_INTERVAL,
        slowest_samples_per_s=0.0,
        min_timed_s=capabilities_of(search.inspection.device.name).settles_s,
        phases=False,  # the search's own probes have timed them
    )

    # samples of a training set differ in their work: which ones are drawn differs between rounds, and not within one
    facts = search.inspection.facts
    is_drawn = facts.dataset_size is not None and "IterableDataset" not in facts.parts
    same_samples = is_drawn and search.settings.world.size == 1

    def timed_s() -> float:
        assert search.play_off is not None
        longest_s = min(search.play_off.affordable_timed_s(WANTED_ROUNDS), OVERTIME * settings.max_timed_s)
        longest_s = max(SHORTEST_TIMED_S, longest_s)
        return search.play_off.timed_s(longest_s, same_samples=same_samples)

    @functools.cache
    def settings_of(number: int) -> ProbeSettings:
        assert search.play_off is not None
        longest_s = max(timed_s(), settings.min_timed_s)
        num_samples = search.play_off.num_samples(longest_s) if same_samples else 0
        return settings.replace(max_timed_s=longest_s, num_samples=num_samples, seed=settings.seed + 1 + number)

    def run(config: Config, number: int) -> Outcome | None:
        timed = _with_known_memory(settings_of(number), history, config)
        trial = None  # after a fault it is run again
        while trial is None and search.store.holds_play_off and not search.interrupted() and search.left_s > 0:
            proposal = Proposal(config=config, stage=PLAY_OFF, reason=f"round {number + 1}", round=number)
            # one slot for all rounds, as long as it lives: configs are compared in one place
            trial = search.probe(proposal, timed, search.at_once.slots[0])
        return trial.outcome if trial is not None else None

    def ended(number: int) -> None:
        search.store.keep(whole_rounds=(*search.store.facts.whole_rounds, number))

    # only the first probe: later ones were repeated because an earlier one was high, so they are biased
    of_baseline = (trial.outcome for trial in history.searched if trial.config == baseline and trial.outcome.ok)
    first = next(filter(history.objective.is_known, of_baseline), None)
    searched = Searched(math.log(history.objective.merit(first)), None, unrest(first)) if runs and first else None
    return PlayOff(
        _entrant(search, baseline, searched) if runs else None,
        run,
        history.objective,
        ended=ended,
        seed=search.options.seed,
        earlier=[trial for trial in history.trials if trial.in_play_off],
        baseline_may_win=fits and history.space.answers(baseline),
        guest=invite_one_device(search, settings, timed_s),
    )


def _with_known_memory(settings: ProbeSettings, history: History, config: Config) -> ProbeSettings:
    """The settings with what a config's process in the search has told of its memory, unless that leaves open whether another fits."""
    probe = history.known[config]
    if (found := probe.measurement) is None or not _fits_within(SURE_TO_FIT, probe, history.objective):
        return settings
    grown_bytes = found.long_run_peak_bytes if found.long_run_growth_bytes else 0
    return settings.replace(known_peak_bytes=found.peak_bytes, known_long_run_peak_bytes=grown_bytes)


def _entrant(search: Search, config: Config, searched: Searched | None) -> Entrant:
    """A config that plays, with the whole rounds that it has played in earlier searches."""
    whole = search.store.facts.whole_rounds
    is_baseline = config == search.history.space.baseline
    earlier = {
        trial.round: trial.outcome
        for trial in search.history.trials
        if trial.round is not None and trial.round in whole and trial.config == config
        if trial.feasible or (is_baseline and trial.outcome.ok)
        if search.history.objective.is_known(trial.outcome)
    }
    probe = search.history.known[config]
    if searched is not None:
        searched = replace(searched, unrest=max(searched.unrest, unrest(probe)))
    return Entrant(config, searched, play_off_process_s(config, probe), earlier, probe=probe)


def _challenger(
    search: Search, play_off: PlayOff, candidates: list[Config], admit: Callable[[Config], bool]
) -> Entrant | None:
    """The next config that may yet beat the leader, by what the search found and how much processes differ."""
    history, objective = search.history, search.history.objective
    base = play_off.baseline
    if len(play_off.playing) >= MOST_FINALISTS:
        return None
    evidence, compared = play_off.evidence(), play_off.compared
    leader = play_off.leader(evidence, compared) if compared else None
    if base is not None and history.baseline is not None and not base.failed:
        best_log = math.log(objective.merit(history.baseline))
        if leader is not None:
            ahead = evidence.difference(leader.config, base.config).mean
            best_log += max(0.0, ahead) if play_off.baseline_may_win else ahead
    elif leader is not None:
        best_log = math.log(objective.merit(history.known[leader.config]))
    else:
        return None
    known = [entrant.config for entrant in play_off.entrants]
    for config in candidates:
        if config in known or config not in history.feasible:
            continue
        found = may_win(math.log(objective.merit(history.known[config])), best_log, evidence.middle)
        late = _entrant(search, config, found)
        has_time = search.budget.allows_a_round(FEWEST_ROUNDS * (play_off.round_s + late.wall_s), 1)
        if found is not None and has_time and admit(config):
            return late
    return None


def _ranked(history: History, cost_model: CostModel) -> dict[Config, Outcome]:
    """The feasible configs, ranked best first by all probes together."""
    feasible = history.feasible
    return {config: feasible[config] for config in cost_model.ranked(history)}


def near_the_best(ranked: Mapping[Config, Outcome], objective: Objective) -> list[Config]:
    """The feasible configs that may be the best, best first. Those that surely fit come before those that only just fitted.

    Each group is compared with its own best, so safe configs are always among them, even where one that only just fitted is much
    faster. Such a one comes first: where there is time for one alone, it plays.
    """
    sure = {config: outcome for config, outcome in ranked.items() if _fits_within(SURE_TO_FIT, outcome, objective)}
    near: list[Config] = []
    bests: list[float] = []
    for group in (sure, {config: outcome for config, outcome in ranked.items() if config not in sure}):
        merits = {config: objective.merit(outcome) for config, outcome in group.items()}
        best = max(merits.values(), default=0.0)
        near += [config for config, merit in merits.items() if merit >= NEAR_BEST * best]
        bests.append(best)
    best_sure, best_other = bests
    if best_sure < NEAR_BEST * best_other:
        near.sort(key=lambda config: objective.merit(ranked[config]) < best_other)  # the fastest first
    return near


def with_the_simplest(near: Mapping[Config, float], num: int, num_changes: Callable[[Config], int]) -> list[Config]:
    """As many of the configs near the best as can play: the best, then the one of fewest changes, then the others by rank.

    These configs are within the noise of each other, so one with a technique more must prove in the play-off that it helps.
    Where one alone can play, it is the one of fewest changes among those that are as good as the best.

    Args:
        near: each with its merit, best first.
        num_changes: how many techniques a config switches otherwise than the baseline.
    """
    best = next(iter(near))
    among = near if num > 1 else [config for config, merit in near.items() if merit >= AS_GOOD * near[best]]
    simplest = min(among, key=num_changes)
    return list(dict.fromkeys((best, simplest, *near)))[:num] if num > 1 else [simplest]


def chosen(config: Config, others: Sequence[Config], num: int, merits: Mapping[Config, float]) -> Searched | None:
    """What the search found of one of `num` finalists.

    None where it was chosen for another reason (fewest changes, say): its own figure is below the bar.
    """
    log, rivals = math.log(merits[config]), sorted((math.log(merits[other]) for other in others), reverse=True)
    bars = [*(best + math.log(NEAR_BEST) for best in rivals[:1]), *rivals[num - 1 : num]]
    bar = max(bars, default=None)
    return Searched(log, bar) if bar is None or log >= bar else None


def may_win(log: float, best_log: float, std: float) -> Searched | None:
    """What the search found of a config that may yet beat the best, where one process differs from another by `std`."""
    bar = best_log + BETTER - MAY_WIN_Z * std * math.sqrt(2)
    return Searched(log, bar) if log >= bar else None


def substitutes(ranked: Mapping[Config, Outcome], objective: Objective, taken: Container[Config]) -> list[Config]:
    """The configs that may replace a finalist that fails: the best that surely fit, however slow."""
    return [
        config for config, outcome in ranked.items() if config not in taken and _fits_within(SAFE, outcome, objective)
    ]


def _fits_within(share: float, outcome: Outcome, objective: Objective) -> bool:
    """Whether another process of a config will fit too, since this one took at most this share of the usable memory."""
    measured = outcome.measurement
    return measured is None or measured.long_run_peak_bytes <= share * objective.usable_bytes
