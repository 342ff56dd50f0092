"""Tries techniques one at a time: a probe of several at once does not tell what each of them does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune import techniques
from autotune.proposers.cost_model import CostModel
from autotune.proposers.pairs import Pair, Switch, pairs_of
from autotune.records.config import Config
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.trial import ABLATION, Proposal
from autotune.study.history import History

SLOW = 0.95  # of the best: a probe below that asks for an explanation
FAILED = 0.1  # of the best: what a probe that failed is taken for, so that a slow one may explain it


class TakeApart:
    """After a probe of several new choices that failed or was slow: each of them alone, until one explains it."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The most promising suspect alone; None when nothing is left to explain."""
        return _likeliest(_suspects(history.evidence, history.objective), history, self._cost_model)


class TryUntried:
    """The best with each choice of which no probe shows what it does by itself: what is expected of it may be wrong."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The best with the most promising choice; None when there is evidence of every choice that may gain anything."""
        if history.best is None:
            return None
        best, space = history.best[0], history.space
        shown = {*pairs_of(history.evidence)}
        known = {name for name, _ in shown if techniques.is_ordered(name)}  # one choice on a scale tells of the others
        untried = [
            (best, (name, choice))
            for name in techniques.REGISTRY
            for choice in space.choices[name]
            if choice != best[name] and name not in known and (name, choice) not in shown
        ]
        return _likeliest(untried, history, self._cost_model)


def _likeliest(changes: Iterable[tuple[Config, Switch]], history: History, cost_model: CostModel) -> Proposal | None:
    """Of configs with one switch changed, the one that is the likeliest to win."""
    admissible, found = history.admissible(), []
    for before, (name, choice) in changes:
        config = history.space.complete({**before.as_dict(), name: choice})
        if admissible(config) and cost_model.may_gain(history, config, name):
            prediction = cost_model.predict(history, config)
            to_win = prediction.chance_to_win if prediction is not None else None
            found.append((to_win or 0.0, config, f"{techniques.REGISTRY[name].label(choice)} by itself"))
    if not found:
        return None
    _, config, reason = max(found, key=lambda item: item[0])
    return Proposal(config=config, stage=ABLATION, reason=reason)


def _suspects(evidence: Sequence[tuple[Config, Outcome]], objective: Objective) -> list[tuple[Config, Switch]]:
    """The new switches of probes of several that failed or were slow, where none of them is known to be the reason.

    Each with the config that was the best before that probe.
    """
    pairs = pairs_of(evidence)
    suspects: list[tuple[Config, Switch]] = []
    best: tuple[Config, float] | None = None
    for place, (config, outcome) in enumerate(evidence):
        merit = objective.merit(outcome) if outcome.ok else 0.0
        if best is not None and merit < SLOW * best[1]:
            before = pairs_of(evidence[:place])
            new = [s for s in config.differences(best[0]).items() if s[0] in techniques.REGISTRY and s not in before]
            if len(new) > 1 and not any(
                _explains(pairs.get(s, ()), max(merit / best[1], FAILED), objective) for s in new
            ):
                suspects += [(best[0], switch) for switch in new if switch not in pairs]
        if objective.feasible(outcome) and (best is None or merit > best[1]):
            best = config, merit
    return suspects


def _explains(pairs: Iterable[Pair], loss: float, objective: Objective) -> bool:
    """Whether a switch alone makes for half of a loss at least, in logarithms, or fails."""
    return any(
        without.ok and (not with_it.ok or objective.merit(with_it) <= loss**0.5 * objective.merit(without))
        for with_it, without in pairs
    )
