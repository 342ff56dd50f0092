"""`search()`: from a task and options to a recommendation. The main path of the package, told in order.

Where a task may train several things, each gets a ranking: by a search of its own beside the user's, with one runner, in one file.
What is learned differs between them, so nothing here chooses one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.errors import AutotuneError
from autotune.proposers.base import Proposer
from autotune.records.config import Choice
from autotune.records.options import SearchOptions
from autotune.records.result import Ranking, Result
from autotune.runners.runner import Runner
from autotune.study.priors import PriorStore
from autotune.task.source import TaskSource
from autotune.tuning import why
from autotune.tuning.clearance import Clearance
from autotune.tuning.confirm import confirm, overtaken
from autotune.tuning.entrant import Standing
from autotune.tuning.events import Listener, SearchEnded
from autotune.tuning.explore import (
    UNDONE,
    explore,
    explore_untried,
    is_close_to_the_best,
    measure_baseline,
    measure_baseline_again,
    tell_of_large_batches,
    undo_changes,
)
from autotune.tuning.one_device import keep_time_for_one_device
from autotune.tuning.opening import open_search, open_search_beside
from autotune.tuning.recommend import AS_FAST, Interrupted, NothingFeasible, recommend
from autotune.tuning.state import Search
from autotune.tuning.teaching import leave_priors
from autotune.tuning.together import hold_play_off
from autotune.units import format_seconds

SHARE = 0.4  # of the time left: for a play-off that is held while there still is something to try
MIN_SHARE_S = 1.0  # a ranking that would have less time is not begun


def search(
    source: TaskSource | None,
    options: SearchOptions,
    *,
    runner: Runner | None = None,
    listener: Listener | None = None,
    began_s: float | None = None,
    beside_one_device: bool = True,
    priors: PriorStore | None = None,
) -> Result:
    """Find the best config of a task.

    Args:
        priors: what earlier studies left, and where this one leaves its own; by default beside the study. A replay has none by default.
        source: the task; None if the runner has it.
        runner: runs the probes; by default processes on this machine.
        began_s: what `time.monotonic()` read when the user began to wait; by default now.
        beside_one_device: whether one device is measured, too, where several train together.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can fix it; see the message.
        NothingFeasible: no config ran within the limits.
        Interrupted: by Ctrl-C; carries the best so far.
    """
    listener = listener or Listener()
    with open_search(source, options, runner, listener, began_s, priors, beside_one_device=beside_one_device) as search:
        return add_rankings(search)


def answer(search: Search) -> Result:
    """Find the answer of an open search.

    Raises:
        NothingFeasible, Interrupted: as `search` does.
    """
    clearance = Clearance(search)
    standing: Standing | None = None
    killed = False
    try:
        standing = find(search, clearance)
        result = search.answered or recommend(search, clearance, standing)
        if result is None and not search.interrupted():
            raise NothingFeasible(why.nothing(search.history, search.cost_model, search.inspection, search.refused))
    except AutotuneError as error:
        search.store.keep(no_answer=str(error))
        raise
    except KeyboardInterrupt:  # a second Ctrl-C: the running probe is killed
        killed = True
        result = recommend(search, clearance, None)
    finally:
        search.store.leave_play_off()
    if not killed:
        leave_priors(search, result)
    if result is not None:
        search.listener.on(SearchEnded(result=result))
    if killed or search.interrupted():
        raise Interrupted(result)
    assert result is not None
    return result


def find(search: Search, clearance: Clearance) -> Standing | None:
    """Measure the baseline; then explore, check and play off in turns, while there is time and something to learn.

    Another turn follows where all of the best fail in the play-off; where exploring was ended to leave time that the play-off
    then did not need; and, for what was not tried yet, where nothing beats the baseline.

    Returns:
        How the last play-off ended; None if no config ran within the limits, no round of it was completed, because of an
        interrupt or for lack of time, or another search of the study has answered meanwhile.
    """
    clearance.bar_known()
    _baseline(search)
    proposer = search.proposer()
    last: _PlayOff | None = None
    while not search.interrupted():
        num_searched = len(search.history.searched)
        search.budget.keeps_checks = search.inspection.comparable
        _explore(search, proposer, last)
        if not search.interrupted() and not hold_play_off(search):
            return None
        proposer = _check(search, clearance, proposer)
        search.budget.keeps_checks = False
        is_settled = last is not None and last.is_settled
        if search.interrupted() or (is_settled and len(search.history.searched) == num_searched):
            break
        if search.history.best is None:
            return None
        last = _play_off(search, clearance, last)
        search.budget.is_settled = last.is_settled
        if last.all_failed:
            proposer = search.proposer()  # it learns from that
    return _require_played(search, clearance, last.standing if last is not None else None)


@dataclass(frozen=True)
class _PlayOff:
    """What came of one play-off.

    Attributes:
        standing: how it ended; None if no round was completed.
        all_failed: those that played failed, and the search goes on with what it learned.
        was_early: time was left to explore when it was held.
    """

    standing: Standing | None
    all_failed: bool
    was_early: bool

    @property
    def is_settled(self) -> bool:
        """Whether another play-off could only tell the same, unless other configs were probed meanwhile."""
        return not self.all_failed and not self.was_early

    @property
    def baseline_won(self) -> bool:
        """Whether nothing was found to beat the baseline, or no round was completed."""
        return self.standing is None or self.standing.answer is self.standing.baseline

    @property
    def baseline_leads(self) -> bool:
        """Whether the baseline has won, and nothing that played is expected to be clearly better."""
        if self.standing is None or not self.baseline_won:
            return False
        return self.standing.gain is None or self.standing.gain[0] < AS_FAST


def _baseline(search: Search) -> None:
    """Measure the baseline, and share what is left of the budget."""
    measure_baseline(search)
    keep_time_for_one_device(search)
    tell_of_large_batches(search)
    search.budget.shared_from_s, search.budget.kept_probes = search.budget.elapsed_s, UNDONE


def _explore(search: Search, proposer: Proposer, last: _PlayOff | None) -> None:
    """Probe what the proposer proposes; the baseline again where nothing came near it; once that has won a play-off what is left, too.

    Args:
        last: the play-off before; None before the first.
    """
    explore(search, proposer, while_worth=True)
    if not search.interrupted() and measure_baseline_again(search):
        explore(search, proposer, while_worth=True)
    if last is not None and last.baseline_leads:
        explore_untried(search)
    if last is not None and last.baseline_won:
        explore(search, search.untried())
    if not is_close_to_the_best(search.history, search.history.space.baseline) or (last and not last.baseline_won):
        undo_changes(search)


def _check(search: Search, clearance: Clearance, proposer: Proposer) -> Proposer:
    """Bar what does not train as plain fp32 does, and explore again without it. Returns the proposer to go on with."""
    while clearance.bar_failing_finalists():
        proposer = search.proposer()  # a new one: what the last one took for settled no longer is
        explore(search, proposer, while_worth=True)
        undo_changes(search)
    return proposer


def _play_off(search: Search, clearance: Clearance, last: _PlayOff | None) -> _PlayOff:
    """Let the best play against the baseline; for a part of the time left where there is more to explore."""
    history = search.history
    is_first = (last is None or last.all_failed) and any(search.untried().left(history))
    early = is_first and search.budget.allows_a_probe(history)
    num_failed = len(history.failed_again)
    with search.budget.without_rounds():
        for_untried = is_first and not early and search.budget.allows_a_probe(history)
    # for the untried alone, time is kept only as long as nothing that plays is clearly ahead
    standing = confirm(
        search,
        clearance.clear,
        share=SHARE if early or for_untried else 1.0,
        until_ahead_by=math.log(AS_FAST) if for_untried else math.inf,
    )
    search.budget.shared_from_s = search.budget.elapsed_s
    return _PlayOff(
        standing=standing,
        all_failed=standing is not None and standing.answer is None and len(history.failed_again) > num_failed,
        was_early=early or for_untried,
    )


def _require_played(search: Search, clearance: Clearance, standing: Standing | None) -> Standing | None:
    """The standing, unless something that did not play is better by now."""
    if standing is not None and overtaken(search, standing, clearance.clear):
        search.warn("the answer was found too late to play against the others; give a larger --budget to confirm it")
        return None
    if standing is None and not search.interrupted() and search.play_off is not None and search.play_off.entrants:
        search.warn(
            "there was no time for a round of the play-off, so the answer is not confirmed; give a larger --budget"
        )
    return standing


def add_rankings(search: Search) -> Result:
    """The answer to what the user trains, and beside it a ranking for each of `search.others`, in the time that is left.

    Raises:
        NothingFeasible: what the user trains does not fit; the message says what else does.
        Interrupted: as `answer` raises it; its result has the rankings so far, those of earlier searches of the study included.
    """
    if not search.others:
        return answer(search)
    own = {name: search.history.space.baseline[name] for choice in search.others for name in choice}
    before = search.store.facts.result
    result: Result | None = None
    failure = ""
    try:
        result = answer(search)
    except NothingFeasible as error:  # something else may fit
        failure = str(error)
    except Interrupted as ended:
        if ended.result is None:
            raise
        result = ended.result
    rankings = [_ranking(search, own, result, failure)]
    try:
        for number, choice in enumerate(search.others):
            if search.interrupted():
                break
            left_s = search.options.longest_s - search.budget.elapsed_s
            rankings.append(_rank_beside(search, {**own, **choice}, left_s / (len(search.others) - number)))
    except KeyboardInterrupt:  # a second Ctrl-C; what is measured so far is kept
        pass
    if result is None:
        found = [f"{_in_words(r.choice)} reaches {r.samples_per_s:.3g} samples/s" for r in rankings if r.samples_per_s]
        said = "; ".join([failure, *found])
        search.store.keep(no_answer=said)
        raise NothingFeasible(said)
    if search.interrupted() and before is not None:
        reached = {ranking.study for ranking in rankings}
        rankings += [ranking for ranking in before.rankings if ranking.study not in reached]
    if (kept := search.store.facts.result) is not None:
        shown = rankings if kept == result else [*kept.rankings[:1], *rankings[1:]]  # an earlier answer that stays
        search.store.keep(result=replace(kept, rankings=tuple(shown)))
    result = replace(result, rankings=tuple(rankings))
    if search.interrupted():
        raise Interrupted(result)
    return result


def _in_words(choice: Mapping[str, Choice]) -> str:
    """What is trained, as options of a search."""
    return " ".join(f"{name}={value}" for name, value in choice.items())


def _rank_beside(search: Search, choice: Mapping[str, Choice], share_s: float) -> Ranking:
    """The ranking of another choice. What goes wrong in it ends this ranking alone."""
    changed = {name: value for name, value in choice.items() if value != search.history.space.baseline[name]}
    study = search.store.place.training(changed, search.history.space.techniques).study
    none = Ranking(choice=dict(choice), study=study)
    if share_s < MIN_SHARE_S:
        alone = " ".join(f"--fix {name}={value}" for name, value in changed.items())
        return replace(none, failure=f"the budget was spent; give a larger --budget, or search it alone with {alone}")
    search.listener.tell(
        f"{_in_words(changed)}: a ranking of its own within {format_seconds(share_s)}, in the study {study}"
    )
    try:
        with open_search_beside(search, changed, share_s) as other:
            none = _ranking(other, choice, None, "")
            try:
                return _ranking(other, choice, answer(other), "")
            except Interrupted as ended:
                return _ranking(other, choice, ended.result, "" if ended.result else "interrupted")
    except AutotuneError as error:
        return replace(none, failure=str(error))


def _ranking(search: Search, choice: Mapping[str, Choice], result: Result | None, failure: str) -> Ranking:
    facts = search.inspection.facts
    none = Ranking(
        choice=dict(choice),
        study=search.store.place.study,
        num_parameters=facts.num_parameters,
        num_trainable=facts.num_trainable,
        failure=failure,
    )
    if result is None:
        return none
    return replace(
        none,
        config=result.config,
        samples_per_s=result.samples_per_s,
        samples_per_s_ci=result.samples_per_s_ci,
        peak_bytes=result.peak_bytes,
        speedup=result.speedup,
        speedup_ci=result.speedup_ci,
        energy_ratio=result.energy.energy_ratio,
        energy_ratio_ci=result.energy.energy_ratio_ci,
        verdict=result.verdict,
        confirmed=result.play_off.confirmed,
        evaluation=result.evaluation,
    )
