"""How many probes run at once: as many as there are slots, unless the baseline shows that they slow each other down.

The baseline runs alone, and then once more beside the first probes, so that the comparison keeps no slot idle. Where it loses more
than is allowed, twice as alone as beside others, half as many probes run at once from then on, and it is compared again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from autotune.devices import capabilities_of
from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.records.study import Neighbours
from autotune.space import Space
from autotune.units import plural

MOST_LOSS = 0.03  # of the baseline's speed, beside other probes
NUM_COMPARED = 2  # times alone and beside others, before fewer slots are used: processes differ by some per cent, too


class AtOnce:
    """Decides how many probes run at once, and which run alone.

    Args:
        slots: their names, in the runner's order.
        kept: what an earlier search of the study found; it holds for the same slots, and a comparison that did not end goes on.
    """

    def __init__(self, slots: Sequence[str], kept: Neighbours | None = None) -> None:
        self.slots = [*slots]
        is_known = kept is not None and kept.slots == tuple(slots)
        self.found = kept if kept is not None and is_known else Neighbours(slots=tuple(slots), most=len(slots))
        is_fine = any(width == self.width and loss <= MOST_LOSS for width, loss in self.found.losses)
        self._is_settled = self.width < 2 or is_fine
        self._baseline: Config | None = None
        self._alone: list[float] = []  # logarithms of the baseline's speed
        self._beside: list[float] = []

    @property
    def width(self) -> int:
        """Probes that may run at once."""
        return min(self.found.most, len(self.slots))

    def lose(self, slot: str) -> None:
        """Go on without a slot."""
        self.slots = [name for name in self.slots if name != slot]

    def gain(self, slot: str) -> None:
        """Use one more slot. Where probes slowed each other down, no more run at once than before."""
        if self.found.most >= len(self.slots):
            self.found = replace(self.found, most=len(self.slots) + 1)
        self.slots.append(slot)
        self.found = replace(self.found, slots=tuple(self.slots))

    def wants(self) -> str:
        """How the baseline is to be run next: `alone`, `beside` other probes, or not at all, which is an empty text."""
        if self._is_settled or self.width < 2:
            return ""
        if not self._alone:
            return "alone"
        if not self._beside:
            return "beside"
        # its loss is too large so far
        return "beside" if len(self._beside) < NUM_COMPARED else "alone"

    def note_baseline(self, config: Config, outcome: Outcome) -> str:
        """Take note of a run of the baseline, which is another one once its batch was halved. Returns what the user should know; empty
        for nothing.
        """
        if self._is_settled:
            return ""
        if config != self._baseline:
            self._baseline = config
            self._alone.clear()
            self._beside.clear()
        if outcome.measurement is None:
            # where it ran alone, another failure would tell no more; else a smaller one may run
            self._is_settled = bool(self._alone)
            return ""
        log = math.log(outcome.measurement.samples_per_s)
        (self._beside if outcome.beside else self._alone).append(log)
        if not self._alone or not self._beside:
            return ""
        loss = 1 - math.exp(fmean(self._beside) - fmean(self._alone))
        if loss <= MOST_LOSS:
            self._is_settled = True
            self.found = self.found.compared(self.width, loss)
            return ""
        if len(self._beside) < NUM_COMPARED or len(self._alone) < NUM_COMPARED:
            return ""
        return self._use_fewer(loss)

    def runs_alone(self, config: Config, space: Space, device: str) -> bool:
        """Whether nothing else may run beside a config: it compiles, or keeps the host busier than the baseline does."""
        if len(self.slots) < 2:
            return False
        loads = space.techniques.loads_host
        heavy = capabilities_of(device).own_processors and bool(loads(config) - loads(space.baseline))
        return heavy or space.setup_s(config) > 0

    def _use_fewer(self, loss: float) -> str:
        before = self.width
        self.found = self.found.compared(before, loss).at_most(before // 2)
        self._beside.clear()
        self._is_settled = self.width < 2
        now = f"{plural(self.width, 'probe')} at once" if self.width > 1 else "one probe at a time"
        return (
            f"{plural(before, 'probe')} at once slow each other down: the baseline loses {loss:.1%}; from now on {now}, and what was "
            "measured so weighs less"
        )
