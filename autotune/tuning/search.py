"""`search()`: from a task and options to a recommendation. The main path of the package, told in order."""

from __future__ import annotations

from autotune.records.options import SearchOptions
from autotune.records.result import Result
from autotune.runners.runner import Runner
from autotune.task.source import TaskSource
from autotune.tuning.confirm import confirm
from autotune.tuning.events import Listener
from autotune.tuning.exactness import Exactness
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.opening import opened
from autotune.tuning.playoff import Standing
from autotune.tuning.recommend import Interrupted, NothingFeasible, recommend, why_nothing
from autotune.tuning.state import Search


def search(
    source: TaskSource | None,
    options: SearchOptions,
    *,
    runner: Runner | None = None,
    listener: Listener | None = None,
) -> Result:
    """Find the best config of a task.

    Args:
        source: the task; None if the runner has it.
        runner: runs the probes; by default processes on this machine.

    Raises:
        TaskError, ConfigError, DeviceError, StudyError: the user can fix it; see the message.
        NothingFeasible: no config ran within the limits.
        Interrupted: by Ctrl-C; carries the best so far.
    """
    with opened(source, options, runner, listener or Listener()) as search:
        return answer(search)


def answer(search: Search) -> Result:
    """Find the answer of an open search.

    Raises:
        NothingFeasible, Interrupted: as `search` does.
    """
    exactness = Exactness(search)
    standing: Standing | None = None
    killed = False
    try:
        standing = find(search, exactness)
        result = recommend(search, exactness, standing)
    except KeyboardInterrupt:  # the second one: the running probe is killed
        killed = True
        result = recommend(search, exactness, None)
    if killed or search.interrupted():
        raise Interrupted(result)
    assert result is not None
    return result


def find(search: Search, exactness: Exactness) -> Standing | None:
    """Measure the baseline, explore, leave out what is not exact, and confirm the best.

    If all of the best fail in the play-off, the search learns from that and continues.

    Returns:
        How the play-off ended; None if no round was completed, because of an interrupt or for lack of time.

    Raises:
        NothingFeasible: no config ran within the limits.
    """
    exactness.leave_out_known_failures()
    measure_baseline(search)
    while not search.interrupted():
        explore(search, search.proposer())
        while exactness.leave_out_inexact():
            explore(search, search.undo_changes())
        if search.interrupted():
            break
        if search.history.best is None:
            raise NothingFeasible(why_nothing(search))
        standing = confirm(search, exactness.may_come_in)
        if standing is not None and standing.answer is not None:
            return standing
        if standing is None:
            if not search.interrupted():
                search.warn(
                    "there was no time for a round of the play-off, so the answer is not confirmed; give a larger --budget"
                )
            break
    return None
