"""What a search does because others share its study: it waits for what they run, and one of them alone holds the play-off."""

from __future__ import annotations

import time
from dataclasses import replace

from autotune.records.config import Config
from autotune.tuning.state import Search

PAUSE_S = 0.25
LOOK_SHARE = 0.1  # of the time waited, until the next look: many searches that wait would keep a server busy
LOOK_AT_LEAST_EVERY_S = 5.0


def wait_for(search: Search, config: Config) -> None:
    """Wait until no other search runs a config, or the time is up."""
    search.catch_up()
    waiting = _Waiting(search)
    while config in search.history.elsewhere and waiting.look():
        pass


def wait_for_others(search: Search) -> bool:
    """Wait until something comes of what other searches run, which may give this one something to propose. False where there is no
    use in it.
    """
    history = search.history
    before = history.elsewhere, len(history.trials)
    if not history.elsewhere:
        return False
    waiting = _Waiting(search)
    while search.budget.allows_a_probe(history) and waiting.look():
        if (history.elsewhere, len(history.trials)) != before:
            return True
    return False


def hold_play_off(search: Search) -> bool:
    """Take the play-off, or wait for the search that holds it. False where another search has answered, or the time is up.

    The answer of a search that ended while this one ran is this one's, too, unless what is best now was not in its play-off.
    """
    if search.store.holds_play_off:
        return True
    waited = False
    waiting = _Waiting(search)
    while not search.store.take_play_off():
        if not waited:
            waited = True
            search.listener.tell("another search of this study holds the play-off; this one waits for its answer")
        if not waiting.look():
            search.warn(
                "another search of this study still holds the play-off; `autotune show` tells its answer once it has ended"
            )
            return False
    search.catch_up()
    answer = search.store.facts.result
    is_new = answer is not None and answer.play_off.confirmed and answer != search.answer_before
    if answer is None or not is_new or not (waited or _has_played(search)):
        return True
    search.store.leave_play_off()
    search.answered = replace(answer, cost=search.cost())
    return False


def _has_played(search: Search) -> bool:
    """Whether the study's best config was in its play-off."""
    best = search.history.best
    return best is not None and any(trial.config == best[0] for trial in search.history.trials if trial.in_play_off)


class _Waiting:
    """A search that waits for others: the longer it has waited, the less often it looks at the study."""

    def __init__(self, search: Search) -> None:
        self._search, self._began_s = search, time.monotonic()

    def look(self) -> bool:
        """Wait a while, and look at the study. False where the user interrupts, or the time is up."""
        search, now_s = self._search, time.monotonic()
        until_s = now_s + min(LOOK_AT_LEAST_EVERY_S, max(PAUSE_S, LOOK_SHARE * (now_s - self._began_s)))
        with search.budget.split("waiting"):
            while time.monotonic() < until_s:
                if search.interrupted() or search.left_s <= 0:
                    return False
                time.sleep(PAUSE_S)
            search.catch_up()
        return True
