"""The starting design: each technique once, then the usual winners together at rising batch sizes."""

from __future__ import annotations

from autotune.records.config import BATCH_SIZE, Choice, Config
from autotune.records.objective import Objective
from autotune.records.study import Proposal
from autotune.space import Space
from autotune.study.history import History


def starting_configs(space: Space, *, baseline_fits: bool, objective: Objective) -> list[tuple[Config, str]]:
    """Configs to begin with, each with its reason.

    If the baseline runs: each likely technique alone, all together, and all together at two and four times the batch. Where
    speed is worth nothing: at a half and a quarter of the batch instead, and with everything that saves memory.
    If it does not run: the configs with the least memory, to find one that fits.
    """
    switched = _likely(space)
    lean = _least_memory(space)
    if not baseline_fits:
        smallest = {BATCH_SIZE: space.choices[BATCH_SIZE][0], **lean}
        all_switched = space.complete({**switched, **smallest})
        least = [(space.complete(smallest), "least memory"), (all_switched, "least memory, all switched")]
        return [(config, reason) for config, reason in least if space.contains(config)]
    configs = [(space.complete({name: choice}), f"{name} alone") for name, choice in switched.items()]
    if len(switched) > 1:
        configs.append((space.complete(switched), "all together"))
    if not objective.rests_on_speed:
        for divisor in (2, 4):
            smaller = [size for size in space.choices[BATCH_SIZE] if int(size) * divisor <= space.baseline.batch_size]
            if smaller:
                configs.append((space.complete({**switched, BATCH_SIZE: smaller[-1]}), f"1/{divisor} of the batch"))
        configs.append((space.complete({**switched, **lean}), "all that saves memory"))
    for factor in (2, 4) if objective.rests_on_speed else ():
        larger = [size for size in space.choices[BATCH_SIZE] if int(size) >= factor * space.baseline.batch_size]
        if larger:
            configs.append((space.complete({**switched, BATCH_SIZE: larger[0]}), f"{factor}x the batch"))
    unique = {
        config: reason for config, reason in reversed(configs) if space.contains(config) and config != space.baseline
    }
    return list(reversed(unique.items()))


def _likely(space: Space) -> dict[str, Choice]:
    """Each technique's likely winner, unless the baseline has it already."""
    found: dict[str, Choice] = {}
    for name, technique in space.techniques.items():
        choice = next((c for c in technique.likely if c in space.choices[name] and c != space.baseline[name]), None)
        if choice is not None:
            found[name] = choice
    return found


def _least_memory(space: Space) -> dict[str, Choice]:
    """The choice of each technique that saves the most memory, where the space has several."""
    searched = {name: t for name, t in space.techniques.items() if len(space.choices[name]) > 1}
    found = {name: technique.least_memory(space.choices[name]) for name, technique in searched.items()}
    return {name: choice for name, choice in found.items() if choice is not None}


class StartingDesign:
    """Proposes the starting configs, one after another."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Config, str]] | None = None

    def propose(self, history: History) -> Proposal | None:
        """The next starting config."""
        if self._waiting is None:
            fits = history.baseline is not None and history.objective.feasible(history.baseline)
            self._waiting = starting_configs(history.space, baseline_fits=fits, objective=history.objective)
        admissible = history.admissible()
        while self._waiting:
            config, reason = self._waiting.pop(0)
            if admissible(config):
                return Proposal(config=config, reason=reason)
        return None
