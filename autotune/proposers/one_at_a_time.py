"""Changes one technique at a time: a probe of several at once does not tell what each of them does."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from autotune.proposers.acquisition import Pair, Switch, pairs_of
from autotune.proposers.cost_model import CostModel
from autotune.records.config import ACCUMULATION, BATCH_KEYS, Config
from autotune.records.objective import Objective
from autotune.records.study import ABLATION, Prediction, Proposal
from autotune.space import Space
from autotune.study.history import History

SLOW = 0.95  # of the best's merit: a probe below that asks for an explanation
LITTLE = 0.02  # a change that gains no more than this, as a logarithm, is not worth having
FAILED = 0.1  # of the best's merit: what a failed probe is taken to have, so that a slow one may explain it


class UndoChanges:
    """The best config without those of its changes that are expected to gain little, all at once, so that what is recommended has no
    change in vain; then with each of its changes undone, to see what each gains. If one of those is better, it starts again from it.

    Args:
        likely_to_fit: whether a config is likely to fit; one that does not fit says nothing about a technique.
        predict: what is predicted of a config. Of single changes the one that is expected to matter most is undone first; without
            predictions they are undone in the order of the config's keys.
    """

    def __init__(
        self,
        likely_to_fit: Callable[[History, Config], bool] = lambda history, config: True,
        predict: Callable[[History, Config], Prediction | None] = lambda history, config: None,
    ) -> None:
        self._likely_to_fit, self._predict = likely_to_fit, predict

    def propose(self, history: History) -> Proposal | None:
        """The best config with its next change undone; None when all changes were."""
        if history.best is None:
            return None
        best, space, admissible = history.best[0], history.space, history.admissible()
        best_log = self._log_speed(history, best)
        undone = {
            name: without
            for name, without in one_change_back(best, space).items()
            if self._likely_to_fit(history, without)
        }
        lost = {name: best_log - self._log_speed(history, without) for name, without in undone.items()}
        little = [name for name in lost if lost[name] < LITTLE and name not in BATCH_KEYS]
        if history.objective.rests_on_speed and self._predict(history, best) is not None and len(little) > 1:
            simpler = space.undo(best, little)
            if space.contains(simpler) and admissible(simpler) and self._likely_to_fit(history, simpler):
                return Proposal(config=simpler, stage=ABLATION, reason=f"the best without {', '.join(little)}")
        for name in sorted(lost, key=lambda name: -abs(lost[name])):
            if admissible(undone[name]):
                return Proposal(config=undone[name], stage=ABLATION, reason=f"the best without {name}")
        return None

    def _log_speed(self, history: History, config: Config) -> float:
        prediction = self._predict(history, config)
        return math.log(prediction.samples_per_s) if prediction and prediction.samples_per_s else 0.0


def one_change_back(config: Config, space: Space) -> dict[str, Config]:
    """The config with each of its changes from the baseline undone, by the change's name."""
    undone = {name: space.undo(config, [name]) for name in config.differences(space.baseline) if name != ACCUMULATION}
    return {name: without for name, without in undone.items() if space.contains(without)}


class TakeApart:
    """After a probe of several new choices that failed or was slow: each of them alone, until one explains it."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The most promising suspect alone; None when nothing is left to explain."""
        return _likeliest(_suspects(history), history, self._cost_model)


class TryAlone:
    """The best with each choice whose effect by itself no probe has shown: what is expected of it may be wrong."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The best with the most promising choice; None when there is evidence of every choice that may gain anything."""
        if history.best is None:
            return None
        seen = pairs_of(history.evidence, history.space.techniques)
        return _likeliest(_unseen(history, seen), history, self._cost_model)


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
        techniques = history.space.techniques
        probed = {
            (name, config[name])
            for config in (*history.known, *history.in_flight)
            for name in techniques
            if not techniques[name].ordered or config[name] != techniques[name].off
        }
        shown: set[str] = set()  # techniques on a scale of which one choice was given
        unseen = ((before, switch) for before, switch in _unseen(history, probed) if switch[0] not in shown)
        for switch, config in _worth_a_probe(unseen, history, self._cost_model):
            yield switch, config
            if techniques[switch[0]].ordered:
                shown.add(switch[0])


def _unseen(history: History, seen: Collection[Switch]) -> Iterator[tuple[Config, Switch]]:
    """The best config, or the baseline, with each choice that was not seen. On a scale one choice shows what the others do."""
    space, techniques = history.space, history.space.techniques
    start = history.best[0] if history.best else space.baseline
    shown = {name for name, _ in seen if techniques.is_ordered(name)}
    for name in techniques:
        for choice in space.choices[name]:
            if choice != start[name] and name not in shown and (name, choice) not in seen:
                yield start, (name, choice)


def _worth_a_probe(
    changes: Iterable[tuple[Config, Switch]], history: History, cost_model: CostModel
) -> Iterator[tuple[Switch, Config]]:
    """Configs with one switch changed, as far as they may be probed and the change may make a difference."""
    admissible = history.admissible()
    for before, (name, choice) in changes:
        config = history.space.complete({**before, name: choice})
        if admissible(config) and cost_model.may_gain(history, config, name):
            yield (name, choice), config


def _likeliest(changes: Iterable[tuple[Config, Switch]], history: History, cost_model: CostModel) -> Proposal | None:
    """Of configs with one switch changed, the one that is the likeliest to win."""

    def to_win(found: tuple[Switch, Config]) -> float:
        prediction = cost_model.predict(history, found[1])
        return (prediction.chance_to_win if prediction is not None else None) or 0.0

    found = max(_worth_a_probe(changes, history, cost_model), key=to_win, default=None)
    if found is None:
        return None
    (name, choice), config = found
    reason = f"{history.space.techniques.label(name, choice)} by itself"
    return Proposal(config=config, stage=ABLATION, reason=reason)


def _suspects(history: History) -> list[tuple[Config, Switch]]:
    """The new switches of probes that had several and failed or were slow, where none of them is known to be the reason.

    Each comes with the config that was the best before that probe.
    """
    evidence, objective, techniques = history.evidence, history.objective, history.space.techniques
    pairs = pairs_of(evidence, techniques)
    suspects: list[tuple[Config, Switch]] = []
    best: tuple[Config, float] | None = None
    for place, (config, outcome) in enumerate(evidence):
        merit = objective.merit(outcome) if outcome.ok else 0.0
        if best is not None and merit < SLOW * best[1]:
            loss = max(merit / best[1], FAILED)
            new = [switch for switch in config.differences(best[0]).items() if switch[0] in techniques]
            before = pairs_of(evidence[:place], techniques) if len(new) > 1 else {}
            new = [switch for switch in new if switch not in before]
            if len(new) > 1 and not any(_explains(pairs.get(switch, ()), loss, objective) for switch in new):
                suspects += [(best[0], switch) for switch in new if switch not in pairs]
        if objective.feasible(outcome) and (best is None or merit > best[1]):
            best = config, merit
    return suspects


def _explains(pairs: Iterable[Pair], loss: float, objective: Objective) -> bool:
    """Whether a switch alone accounts for at least half of a loss, in logarithms, or fails."""
    return any(
        without.ok and (not with_it.ok or objective.merit(with_it) <= loss**0.5 * objective.merit(without))
        for with_it, without in pairs
    )
