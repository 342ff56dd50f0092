from __future__ import annotations

import pytest

from autotune.records.scaling import OnDevices, Scaling


def on(num_processes: int, samples_per_s: float, width: float = 0.1) -> OnDevices:
    return OnDevices(
        num_processes=num_processes,
        config={"batch_size": 8},
        samples_per_s=samples_per_s,
        samples_per_s_ci=(samples_per_s / (1 + width), samples_per_s * (1 + width)),
        peak_bytes=2**20,
        verdict="same",
        study="net",
    )


def test_efficiency_is_the_throughput_of_each_over_that_of_the_fewest() -> None:
    scaling = Scaling.of([on(4, 300.0), on(1, 100.0), on(2, 180.0)])
    assert [one.num_processes for one in scaling.rows] == [1, 2, 4]
    assert [one.efficiency for one in scaling.rows] == pytest.approx([1.0, 0.9, 0.75])


def test_the_interval_of_an_efficiency_is_that_of_both_throughputs() -> None:
    first, second = Scaling.of([on(2, 100.0), on(4, 200.0)]).rows
    assert first.efficiency_ci == (1.0, 1.0)
    low, high = second.efficiency_ci
    assert (low, high) == pytest.approx((1 / 1.1**2**0.5, 1.1**2**0.5))


def test_it_survives_json() -> None:
    scaling = Scaling.of([on(1, 100.0), on(2, 180.0)])
    assert Scaling.from_dict(scaling.to_dict()) == scaling
