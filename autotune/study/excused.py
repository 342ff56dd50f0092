"""Excused time-outs: which processes of the play-off were ended because the machine stood still, not because of their config."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records.config import Config
from autotune.records.outcome import Kind
from autotune.records.trial import Trial


def find_excused(trials: Sequence[Trial]) -> frozenset[int]:
    """The numbers of the play-off's time-outs that say nothing against their configs.

    A config that has run through in the play-off, and is then ended for taking several times as long, is judged by what
    the others do. Where nobody runs through in that round, the machine stood still. Otherwise it may have done so for
    this process alone: the first time-out is excused, a second one in turn is the config's own.

    Args:
        trials: in the order in which they ended; those outside the play-off do not matter.
    """
    played = [trial for trial in trials if trial.in_play_off]
    completed = {trial.round for trial in played if trial.feasible}
    ran: set[Config] = set()
    late: set[Config] = set()
    found = set()
    for trial in played:
        if trial.feasible:
            ran.add(trial.config)
            late.discard(trial.config)
        elif trial.outcome.kind is Kind.TIMEOUT and trial.config in ran:
            if trial.round not in completed:
                found.add(trial.number)
            elif trial.config not in late:
                found.add(trial.number)
                late.add(trial.config)
    return frozenset(found)
