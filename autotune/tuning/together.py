"""What a search does because others share its study: it waits for what they run, and one of them alone holds the play-off."""

from __future__ import annotations

import time
from dataclasses import replace

from autotune.records.config import Config
from autotune.tuning.state import Search

LOOK_EVERY_S = 0.25  # at the study


def wait_for(search: Search, config: Config) -> None:
    """Wait until no other search runs a config, or the time is up."""
    search.catch_up()
    while config in search.history.elsewhere and not search.interrupted() and search.left_s > 0:
        _wait(search)


def wait_for_others(search: Search) -> bool:
    """Wait a moment for what other searches run, which may give this one something to propose. False where there is no use in it."""
    if not search.history.elsewhere or search.interrupted() or not search.budget.allows_a_probe(search.history):
        return False
    _wait(search)
    return True


def hold_play_off(search: Search) -> bool:
    """Take the play-off, or wait for the search that holds it. False where another search has answered, or the time is up.

    The answer of a search that ended while this one explored is this one's, too, unless what is best now was not in
    its play-off.
    """
    waited = False
    while not search.store.take_play_off():
        if not waited:
            waited = True
            search.listener.tell("another search of this study holds the play-off; this one waits for its answer")
        if search.interrupted() or search.left_s <= 0:
            search.warn(
                "another search of this study still holds the play-off; `autotune show` tells its answer once it has ended"
            )
            return False
        _wait(search)
    answer = search.store.facts.result
    if answer is None or answer == search.answer_before or not (waited or _has_played(search)):
        return True
    search.store.leave_play_off()
    search.answered = replace(answer, cost=search.cost())
    return False


def _has_played(search: Search) -> bool:
    """Whether the study's best config was in its play-off."""
    search.catch_up()
    best = search.history.best
    return best is not None and any(trial.config == best[0] for trial in search.history.trials if trial.in_play_off)


def _wait(search: Search) -> None:
    with search.budget.split("waiting"):
        time.sleep(LOOK_EVERY_S)
        search.catch_up()
