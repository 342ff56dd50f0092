import time
from dataclasses import replace

import pytest

from autotune.devices.cpu import CpuDevice
from autotune.probe.observers.base import Observer, Observers, kinds
from autotune.probe.observers.memory_growth import growth_per_step
from autotune.records.config import ALONE, World
from autotune.techniques import find_techniques
from tests.closed_form import measurement

MEASURED = measurement(find_techniques().complete({"batch_size": 8}), 100.0, 2**30)
MIB = 2**20


class Told(CpuDevice):
    """A device that tells what it is given."""

    def __init__(self, *, held_share=0.0, slow_blocks=(), grows_bytes=0, power_w=None, others=0.0):
        super().__init__()
        self.power_w, self.others, self.began_s = power_w, others, 0.0
        self.held_share, self.slow_blocks, self.grows_bytes = held_share, slow_blocks, grows_bytes
        self.block = -1

    def contention(self):
        return self.held_share

    def slowdowns(self):
        self.block += 1
        return ("temperature",) if self.block in self.slow_blocks else ()

    def start_measuring(self):
        super().start_measuring()
        self.began_s = time.monotonic()

    def energy_j(self):
        return {} if self.power_w is None else {"counter": self.power_w * (time.monotonic() - self.began_s)}

    def own_work(self):
        return 1 - self.others

    def kept_bytes(self):
        return 2**30 + self.block * self.grows_bytes


def observed(device, world=ALONE, num_blocks=6, block_s=0.0):
    observers = Observers(device, world)
    observers.start()
    for step in range(num_blocks):
        time.sleep(block_s)
        observers.sample(step)
    observers.end()
    return observers.stop(MEASURED)


def test_every_file_of_the_room_is_an_observer():
    assert {kind.name for kind in kinds()} >= {
        "contention",
        "throttling",
        "instruments",
        "memory detail",
        "memory growth",
    }
    assert all(issubclass(kind, Observer) for kind in kinds())


@pytest.mark.parametrize(("slow", "said"), [((), ()), ((1,), ("clock throttled: temperature",))])
def test_a_slowdown_is_a_disturbance_if_it_lasts_for_more_than_a_tenth_of_the_blocks(slow, said):
    assert observed(Told(slow_blocks=slow)).disturbances == said
    assert observed(Told(slow_blocks=()), num_blocks=20).disturbances == ()


def test_contention_comes_first_in_what_disturbs_and_is_none_among_the_ranks_of_a_world():
    others = "others held the processor for 50% of the time"
    found = observed(Told(held_share=0.5, slow_blocks=range(6)))
    assert (found.contention, found.disturbances) == (0.5, (others, "clock throttled: temperature"))
    found = observed(Told(held_share=0.5), World(size=2))
    assert (found.contention, found.disturbances) == (0.0, ())
    assert observed(Told(held_share=0.1)).disturbances == ()


def test_instruments_memory_and_its_growth_are_in_the_measurement():
    found = observed(Told(grows_bytes=2 * MIB), num_blocks=12)
    assert {"load_1m", "used_bytes"} <= found.telemetry.keys() and "vm_data_bytes" in found.memory
    assert found.growth_bytes_per_step == pytest.approx(2 * MIB)
    assert observed(CpuDevice()).growth_bytes_per_step == 0 == growth_per_step([])


def test_growth_is_looked_for_from_the_warm_up_on_and_a_micro_batch_is_a_share_of_a_step():
    device = Told(grows_bytes=3 * MIB)
    observers = Observers(device, ALONE)
    for micro_batch in range(1, 11):
        device.block += 1
        observers.sample_warmup(micro_batch / 8)
    observers.start()
    assert observers.stop(MEASURED).growth_bytes_per_step == pytest.approx(8 * 3 * MIB)


def held(num_steps, total_bytes):
    """What is held after each step."""
    return [(step, 2**30 + round(total_bytes(step))) for step in range(1, num_steps + 1)]


def test_one_wide_batch_makes_no_growth():
    def once(step):
        return 100 * MIB * (step > 10)

    assert growth_per_step(held(16, once)) == 0


def test_the_wide_batches_of_a_cycle_do_not_count_as_the_growth_of_a_step():
    def with_a_leap(step):
        return 2 * MIB * step + 300 * MIB * (step > 8)

    assert growth_per_step(held(12, with_a_leap)) == pytest.approx(2 * MIB)


def test_the_energy_of_a_sample_is_the_power_over_the_throughput():
    found = observed(Told(power_w=50.0), block_s=0.02)
    assert found.joules_per_sample == pytest.approx(0.5, rel=0.1) and found.no_energy == ""


def test_energy_is_told_only_of_a_process_that_is_alone_and_was_timed_long_enough():
    assert observed(Told(power_w=50.0, others=0.3), block_s=0.02).no_energy.startswith("others did 30% of the work")
    assert "needs 100 ms of timing" in observed(Told(power_w=50.0)).no_energy
    assert observed(Told()).no_energy  # nothing counts it, and why is said
    assert observed(Told(power_w=50.0)).joules_per_sample is None


def test_what_is_cut_short_is_not_said_to_be_disturbed():

    found = Observers(Told(held_share=0.9), ALONE).stop(replace(MEASURED, cut_short=True))
    assert (found.contention, found.disturbances) == (0.0, ()) and found.telemetry and found.memory
