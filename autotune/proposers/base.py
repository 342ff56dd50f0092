"""What a proposer is: it looks at the history of a search and says which config to probe next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.records.trial import Proposal
from autotune.study.history import History


class Proposer(Protocol):
    """Proposes configs. All that it knows of the probes is in the history."""

    def propose(self, history: History) -> Proposal | None:
        """The next config to probe: one that `history.admissible()` admits. None when nothing is worth a probe any more."""


class InTurn:
    """Asks several proposers, each until it has nothing more to propose."""

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
