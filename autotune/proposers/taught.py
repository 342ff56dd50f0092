"""Starts where like studies ended: what was best there is the first thing to try after the baseline. The search goes on as if it had not
been tried, so that studies that mislead cost one probe.
"""

from __future__ import annotations

from autotune.proposers.base import Proposer
from autotune.proposers.cost_model import CostModel
from autotune.records.config import BATCH_SIZE, Config
from autotune.records.study import Proposal
from autotune.study.history import History


class StartWhereOthersEnded:
    """The most alike study's answer: at its micro batch, or at the nearest below that is likely to fit, also by what configs took there.

    Where it was as fast as it was there and needed more memory than it may, it is tried once more at a smaller one.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """That config; None where nothing was taught, its techniques were probed, it is the baseline, or nothing runs."""
        first = self._cost_model.taught.first
        if first is None or (history.best is None and history.baseline_that_runs is None):
            return None
        space, admissible = history.space, history.admissible()
        config = space.snap(first.choices)
        tried = (*history.known, *history.in_flight)
        alike = [other for other in tried if config.has_techniques_of(other) and other != space.baseline]
        if config == space.baseline or (alike and not self._just_misses_the_limit(history, alike)):
            return None
        sizes = sorted(
            (int(size) for size in space.choices[BATCH_SIZE] if int(size) <= config.batch_size), reverse=True
        )
        smaller = [one for size in sizes if admissible(one := space.complete({**config, BATCH_SIZE: size}))]
        if alike:  # what did not fit speaks against what its study told of memory
            fitting = [one for one in smaller if self._cost_model.is_likely_to_fit(history, one)]
        else:
            fitting = self._cost_model.likely_to_fit_as_taught(history, smaller)
        if fitting:
            return Proposal(config=fitting[0], reason=f"the best of {first.study}, a like study")
        return None

    def _just_misses_the_limit(self, history: History, alike: list[Config]) -> bool:
        """Whether the one config with its techniques that was probed ran as fast as it was told, and does not fit."""
        if len(alike) > 1 or (outcome := history.known.get(alike[0])) is None:
            return False
        return not history.objective.feasible(outcome) and self._cost_model.is_borne_out(history)


class OnOwnJudgement:
    """Another proposer's proposals, which what like studies ended with does not change.

    It tells the models something, too, but a search that it sends another way may take many more probes. It counts from where the
    proposer would have it probed, as if it had been probed there, and where it rules a proposal out: what needs more than a config
    that did not fit is not probed.
    """

    def __init__(self, proposer: Proposer, cost_model: CostModel) -> None:
        self._proposer, self._cost_model = proposer, cost_model
        self._agreed: dict[Config, int] = {}  # after how many trials the proposer would have had it probed

    def propose(self, history: History) -> Proposal | None:
        """The proposal of a search that was taught nothing; of one that was taught, once it agrees."""
        if (lent := self._cost_model.lent(history)) is None:
            return self._proposer.propose(history)
        config, _ = lent
        if config not in self._agreed:
            untaught = history.without(config)
            proposal = self._proposer.propose(untaught)
            if proposal is None:
                return None
            if proposal.config != config:
                return proposal if history.admissible()(proposal.config) else self._proposer.propose(history)
            self._agreed[config] = len(untaught.trials)
        return self._proposer.propose(history.as_if_probed_after(self._agreed[config], config))
