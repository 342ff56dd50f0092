"""The protocol of proposers: given the history of a search, return the config to probe next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.records.study import Proposal
from autotune.study.history import History


class Proposer(Protocol):
    """Proposes configs. It knows the probes only through the history, and is asked again after each of them.

    A whole proposer, which `--sampler largest-batch` offers because a file of this room has it in its `SAMPLERS`:

        class LargestBatch:
            def propose(self, history: History) -> Proposal | None:
                admissible = history.admissible()
                left = [config for config in history.space if admissible(config)]
                if not left:
                    return None
                return Proposal(config=max(left, key=lambda config: config.batch_size), reason="the largest batch left")

        SAMPLERS = {"largest-batch": lambda cost_model, seed: LargestBatch()}
    """

    def propose(self, history: History) -> Proposal | None:
        """The next config to probe: one that `history.admissible()` admits. None if nothing is worth a probe any more."""


class FirstOf:
    """Asks several proposers in order, each time from the first on: the first proposal that one of them has is taken."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, history: History) -> Proposal | None:
        """The next config; None when none of them has one."""
        proposals = (proposer.propose(history) for proposer in self._proposers)
        return next((proposal for proposal in proposals if proposal is not None), None)


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
            if proposal is not None or history.in_flight:  # what runs may give it something to propose
                return proposal
            self._current = None
        return None
