"""What studies say of one parameter of the cost model, pooled into what is expected of it in a new task.

A study's true value departs from the new task's by so much more, the less alike the two are, and by what even like studies disagree: a
random-effects model. The disagreement is estimated from how far the studies lie apart beyond that and their own uncertainty (DerSimonian
and Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 1986), and is never taken for less than a floor. What is expected
of any model takes part as one more source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.records.config import Choice
from autotune.techniques import Factor

# The term, and the technique and choice that act on it, which are empty for the term's own share.
Parameter = tuple[str, str, Choice]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far a parameter's logarithm lies apart in two studies: standard deviations.

    Attributes:
        alike: however alike the studies are.
        unlike: besides, where their likeness is 1/e; the variance rises with the logarithm of the likeness.
    """

    alike: float
    unlike: float


EFFECT = Spread(alike=0.1, unlike=0.3)  # of what a choice does to a term
SHARE = Spread(alike=0.4, unlike=1.5)  # of a term's share of the time, which follows the model's shape


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one study's observations alone say of the logarithm of a parameter."""

    mean: float
    variance: float


@dataclass(frozen=True, kw_only=True)
class Said:
    """The same, with how alike the study is, from 0 to 1, and how many studies there are of its model, which are not independent."""

    learned: Learned
    likeness: float
    shared_by: int = 1


def pool(expected: Factor, said: Sequence[Said], spread: Spread) -> Factor:
    """A parameter of a new task.

    Args:
        expected: of any model.
        said: what each study says; where there is nothing, it is what is expected of any model.
    """
    if not said or expected.spread == 1.0:
        return expected
    means = [one.learned.mean for one in said]
    variances = [one.learned.variance - spread.unlike**2 * math.log(one.likeness) for one in said]
    between = max(spread.alike**2, _between(means, variances))
    weights = [1 / (variance + between) / one.shared_by for one, variance in zip(said, variances, strict=True)]
    prior_mean, prior_variance = math.log(expected.typical), math.log(expected.spread) ** 2
    precision = 1 / prior_variance + sum(weights)
    mean = (prior_mean / prior_variance + sum(w * m for w, m in zip(weights, means, strict=True))) / precision
    variance = min(prior_variance, 1 / precision + between)
    return Factor(typical=math.exp(mean), spread=math.exp(math.sqrt(variance)))


def _between(means: Sequence[float], variances: Sequence[float]) -> float:
    """DerSimonian and Laird's variance between studies; 0 for a single one."""
    if len(means) == 1:
        return 0.0
    weights = [1 / variance for variance in variances]
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    disagreement = sum(w * (m - mean) ** 2 for w, m in zip(weights, means, strict=True))
    scale = sum(weights) - sum(w**2 for w in weights) / sum(weights)
    return max(0.0, (disagreement - (len(means) - 1)) / scale)
