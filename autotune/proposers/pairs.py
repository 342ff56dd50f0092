"""What single techniques were seen to do: pairs of probes of configs that differ in one technique alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from autotune.records.batch_plan import ACCUMULATION
from autotune.records.config import Choice, Config
from autotune.records.outcome import Outcome
from autotune.techniques import Techniques

Switch = tuple[str, Choice]  # a technique and a choice of it
Pair = tuple[Outcome, Outcome]  # with a switch and without it, all else being equal


def pairs_of(probes: Iterable[tuple[Config, Outcome]], techniques: Techniques) -> Mapping[Switch, list[Pair]]:
    """Switch -> outcomes of configs that differ in its technique alone; at least one of the two ran."""
    alike: dict[object, list[tuple[Switch, Outcome]]] = {}
    for config, outcome in dict(probes).items():
        for name in techniques:
            others = tuple(pair for pair in config.choices if pair[0] not in (name, ACCUMULATION))
            alike.setdefault((name, others), []).append(((name, config[name]), outcome))
    found: dict[Switch, list[Pair]] = {}
    for members in alike.values():
        for (switch, a), (_, b) in itertools.permutations(members, 2):
            if a.ok or b.ok:
                found.setdefault(switch, []).append((a, b))
    return found
