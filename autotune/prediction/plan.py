"""Which configs to trace so that every config of a space is known: each group of techniques once, at a few batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction.traces import Group, Traces, model_label, update_label
from autotune.records.config import Config
from autotune.records.formats import Record
from autotune.techniques import Phase, Techniques

# Samples: of a dataset, which are read one by one, and of what `make_batch` makes at once. The fit is exact beyond them, too, unless
# the check shows otherwise, or an operator takes another kernel for many rows.
LARGEST_READ, LARGEST_MADE = 32, 4096
MAX_BATCH_BYTES = 64 * 2**20  # of an input batch, which is really made
MAX_ALLOCATOR_SIZES = 8  # batch sizes at which the caching allocator is simulated


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What to trace.

    Attributes:
        models: groups of techniques that act on the model, nothing switched on first.
        updates: groups of techniques that act on the optimizer, likewise.
        simulated: the same with those that are known: the caching allocator is simulated with each.
        batch_sizes: of the space, in increasing order.
        lengths: whether to look at the lengths of samples, too.
        trained: what is trained, where it is not the task as it stands: the same for all groups.
    """

    models: tuple[Group, ...]
    updates: tuple[Group, ...]
    batch_sizes: tuple[int, ...]
    lengths: bool = True
    trained: Group = ()
    simulated: tuple[Group, ...] = ()

    def without(self, traces: Traces) -> Plan:
        """What `traces` does not know, be it that it failed."""
        failed = traces.failures
        return replace(
            self,
            models=tuple(g for g in self.models if g not in traces.models and model_label(g) not in failed),
            updates=tuple(g for g in self.updates if g not in traces.updates and update_label(g) not in failed),
            lengths=self.lengths and traces.lengths is None,
        )

    def labels(self) -> list[str]:
        """Of all groups."""
        return [*map(model_label, self.models), *map(update_label, self.updates)]


def plan_traces(configs: Iterable[Config], techniques: Techniques) -> Plan:
    """What to trace for `configs`, which all train the same: with nothing switched on first, since all others are compared
    with it, then what switches on the least.
    """
    configs = list(configs)

    def groups(phase: Phase) -> tuple[Group, ...]:
        found = dict.fromkeys([(), *(techniques.switched_on(config, phase) for config in configs)])
        return tuple(sorted(found, key=len))

    updates = groups(Phase.OPTIMIZER)
    return Plan(
        models=groups(Phase.MODEL),
        updates=updates,
        batch_sizes=tuple(sorted({config.batch_size for config in configs})),
        trained=techniques.switched_on(configs[0], Phase.TASK) if configs else (),
        simulated=updates,
    )


def traced_sizes(largest: int, *, sample_bytes: float, most: int | None) -> tuple[int, int]:
    """The smallest and the largest batch size to trace.

    Args:
        largest: batch size of the space.
        sample_bytes: of the input batch, per sample.
        most: samples that there are; None without end.
    """
    low = 2 if most is None or most > 2 else 1
    largest_traced = LARGEST_MADE if most is None else LARGEST_READ
    high = max(low + 1, min(largest, largest_traced, int(MAX_BATCH_BYTES / max(sample_bytes, 1.0))))
    return low, high if most is None else min(high, most)


def allocator_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Of many batch sizes the smallest, the largest and some between them, in equal ratios."""
    if len(batch_sizes) <= MAX_ALLOCATOR_SIZES:
        return tuple(batch_sizes)
    wanted = np.geomspace(batch_sizes[0], batch_sizes[-1], MAX_ALLOCATOR_SIZES)
    return tuple(sorted({min(batch_sizes, key=lambda size: abs(math.log(size / at))) for at in wanted}))
