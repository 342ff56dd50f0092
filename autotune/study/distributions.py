"""How Optuna sees a search space."""

from __future__ import annotations

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.space import Space


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """A distribution for each key of the space that has more than one choice.

    They cover every supported choice, also those left out of this search: Optuna does not let a categorical distribution
    change within a study.
    """
    found: dict[str, BaseDistribution] = {}
    for name, choices in space.supported.items():
        if name in space.ordered:
            low, high = int(choices[0]), int(choices[-1])
            found[name] = IntDistribution(low, high, log=low > 0)
        else:
            found[name] = CategoricalDistribution(choices)
    return found
