"""Which configs are traced, and at which batch sizes."""

from __future__ import annotations

import json

import pytest

from autotune.prediction.plan import Plan, allocator_sizes, plan_traces, traced_sizes
from autotune.prediction.traces import Traces
from autotune.techniques import find_techniques

techniques = find_techniques()


def configs():
    return [
        techniques.complete({"batch_size": size, "accumulation_steps": 1, "amp": amp, "optimizer_impl": implementation})
        for size in (4, 1, 16)
        for amp in ("bf16", "off")
        for implementation in ("fused", "default")
    ]


def test_each_group_is_traced_once_plain_training_first():
    plan = plan_traces(configs(), find_techniques())
    assert plan.models == ((), (("amp", "bf16"),))
    assert plan.updates == ((), (("optimizer_impl", "fused"),))
    assert plan.batch_sizes == (1, 4, 16)


def test_what_failed_is_not_tried_again():
    plan = plan_traces(configs(), find_techniques()).without(Traces(target="cpu", failures={"model: amp=bf16": "why"}))
    assert plan.labels() == [
        "model: nothing switched on",
        "optimizer: nothing switched on",
        "optimizer: optimizer_impl=fused",
    ]


def test_a_plan_survives_json():
    plan = plan_traces(configs(), find_techniques())
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("largest", "sample_bytes", "most", "sizes"),
    [
        (1024, 100, None, (2, 1024)),
        (1024, 100, 50_000, (2, 32)),
        (6, 100, None, (2, 6)),
        (1, 100, None, (2, 3)),
        (1024, 10_000_000, None, (2, 6)),
        (1024, 1e9, None, (2, 3)),
        (1024, 100, 3, (2, 3)),
        (2, 100, 2, (1, 2)),
    ],
)
def test_the_smallest_and_the_largest_batch_size_are_traced(largest, sample_bytes, most, sizes):
    assert traced_sizes(largest, sample_bytes=sample_bytes, most=most) == sizes


def test_of_many_batch_sizes_some_in_equal_ratios_are_simulated():
    assert allocator_sizes((1, 2, 4)) == (1, 2, 4)
    sizes = allocator_sizes(tuple(range(1, 1025)))
    assert len(sizes) == 8
    assert sizes[0] == 1
    assert sizes[-1] == 1024
