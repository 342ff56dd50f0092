"""`search()`: from a task and options to a recommendation. The main path of the package, told in order."""

from __future__ import annotations

from autotune.errors import AutotuneError
from autotune.records.options import SearchOptions
from autotune.records.result import Result
from autotune.runners.runner import Runner
from autotune.study.store import NO_ANSWER
from autotune.task.source import TaskSource
from autotune.tuning.clearance import Clearance
from autotune.tuning.confirm import confirm, overtaken
from autotune.tuning.entrant import Standing
from autotune.tuning.events import Listener, SearchEnded
from autotune.tuning.explore import (
    UNDONE,
    explore,
    measure_baseline,
    measure_baseline_again,
    tell_of_large_batches,
    undo_changes,
)
from autotune.tuning.opening import opened
from autotune.tuning.rankings import with_rankings
from autotune.tuning.recommend import Interrupted, NothingFeasible, recommend, why_nothing
from autotune.tuning.state import Search

SHARE = 0.4  # of the time left, for a play-off after which what was not tried yet may be


def search(
    source: TaskSource | None,
    options: SearchOptions,
    *,
    runner: Runner | None = None,
    listener: Listener | None = None,
    began_s: float | None = None,
) -> Result:
    """Find the best config of a task.

    Args:
        source: the task; None if the runner has it.
        runner: runs the probes; by default processes on this machine.
        began_s: what `time.monotonic()` read when the user began to wait; by default now.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can fix it; see the message.
        NothingFeasible: no config ran within the limits.
        Interrupted: by Ctrl-C; carries the best so far.
    """
    with opened(source, options, runner, listener or Listener(), began_s) as search:
        return with_rankings(search, answer)


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
        result = recommend(search, clearance, standing)
        if result is None and not search.interrupted():
            raise NothingFeasible(why_nothing(search))
    except AutotuneError as error:
        search.store.set_attribute(NO_ANSWER, str(error))
        raise
    except KeyboardInterrupt:  # the second one: the running probe is killed
        killed = True
        result = recommend(search, clearance, None)
    if result is not None:
        search.listener.on(SearchEnded(result=result))
    if killed or search.interrupted():
        raise Interrupted(result)
    assert result is not None
    return result


def find(search: Search, clearance: Clearance) -> Standing | None:
    """Measure the baseline, explore, undo the best's changes, bar what does not train as plain fp32 does, and confirm the best.

    Exploring and the play-off take turns while there is time and something to learn: where all of the best fail, and where
    exploring was ended for lack of time that the play-off did not need. Where nothing beats the baseline, what was not
    tried is.

    Returns:
        How the play-off ended; None if no round was completed, because of an interrupt or for lack of time.

    Raises:
        NothingFeasible: no config ran within the limits.
    """
    history, proposer, standing = search.history, search.proposer(), None
    was_held = nothing_won = was_short = False
    clearance.bar_known()
    measure_baseline(search)
    tell_of_large_batches(search)
    search.budget.shared_from_s, search.budget.kept_probes = search.budget.elapsed_s, UNDONE
    while not search.interrupted():
        known = len(history.searched)
        search.budget.keeps_checks = search.inspection.comparable
        explore(search, proposer)
        if not search.interrupted() and measure_baseline_again(search):
            explore(search, proposer)
        if nothing_won:
            explore(search, search.untried())
        undo_changes(search)
        while clearance.bar_failing_finalists():
            proposer = search.proposer()  # what it knows to be settled no longer is
            explore(search, proposer)
            undo_changes(search)
        search.budget.keeps_checks = False
        if search.interrupted() or (was_held and not was_short and len(history.searched) == known):
            break
        if history.best is None:
            raise NothingFeasible(why_nothing(search))
        was_short = not was_held and search.budget.allows_a_probe(history) and any(search.untried().left(history))
        num_failed = len(history.failed_again)
        standing, was_held = confirm(search, clearance.clear, share=SHARE if was_short else 1.0), True
        search.budget.shared_from_s = search.budget.elapsed_s
        nothing_won = standing is None or standing.answer is standing.baseline
        if standing is not None and standing.answer is None and len(history.failed_again) > num_failed:
            proposer, was_held = search.proposer(), False  # the search has learned from that, and continues
    if standing is not None and overtaken(search, standing, clearance.clear):
        search.warn("the answer was found too late to play against the others; give a larger --budget to confirm it")
        return None
    if standing is None and not search.interrupted() and search.play_off is not None and search.play_off.entrants:
        search.warn(
            "there was no time for a round of the play-off, so the answer is not confirmed; give a larger --budget"
        )
    return standing
