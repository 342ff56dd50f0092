"""The default sampler: proposes what the cost models take for most likely to beat the best within the memory limit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.predict.memory import MemoryModel, PeakSource
from autotune.predict.time import TimeModel
from autotune.proposers.acquisition import Advisor
from autotune.records.config import Config
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.prediction import Forecast
from autotune.space import Space, SpaceExhausted


class NothingPromising(SpaceExhausted):
    """No config that was not tried has more than a small chance to beat the best: the search knows enough."""


class CostModelSampler(BaseSampler):
    """Asks the time and memory models, fitted to the study's finished trials, which config to probe next.

    All it knows is in the study: a search that is resumed goes on as if it had never stopped, and trials that other
    workers run are not proposed again. The same study, space and seed give the same proposal.

    Args:
        admissible: whether a config may be probed now (not measured before, not ruled out).
        peaks: traced peaks, or None where the model cannot be traced.
        outside_bytes: what a probe's process holds before it builds the model.
        forgiven: numbers of trials that are left out: what failed in them is worth another try, and would else be held
            against all that is like it.
    """

    def __init__(
        self,
        space: Space,
        objective: Objective,
        admissible: Callable[[Config], bool],
        *,
        peaks: PeakSource | None,
        outside_bytes: int,
        seed: int,
        forgiven: Collection[int] = (),
    ) -> None:
        self.space = space
        self._forgiven = forgiven
        self._admissible = admissible
        time_model = TimeModel(space, lengths=peaks.lengths if peaks is not None else None)
        self._advisor = Advisor(space, objective, time_model, MemoryModel(peaks, outside_bytes, space), seed)
        self._outcomes: dict[int, tuple[Config, Outcome]] = {}  # of finished trials, by number: they do not change

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All of the space at once."""
        return dict(self.space.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the config to probe next; nothing for a trial whose config is given.

        Raises:
            NothingPromising: no config is worth a probe.
        """
        if "fixed_params" in trial.system_attrs:
            return {}
        running = {
            _config(other)
            for other in study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
            if "config" in other.user_attrs
        }
        found = self._advisor.next(
            self._probes(study), lambda config: config not in running and self._admissible(config)
        )
        if found is None:
            raise NothingPromising
        return self.space.params(found)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The baseline's choice; never needed, since every parameter is sampled relative to the others or given."""
        return self.space.baseline[param_name]

    def forecast(self, study: Study, config: Config) -> Forecast:
        """What the study predicts of any config now."""
        return self._advisor.forecast(config, self._probes(study))

    def ranked(self, study: Study) -> list[Config]:
        """The feasible configs that were probed, best first by what all probes together say of each."""
        return self._advisor.ranked(self._probes(study))

    def _probes(self, study: Study) -> list[tuple[Config, Outcome]]:
        """Every finished probe but the forgiven and what ran in a play-off, whose machine may have become slower since.

        What failed there is no longer feasible.
        """
        for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
            counts = trial.user_attrs.get("stage") != "play-off" or not trial.user_attrs["feasible"]
            if trial.number not in self._outcomes and counts:
                self._outcomes[trial.number] = _config(trial), Outcome.from_dict(trial.user_attrs["outcome"])
        return [self._outcomes[number] for number in sorted(self._outcomes) if number not in self._forgiven]


def _config(trial: FrozenTrial) -> Config:
    return Config(tuple(trial.user_attrs["config"].items()))
