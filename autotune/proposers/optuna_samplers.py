"""Optuna's samplers over our space: their proposal is moved to the nearest config that is worth a probe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotune.records.config import Config
from autotune.space import Space

STARTUP_TRIALS = 4  # the search's own starting design comes before, so a model has something to fit at once


class AdmissibleSampler(BaseSampler):
    """Wraps a sampler so that it proposes only configs of the space that are neither measured nor ruled out.

    Optuna's distributions know ranges and categories; ours are lists (the divisors of a global batch, say) with rules
    between them. The inner sampler proposes freely, and the nearest admissible config is what the trial gets and records.
    """

    def __init__(self, inner: BaseSampler, space: Space, admissible: Callable[[Config], bool]) -> None:
        self._inner = inner
        self.space = space
        self._admissible = admissible

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All of the space at once."""
        return dict(self.space.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The nearest admissible config to the inner sampler's proposal; nothing for a trial whose config is given."""
        if "fixed_params" in trial.system_attrs:
            return {}
        known = self._inner.infer_relative_search_space(study, trial)
        with _one_torch_thread():
            proposal = self._inner.sample_relative(study, trial, known) if known else {}
        for name, distribution in search_space.items():
            if name not in proposal:
                proposal[name] = self._inner.sample_independent(study, trial, name, distribution)
        return self.space.params(self.space.nearest(proposal, self._admissible))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed: every parameter is sampled relative to the others or given."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """As the inner sampler does."""
        self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """As the inner sampler does."""
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """As the inner sampler does."""
        self._inner.reseed_rng()


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """A Gaussian process of some dozen points is slower on several threads, and several processes' threads collide."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def make_sampler(name: str, space: Space, admissible: Callable[[Config], bool], seed: int) -> AdmissibleSampler:
    """One of Optuna's samplers, by its name on the command line."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    inner: BaseSampler
    if name == "gp":
        inner = GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, warn_independent_sampling=False)
    elif name == "tpe":
        inner = TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)
    else:  # a grid is every config once, in random order, as with Optuna's own, which cannot skip what is ruled out
        inner = RandomSampler(seed=seed)
    return AdmissibleSampler(inner, space, admissible)
