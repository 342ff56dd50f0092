"""Tries techniques one at a time: a probe of several at once does not tell what each of them does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from autotune.proposers.cost_model import CostModel
from autotune.proposers.pairs import Pair, Switch, pairs_of
from autotune.records.config import Config
from autotune.records.objective import Objective
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
        return _likeliest(_suspects(history), history, self._cost_model)


class TryAlone:
    """The best with each choice of which no probe shows what it does by itself: what is expected of it may be wrong."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The best with the most promising choice; None when there is evidence of every choice that may gain anything."""
        if history.best is None:
            return None
        return _likeliest(
            _unseen(history, pairs_of(history.evidence, history.space.techniques)), history, self._cost_model
        )


class Untried:
    """The best with what no probe has run yet, however little is expected of it: for a search that has found nothing better."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The next one; None when every choice was probed."""
        for (name, choice), config in self.left(history):
            return Proposal(config=config, reason=f"{name}={choice} was not tried yet")
        return None

    def left(self, history: History) -> Iterator[tuple[Switch, Config]]:
        """The choices that were not probed, each with a config that has it; of those on a scale, one."""
        probed = {
            (name, config[name])
            for config in (*history.known, *history.running)
            for name, technique in history.space.techniques.items()
            if not technique.ordered or config[name] != technique.off
        }
        told: set[str] = set()
        unseen = ((before, switch) for before, switch in _unseen(history, probed) if switch[0] not in told)
        for switch, config in _worth_a_probe(unseen, history, self._cost_model):
            yield switch, config
            if history.space.techniques.is_ordered(switch[0]):
                told.add(switch[0])


def _unseen(history: History, seen: Collection[Switch]) -> Iterator[tuple[Config, Switch]]:
    """The best config, or the baseline, with each choice that was not seen. One on a scale tells of the others."""
    techniques = history.space.techniques
    start = history.best[0] if history.best else history.space.baseline
    told = {name for name, _ in seen if techniques.is_ordered(name)}
    for name in techniques:
        for choice in history.space.choices[name]:
            if choice != start[name] and name not in told and (name, choice) not in seen:
                yield start, (name, choice)


def _worth_a_probe(
    changes: Iterable[tuple[Config, Switch]], history: History, cost_model: CostModel
) -> Iterator[tuple[Switch, Config]]:
    """Configs with one switch changed, as far as they may be probed and the change may make a difference."""
    admissible = history.admissible()
    for before, (name, choice) in changes:
        config = history.space.complete({**before.as_dict(), name: choice})
        if admissible(config) and cost_model.may_gain(history, config, name):
            yield (name, choice), config


def _likeliest(changes: Iterable[tuple[Config, Switch]], history: History, cost_model: CostModel) -> Proposal | None:
    """Of configs with one switch changed, the one that is the likeliest to win."""
    found = []
    for (name, choice), config in _worth_a_probe(changes, history, cost_model):
        prediction = cost_model.predict(history, config)
        to_win = prediction.chance_to_win if prediction is not None else None
        found.append((to_win or 0.0, config, f"{history.space.techniques.label(name, choice)} by itself"))
    if not found:
        return None
    _, config, reason = max(found, key=lambda item: item[0])
    return Proposal(config=config, stage=ABLATION, reason=reason)


def _suspects(history: History) -> list[tuple[Config, Switch]]:
    """The new switches of probes of several that failed or were slow, where none of them is known to be the reason.

    Each with the config that was the best before that probe.
    """
    evidence, objective, techniques = history.evidence, history.objective, history.space.techniques
    pairs = pairs_of(evidence, techniques)
    suspects: list[tuple[Config, Switch]] = []
    best: tuple[Config, float] | None = None
    for place, (config, outcome) in enumerate(evidence):
        merit = objective.merit(outcome) if outcome.ok else 0.0
        if best is not None and merit < SLOW * best[1]:
            new = [switch for switch in config.differences(best[0]).items() if switch[0] in techniques]
            before = pairs_of(evidence[:place], techniques) if len(new) > 1 else {}
            new = [switch for switch in new if switch not in before]
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
