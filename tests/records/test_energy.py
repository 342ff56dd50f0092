"""Whose energy the counters tell: that of all devices of a world, each counter once, and only where nobody else works there."""

from __future__ import annotations

import pytest

from autotune.records.energy import Counted, power_w
from autotune.runners.ranks import measured_together
from autotune.techniques import find_techniques
from tests.closed_form import measurement

MEASURED = measurement(find_techniques().complete({"batch_size": 8}), 100.0, 2**30)


def test_the_power_of_several_devices_adds_up() -> None:
    assert power_w([Counted(counter="GPU-0", power_w=300.0), Counted(counter="GPU-1", power_w=250.0)]) == (550.0, "")


def test_a_counter_that_processes_share_counts_once() -> None:
    shared = [Counted(counter="intel-rapl:0", power_w=watts, own_work=0.49) for watts in (90.0, 94.0)]
    assert power_w(shared) == (92.0, "")


def test_what_others_used_is_not_told_as_ones_own() -> None:
    watts, why = power_w([Counted(counter="intel-rapl:0", power_w=90.0, own_work=0.7)])
    assert watts is None and why.startswith("others did 30% of the work")


def test_a_world_has_the_energy_of_all_its_devices() -> None:
    ranks = [MEASURED.with_energy([Counted(counter=f"GPU-{rank}", power_w=200.0)]) for rank in range(2)]
    assert measured_together(ranks).joules_per_sample == pytest.approx(4.0)


def test_a_world_with_a_device_that_nothing_counts_has_no_energy() -> None:
    ranks = [MEASURED.with_energy([Counted(counter="GPU-0", power_w=200.0)]), MEASURED.with_energy((), "no counter")]
    together = measured_together(ranks)
    assert (together.joules_per_sample, together.no_energy) == (None, "no counter")
