"""The protocol of proposers: given the history of a search, return the config to probe next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.records.trial import Proposal
from autotune.study.history import History


class Proposer(Protocol):
    """Proposes configs. It knows the probes only through the history."""

    def propose(self, history: History) -> Proposal | None:
        """The next config to probe: one that `history.admissible()` admits. None if nothing is worth a probe any more."""


class InTurn:
    """Asks several proposers in turn, each until it has nothing left to propose."""

    def __init__(self, proposers: Sequence[Callable[[], Proposer]]) -> None:
        self._waiting = list(proposers)
        self._current: Proposer | None = None

    def propose(self, history: History) -> Proposal | None:
        """The next config of the first proposer that has one."""
        while self._current is not None or self._waiting:
            if self._current is None:
                self._current = self._waiting.pop(0)()
            proposal = self._current.propose(history)
            if proposal is not None or history.running:  # what runs may give it something to propose
                return proposal
            self._current = None
        return None
