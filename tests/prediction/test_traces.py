"""How traces of a few configs say what all configs need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune.prediction.traces import (
    ModelTrace,
    PeakFit,
    Piece,
    Plan,
    Reserved,
    Traces,
    UpdateTrace,
    allocator_sizes,
    plan_traces,
    traced_sizes,
)
from autotune.techniques import find_techniques

techniques = find_techniques()

PARAMETERS, STATE = 1000.0, 2000.0


def piece(constant: float, per_sample: float) -> Piece:
    """Activations, beside the parameters."""
    return Piece(
        constant=(PARAMETERS, 0, 0, constant, 0),
        per_sample=(0, 0, 0, per_sample, 0),
        modules=(("a", constant, per_sample),),
    )


def fit(*pieces: Piece, deviation: float = 0.0) -> PeakFit:
    return PeakFit(pieces=pieces, batch_sizes=(2, 8, 32), deviation=deviation)


def gradients(of: Piece) -> Piece:
    return replace(of, constant=(of.constant[0], PARAMETERS, *of.constant[2:]))


PLAIN = ModelTrace(
    alone=fit(piece(5000, 10), piece(0, 100)),
    beside=fit(gradients(piece(5000, 10)), gradients(piece(0, 100))),
    before_update=Piece(constant=(PARAMETERS, PARAMETERS, 0, 0, 0), per_sample=(0, 0, 0, 0, 8)),
    input_bytes=(0, 8),
    volume=((100.0, 0.0, 1), (0.0, 10.0, 2)),
)
DEFAULT = UpdateTrace(state_bytes=STATE, first=(0, 0, STATE, 0, 500), later=(0, 0, 0, 0, 700))
LARGE = replace(DEFAULT, later=(0, 0, 0, 0, 50_000.0))
TRACES = Traces(
    target="cpu",
    models={(): PLAIN, (("amp", "bf16"),): replace(PLAIN, alone=fit(piece(5000, 50), deviation=0.1))},
    updates={(): DEFAULT, (("optimizer_impl", "foreach"),): LARGE},
    failures={"model: amp=fp16": "it cannot be traced"},
)


def config(batch_size: int, **choices):
    return techniques.complete({"batch_size": batch_size, "accumulation_steps": 1, **choices})


@pytest.mark.parametrize(("batch_size", "activations"), [(4, 5040), (100, 10_000)])
def test_the_peak_is_the_largest_line_at_the_batch_size(batch_size, activations):
    peak = TRACES.peak(config(batch_size), find_techniques())
    assert peak.breakdown.activations_bytes == activations
    assert peak.peak_bytes == PARAMETERS + STATE + activations
    assert peak.breakdown.modules == (("a", activations),)


def test_who_accumulates_holds_gradients_beside_activations_and_all_micro_batches():
    alone, several = (
        TRACES.peak(config(4), find_techniques()),
        TRACES.peak(config(4, accumulation_steps=3), find_techniques()),
    )
    assert several.breakdown.gradients_bytes == PARAMETERS
    assert several.peak_bytes - alone.peak_bytes == PARAMETERS + 2 * 4 * 8


def test_an_update_that_needs_more_than_the_micro_batches_is_the_peak():
    peak = TRACES.peak(config(4, optimizer_impl="foreach"), find_techniques())
    assert peak.breakdown.activations_bytes == 0
    assert peak.breakdown.temporaries_bytes == 50_000 + 4 * 8
    assert peak.peak_bytes == 2 * PARAMETERS + STATE + 50_000 + 4 * 8


def test_techniques_that_act_on_the_loading_of_data_do_not_matter():
    assert TRACES.peak(config(4, num_workers=2), find_techniques()) == TRACES.peak(config(4), find_techniques())


def test_a_group_that_was_not_traced_has_no_peak():
    assert TRACES.peak(config(4, amp="fp16"), find_techniques()) is None
    assert TRACES.peak(config(4, optimizer_impl="fused"), find_techniques()) is None


@pytest.mark.parametrize(("batch_size", "uncertainty"), [(2, 0.0), (5, 0.1), (32, 0.0), (64, 0.2), (1, 0.2)])
def test_a_law_that_is_not_affine_is_unsure_where_it_was_not_traced(batch_size, uncertainty):
    assert TRACES.peak(config(batch_size, amp="bf16"), find_techniques()).uncertainty == pytest.approx(uncertainty)


def test_on_a_gpu_the_allocator_reserves_more_than_lives():
    plain = Reserved(added="", factors=((2, 1.5, 1.5), (8, 1.25, 1.3), (32, 1.125, 1.2)))
    growing = Reserved(added="expandable_segments:True", factors=((8, 1.0625, 1.125),))
    model = replace(PLAIN, reserved=(plain, growing))
    traces = replace(TRACES, target="cuda", models={(): model})
    living = TRACES.peak(config(8), find_techniques())
    assert traces.peak(config(8), find_techniques()).peak_bytes == 1.25 * living.peak_bytes
    assert traces.peak(config(8), find_techniques()).uncertainty == 0
    assert traces.peak(config(8, expandable_segments=True), find_techniques()).peak_bytes == 1.0625 * living.peak_bytes
    between = traces.peak(config(16), find_techniques())
    assert 1.125 < between.peak_bytes / TRACES.peak(config(16), find_techniques()).peak_bytes < 1.25
    assert between.uncertainty > 0.05


def test_what_a_micro_batch_turns_over_is_told_of_a_cpus_heap_alone():
    found = TRACES.peak(config(8), find_techniques())
    assert (found.volume_bytes, found.fixed_volume_bytes) == (100 + 8 * 20, 100)
    model = replace(PLAIN, reserved=(Reserved(added="", factors=((8, 1.25, 1.3),)),))
    assert replace(TRACES, models={(): model}).peak(config(8), find_techniques()).volume_bytes == 0


def test_traces_survive_json():
    assert Traces.from_dict(json.loads(json.dumps(TRACES.to_dict()))) == TRACES


@pytest.mark.parametrize(
    "data", [{}, {"format": 0}, [], {**TRACES.to_dict(), "models": [[1]]}, {**TRACES.to_dict(), "updates": 3}]
)
def test_data_of_another_form_is_refused(data):
    with pytest.raises(ValueError, match=r"format|no traces|unpack"):
        Traces.from_dict(data)


def test_merging_forgets_the_failure_of_what_was_traced_later():
    later = Traces(target="cpu", models={(("amp", "fp16"),): PLAIN}, failures={"model: amp=bf16": "a crash"})
    merged = TRACES.merged(later)
    assert merged.peak(config(4, amp="fp16"), find_techniques()) is not None
    assert merged.failures == {}
    assert merged.updates == TRACES.updates


def test_storages_that_are_too_large_for_the_heap_leave_no_holes_in_it():
    model = replace(PLAIN, volume=((0.0, 2.0**20, 3), (1000.0, 0.0, 1)))
    traces = replace(TRACES, models={(): model})
    assert traces.peak(config(8), find_techniques()).volume_bytes == 3 * 8 * 2**20 + 1000
    assert traces.peak(config(32), find_techniques()).volume_bytes == 1000


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


def test_where_plain_training_failed_nothing_is_tried_as_all_others_need_it():
    failed = Traces(target="cpu", failures={"model: nothing switched on": "why"})
    assert not plan_traces(configs(), find_techniques()).without(failed).labels()


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
