"""Optuna's samplers. Each proposal is moved to the nearest config that is worth a probe."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from autotune.proposers.base import InTurn, Proposer
from autotune.proposers.cost_model import CostModel
from autotune.proposers.design import StartingDesign
from autotune.proposers.one_at_a_time import UndoChanges
from autotune.records.study import Proposal
from autotune.space import Space, SpaceExhausted
from autotune.study.history import History
from autotune.study.trials import distributions_of

STARTUP_TRIALS = 4  # the search's own starting design comes before, so a model has something to fit at once
PATIENCE = 12  # proposals without a gain of 1 % after which the sampler is taken to know enough
BETTER = 1.01


# name -> the sampler for a seed: a Gaussian process, a tree-structured Parzen estimator, uniform draws
_MAKERS: dict[str, Callable[[int], BaseSampler]] = {
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False),
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True),
    "random": lambda seed: RandomSampler(seed=seed),
}


class OptunaProposer:
    """Asks one of Optuna's samplers, using a study in memory that receives every trial of the history.

    Optuna's distributions know ranges and categories; ours are lists (the divisors of a global batch, say) with rules
    between them. So the sampler proposes freely, and its proposal is moved to the nearest config that may be probed.

    Args:
        name: the sampler's, a key of `SAMPLERS`.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._sampler = _MAKERS[name](seed)
        self._study: optuna.Study | None = None
        self._space: Space | None = None
        self._told_numbers: set[int] = set()
        self._best_score: float | None = None
        self._num_since_better = 0

    def propose(self, history: History) -> Proposal | None:
        """The sampler's proposal; None when all configs were tried, or nothing better was found for a while."""
        if self._is_stale(history):
            return None
        study = self._told(history)
        with _one_torch_thread():
            trial = study.ask(distributions_of(history.space))
        study.tell(trial, state=TrialState.FAIL)  # its outcome comes with the history
        try:
            config = history.space.nearest(trial.params, history.admissible())
        except SpaceExhausted:
            return None
        return Proposal(config=config, reason=f"proposed by {self._name}")

    def _is_stale(self, history: History) -> bool:
        score, before = history.best_score, self._best_score
        if before is None or score is None or score > before + abs(before) * (BETTER - 1):
            self._best_score, self._num_since_better = score, 0
        else:
            self._best_score = min(before, score)  # the best so far may have been taken out of the space since
            self._num_since_better += 1
        return self._num_since_better >= PATIENCE

    def _told(self, history: History) -> optuna.Study:
        """The study in memory, with every trial of the search."""
        space = history.space
        if self._study is None or self._space is not space:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
            self._space, self._told_numbers = space, set()
        trials, objective, worst = history.searched, history.objective, history.worst_score
        for trial in trials:  # another search's may come before those that were told
            if trial.number in self._told_numbers:
                continue
            self._told_numbers.add(trial.number)
            infeasibility = objective.infeasibility(trial.outcome)
            # the trial may have a choice of an earlier search that this space lacks
            with contextlib.suppress(ValueError):
                told = create_trial(
                    value=objective.score(trial.outcome) if trial.outcome.ok else worst,
                    params=space.params(trial.config),
                    distributions=distributions_of(space),
                    constraints={"infeasibility": infeasibility},
                )
                self._study.add_trial(told)
        return self._study


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """One torch thread inside: a Gaussian process of some dozen points is slower on several, and processes would compete for cores."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        torch.set_num_threads(num_threads)


def _after_the_starting_design(name: str, cost_model: CostModel, seed: int) -> Proposer:
    """The starting design, its best with each change undone, the sampler, and the best of all with each change undone.

    Techniques that usually help may hurt here, and a sampler that knows nothing about techniques takes long to find out.
    """
    return InTurn([StartingDesign, UndoChanges, lambda: OptunaProposer(name, seed), UndoChanges])


SAMPLERS = {name: partial(_after_the_starting_design, name) for name in _MAKERS}
