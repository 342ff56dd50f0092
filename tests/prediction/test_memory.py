"""Peak memory of a process, predicted from traced peaks and probes, or from probes alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autotune.prediction.cost import Probes, beyond
from autotune.prediction.memory import GATHERED_TIMES, MOST_SHAPES, MemoryEstimate, MemoryModel
from autotune.prediction.traces import TracedPeak
from autotune.proposers.acquisition import MAX_OOM_CHANCE
from autotune.records.config import Choice, Config, ShapeGrowth, World
from autotune.records.device import Communicators
from autotune.records.inspection import Support
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.space import Space, build_space
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.amp import KERNEL_BYTES
from autotune.techniques.num_workers import WORKER_BYTES
from tests.closed_form import MIB, ClosedFormRunner, inspection, measurement
from tests.rough_world import OUTSIDE_BYTES, NoisyPeaks, RoughRunner

PROBER = RoughRunner()


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space(inspection(), find_techniques())[0]


def ran(config: Config, prober: ClosedFormRunner = PROBER) -> tuple[Config, Outcome]:
    return config, Outcome(kind=Kind.OK, measurement=measurement(config, 100.0, prober.peak_bytes(config)))


def ran_out(config: Config, limit_bytes: int, attempted_bytes: int = 0) -> tuple[Config, Outcome]:
    return config, Outcome(kind=Kind.OOM, peak_bytes=limit_bytes, attempted_bytes=attempted_bytes)


def errors(model: MemoryModel, configs: Sequence[Config]) -> list[float]:
    estimates = model.estimates(configs)
    return [abs(e.peak_bytes / PROBER.peak_bytes(c) - 1) for c, e in zip(configs, estimates, strict=True) if e]


def traced(space: Space, probes: Probes = ()) -> MemoryModel:
    return MemoryModel(NoisyPeaks(PROBER), OUTSIDE_BYTES, space, probes)


def untraced(space: Space, probes: Probes = ()) -> MemoryModel:
    return MemoryModel(None, OUTSIDE_BYTES, space, probes)


def test_a_traced_config_is_known_before_any_probe(space: Space) -> None:
    configs = list(space)
    model = traced(space)
    found = errors(model, configs)
    inside = [
        e and e.low_bytes < PROBER.peak_bytes(c) < e.high_bytes
        for c, e in zip(configs, model.estimates(configs), strict=True)
    ]
    assert np.median(found) < 0.08 and np.mean(inside) > 0.9


def test_on_a_gpu_libraries_load_kernels_late_so_that_less_is_known_before_any_probe(space: Space) -> None:
    config = next(iter(space))
    on_cpu, on_gpu = (
        MemoryModel(NoisyPeaks(PROBER, target=target), OUTSIDE_BYTES, space).estimate(config)
        for target in ("cpu", "cuda")
    )
    assert on_cpu is not None and on_gpu is not None
    assert on_gpu.high_bytes > on_cpu.high_bytes + 100 * MIB
    assert on_gpu.peak_bytes < on_cpu.peak_bytes  # a GPU's allocator is simulated, so that nothing is added for it


def test_two_probes_correct_every_group(space: Space) -> None:
    for seed in range(5):
        configs = [space.baseline, random.Random(seed).choice(list(space))]
        found = errors(traced(space, [ran(c) for c in configs]), list(space))
        assert np.median(found) <= 0.04 and np.quantile(found, 0.95) <= 0.10


def test_the_breakdown_is_passed_on(space: Space) -> None:
    estimate = traced(space).estimate(space.baseline)
    assert (
        estimate is not None
        and estimate.breakdown == NoisyPeaks(PROBER).peak(space.baseline, find_techniques()).breakdown
    )


def test_a_probe_of_one_group_moves_its_own_group_most(space: Space) -> None:
    checkpointed, plain = space.complete({"checkpoint_segments": 6}), space.baseline
    _, outcome = ran(checkpointed)
    assert outcome.measurement is not None
    peak_bytes = outcome.measurement.peak_bytes + 40 * MIB
    larger = Outcome(kind=Kind.OK, measurement=measurement(checkpointed, 100.0, peak_bytes))
    before, after = traced(space), traced(space, [(checkpointed, larger)])
    moved = [after.estimate(c).peak_bytes / before.estimate(c).peak_bytes for c in (checkpointed, plain)]  # type: ignore[union-attr]
    assert moved[0] > moved[1] > 1


def test_what_libraries_keep_for_another_type_they_keep_for_each_shape_of_a_micro_batch(space: Space) -> None:
    def of_shapes(num_shapes: float, config: Config) -> int:
        _, outcome = ran(space.baseline)
        assert outcome.measurement is not None
        measured = replace(outcome.measurement, num_shapes_expected=num_shapes)
        found = traced(space, [(space.baseline, replace(outcome, measurement=measured))]).estimate(config)
        assert found is not None
        return found.peak_bytes

    for amp, expected in (("off", 0), ("bf16", 9 * KERNEL_BYTES)):
        config = space.complete({"batch_size": 8, "amp": amp})
        assert of_shapes(10.0, config) - of_shapes(1.0, config) == pytest.approx(expected, abs=MIB)
    assert of_shapes(1e4, config) == of_shapes(MOST_SHAPES, config)  # a probe tells of so many


def test_what_grows_with_the_shapes_is_expected_of_other_micro_batches_too(space: Space) -> None:
    def with_growth(config: Config, *, grows: bool) -> tuple[Config, Outcome]:
        _, outcome = ran(config)
        assert outcome.measurement is not None
        growth = ShapeGrowth(bytes_per_shape=30.0 * MIB * grows, most_bytes=1500.0 * MIB)
        grown = 20 * 30 * MIB * grows
        return config, replace(
            outcome,
            measurement=replace(
                outcome.measurement, shape_growth=growth, num_shapes_expected=20.0, long_run_growth_bytes=grown
            ),
        )

    large, small = (space.complete({"batch_size": size, "amp": "bf16"}) for size in (12, 3))
    probes = [with_growth(space.baseline, grows=False), with_growth(large, grows=True)]
    found, own = (traced(space, probes).estimate(config) for config in (small, large))
    assert found is not None and own is not None
    assert own.peak_bytes == pytest.approx(PROBER.peak_bytes(large) + 600 * MIB, rel=0.1)
    assert found.peak_bytes == pytest.approx(PROBER.peak_bytes(small) + 600 * MIB, rel=0.1)
    assert found.log_std > own.log_std


@pytest.mark.parametrize("make", [traced, untraced])
def test_running_out_of_memory_is_evidence(space: Space, make: object) -> None:
    model: MemoryModel = make(space, [ran(space.baseline)])  # type: ignore[operator]
    config = space.complete({"batch_size": 16})
    before = model.estimate(config)
    assert before is not None
    limit = int(1.1 * before.peak_bytes)
    chances = []
    for attempted in (0, 200 * MIB):
        after = make(space, [ran(space.baseline), ran_out(config, limit, attempted)]).estimate(config)  # type: ignore[operator]
        assert after is not None and after.peak_bytes > before.peak_bytes
        chances.append(after.chance_within(limit))
    assert before.chance_within(limit) > chances[0] > chances[1]


def test_what_fails_against_all_expectation_is_believed(space: Space) -> None:
    config, like = space.complete({"batch_size": 6, "amp": "bf16"}), space.complete({"batch_size": 8, "amp": "bf16"})
    others = [c for c in space if c["amp"] == "off" and c.batch_size <= 8]
    ran_well = [ran(c) for c in random.Random(0).sample(others, 10)]
    model = traced(space, ran_well)
    for share in (1.25, 1.5, 3.0):
        limit = int(share * model.estimate(config).peak_bytes)  # type: ignore[union-attr]
        after = traced(space, [*ran_well, ran_out(config, limit)])
        own, near = after.estimate(config), after.estimate(like)
        assert own is not None and own.chance_within(limit) < 0.5
        assert near is not None and 1 - near.chance_within(limit) > MAX_OOM_CHANCE / (1 + 1) ** 2


def test_memory_that_no_trace_shows_is_learned_for_the_choice_that_may_cause_it(space: Space) -> None:
    probed, like = space.complete({"amp": "bf16"}), space.complete({"amp": "bf16", "batch_size": 6})
    others = [space.complete(c) for c in ({"batch_size": 6}, {"checkpoint_segments": 6}, {"amp": "fp16"})]
    measured = Outcome(kind=Kind.OK, measurement=measurement(probed, 100.0, PROBER.peak_bytes(probed) + 600 * MIB))
    model = traced(space, [ran(space.baseline), (probed, measured)])
    found = model.estimate(like)
    assert found is not None and found.peak_bytes == pytest.approx(PROBER.peak_bytes(like) + 600 * MIB, rel=0.15)
    assert max(errors(model, others)) < 0.12


class SmallPeaks(NoisyPeaks):
    """Of a model that hardly takes any memory."""

    def peak(self, config: Config, techniques: Techniques) -> TracedPeak:
        return replace(super().peak(config, techniques), peak_bytes=(4 * MIB) + config.batch_size * MIB // 8)


def test_what_a_loaders_workers_hold_is_not_expected_of_configs_without_them() -> None:
    """Threads and queues took 33 MiB where all tensors took four, so that no larger batch was expected to fit."""
    own = inspection()
    space, _ = build_space(
        replace(own, support={**own.support, "num_workers": Support(choices=(0, 2))}), find_techniques()
    )
    plain, loading, larger = (
        space.complete(choices)
        for choices in ({"batch_size": 1}, {"batch_size": 1, "num_workers": 2}, {"batch_size": 4})
    )
    held = {plain: OUTSIDE_BYTES + 4 * MIB, loading: OUTSIDE_BYTES + 37 * MIB}
    probes = [(c, Outcome(kind=Kind.OK, measurement=measurement(c, 100.0, peak))) for c, peak in held.items()]
    found = MemoryModel(SmallPeaks(PROBER), OUTSIDE_BYTES, space, probes).estimate(larger)
    assert found is not None and found.peak_bytes < OUTSIDE_BYTES + 12 * MIB


def test_what_the_host_had_too_little_for_says_nothing_of_the_devices_memory(space: Space) -> None:
    config = space.complete({"batch_size": 8})
    failed, outcome = ran_out(config, 2**30, attempted_bytes=20 * 2**30)
    found = [
        traced(space, [ran(space.baseline), *probes]).estimate(config)
        for probes in ([], [(failed, replace(outcome, on_host=True))], [(failed, outcome)])
    ]
    before, on_host, on_device = (estimate.peak_bytes for estimate in found if estimate is not None)
    assert before == on_host < on_device


def test_running_out_of_memory_where_it_was_expected_changes_little(space: Space) -> None:
    config = space.complete({"batch_size": 48})
    expected = traced(space).estimate(config)
    after = traced(space, [ran_out(config, expected.peak_bytes // 2)]).estimate(config)  # type: ignore[union-attr]
    assert (
        expected is not None and after is not None and after.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)
    )


def test_nothing_is_known_of_an_untraced_model_before_a_probe(space: Space) -> None:
    assert untraced(space).estimate(space.baseline) is None


def test_two_sizes_of_an_untraced_group_give_its_line(space: Space) -> None:
    sizes = [space.complete({"batch_size": size}) for size in (4, 8, 16)]
    model = untraced(space, [ran(c) for c in sizes[:2]])
    estimate = model.estimate(sizes[2])
    assert estimate is not None and estimate.peak_bytes == pytest.approx(PROBER.peak_bytes(sizes[2]), rel=0.05)


def test_untraced_groups_learn_from_each_other_with_wide_intervals(space: Space) -> None:
    model = untraced(space, [ran(space.baseline), ran(space.complete({"batch_size": 12}))])
    own, other = space.complete({"batch_size": 8}), space.complete({"batch_size": 8, "checkpoint_segments": 6})
    known, guessed = model.estimate(own), model.estimate(other)
    assert known is not None and guessed is not None and guessed.log_std > known.log_std
    assert guessed.peak_bytes < known.peak_bytes and guessed.low_bytes < PROBER.peak_bytes(other) < guessed.high_bytes


def test_a_failed_baseline_alone_says_that_smaller_batches_are_likelier_to_fit(space: Space) -> None:
    model = untraced(space, [ran_out(space.baseline, 400 * MIB)])
    chances = [model.estimate(space.complete({"batch_size": size})).chance_within(400 * MIB) for size in (1, 2, 4)]  # type: ignore[union-attr]
    assert 1 > chances[0] > chances[1] > chances[2]


def test_what_is_beyond_a_bound_has_the_moments_of_the_truncated_normal() -> None:
    draws = np.random.default_rng(0).normal(1.0, 2.0, 400_000)
    kept = draws[draws > 2.5]
    value, noise = beyond(1.0, 4.0, 2.5)
    variance = 1 / (1 / 4.0 + 1 / noise)
    mean = variance * (1.0 / 4.0 + value / noise)
    assert (mean, variance) == (pytest.approx(kept.mean(), rel=0.01), pytest.approx(kept.var(), rel=0.02))


@pytest.mark.parametrize("least", [-1e3, 1.0, 20.0, 1e3])
def test_a_bound_however_far_off_says_something_finite_or_nothing(least: float) -> None:
    value, noise = beyond(1.0, 4.0, least)
    assert noise > 0 and (math.isinf(noise) or value > 1.0)


@pytest.mark.parametrize("make", [traced, untraced])
@pytest.mark.parametrize("probed", [True, False])
def test_an_allocation_of_a_pebibyte_that_failed_leaves_finite_bounds(space: Space, make: object, probed: bool) -> None:
    failed = [ran_out(space.complete({"batch_size": size}), 300 * MIB, 2**50) for size in (32, 48, 96)]
    model: MemoryModel = make(space, [*([ran(space.baseline)] if probed else []), *failed])  # type: ignore[operator]
    for estimate in model.estimates(list(space)):
        assert estimate is not None
        assert 0 < estimate.low_bytes <= estimate.peak_bytes <= estimate.high_bytes
        assert 0 <= estimate.chance_within(2**30) <= 1


def test_it_tells_little_of_what_is_smaller_where_that_was_traced(space: Space) -> None:
    failed = [ran_out(space.complete({"batch_size": size}), 300 * MIB, 2**50) for size in (32, 48, 96)]
    estimate = traced(space, [ran(space.baseline), *failed]).estimate(space.complete({"batch_size": 6}))
    assert estimate is not None and estimate.chance_within(2**30) > 0.5


@pytest.mark.parametrize("log_std", [0.0, 1.0, 900.0])
@pytest.mark.parametrize("peak_bytes", [0, 2**30])
def test_bounds_and_chances_are_finite_whatever_the_deviation(peak_bytes: int, log_std: float) -> None:
    estimate = MemoryEstimate(peak_bytes=peak_bytes, log_std=log_std)
    assert 0 <= estimate.low_bytes <= estimate.peak_bytes <= max(1, estimate.high_bytes) <= 2**62
    assert all(0 <= estimate.chance_within(limit) <= 1 for limit in (-1, 0, 2**30))


def test_two_estimates_of_a_config_are_weighed_by_their_precision() -> None:
    sure, unsure = MemoryEstimate(peak_bytes=2**30, log_std=0.03), MemoryEstimate(peak_bytes=2**31, log_std=0.3)
    both = sure.pooled(unsure)
    assert both.peak_bytes == pytest.approx(2**30 * 2 ** (1 / 101), rel=1e-6) == unsure.pooled(sure).peak_bytes
    assert both.log_std < sure.log_std


def test_a_bound_far_beyond_what_was_expected_is_an_observation_near_it() -> None:
    for far in (1e2, 1e3, 1e9, 1e15):
        value, noise = beyond(0.0, 1.0, far)
        assert 0 < noise < 1e-3 and value == pytest.approx(min(far, 1e3), rel=0.01)


def test_traces_that_a_probe_refutes_by_far_are_left_aside(space: Space) -> None:
    probes = [ran(space.baseline), ran(space.complete({"batch_size": 2}))]
    absurd = MemoryModel(AbsurdPeaks(PROBER), OUTSIDE_BYTES, space, probes)
    config = space.complete({"batch_size": 6})
    assert absurd.estimate(config) == untraced(space, probes).estimate(config)


class AbsurdPeaks(NoisyPeaks):
    """Traced with a pebibyte that only larger batches ask for."""

    def peak(self, config: Config, techniques: Techniques) -> TracedPeak:
        return replace(super().peak(config, techniques), peak_bytes=2**50)


@pytest.mark.parametrize("make", [traced, untraced])
def test_what_a_killed_probe_held_is_the_least_that_its_config_needs(space: Space, make: object) -> None:
    config = space.complete({"batch_size": 6})
    killed = config, Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=9.0, peak_bytes_low=900 * MIB))
    probes = [ran(space.baseline)]
    before, after = (make(space, known).estimate(config) for known in (probes, [*probes, killed]))  # type: ignore[operator]
    assert before.peak_bytes < 700 * MIB < 880 * MIB < after.peak_bytes


def test_two_processes_of_one_config_may_be_as_far_apart_as_convolutions_were_seen_to_be(space: Space) -> None:
    config = space.complete({"batch_size": 16})
    estimate = traced(space, [ran(config)]).estimate(config)
    assert estimate is not None
    assert estimate.high_bytes - estimate.low_bytes > 0.14 * (estimate.peak_bytes - OUTSIDE_BYTES)


def test_a_config_with_more_groups_of_processes_holds_more_communicators_and_probes_tell_how_much_they_hold() -> None:
    space, _ = build_space(replace(inspection(), world=World(size=4), global_batch=None), find_techniques())
    copies, hybrid = (space.complete({"batch_size": 4, "parallel": spread}) for spread in ("ddp", "hsdp:2"))
    known = Communicators(guess_bytes=500 * MIB)

    def held_mib(probes: Probes = ()) -> list[int]:
        model = MemoryModel(NoisyPeaks(PROBER, target="cuda"), OUTSIDE_BYTES, space, probes, known)
        alone = MemoryModel(NoisyPeaks(PROBER, target="cuda"), OUTSIDE_BYTES, space)
        with_them, without = ([e.peak_bytes for e in m.estimates([copies, hybrid]) if e] for m in (model, alone))
        return [(a - b) // MIB for a, b in zip(with_them, without, strict=True)]

    assert held_mib() == [500, 1500]
    config, outcome = ran(copies)
    assert outcome.measurement is not None
    seen = {"num_communicators": 1.0, "communicators_bytes": 200.0 * MIB}
    of_one = replace(outcome.measurement, memory=seen, peak_bytes=outcome.measurement.peak_bytes + 200 * MIB)
    found = MemoryModel(
        NoisyPeaks(PROBER, target="cuda"), OUTSIDE_BYTES, space, [(config, replace(outcome, measurement=of_one))], known
    ).estimates([copies, hybrid])
    plain = MemoryModel(NoisyPeaks(PROBER, target="cuda"), OUTSIDE_BYTES, space, [(config, outcome)])
    before = plain.estimates([copies, hybrid])
    assert [(a.peak_bytes - b.peak_bytes) // MIB for a, b in zip(found, before, strict=True) if a and b] == [200, 600]


def of_four(config: dict[str, Choice]) -> tuple[Space, Config]:
    space, _ = build_space(replace(inspection(), world=World(size=4), global_batch=None), find_techniques())
    return space, space.complete({"batch_size": 4, "accumulation_steps": 1, **config})


def test_a_cpus_heap_keeps_more_of_what_is_gathered_than_of_what_else_is_allocated() -> None:
    class Turning(NoisyPeaks):
        def peak(self, config: Config, techniques: Techniques) -> TracedPeak:
            return replace(super().peak(config, techniques), volume_bytes=200 * MIB, fixed_volume_bytes=100 * MIB)

    found = {}
    for spread in ("ddp", "fsdp"):
        space, config = of_four({"parallel": spread})
        turning, still = (
            MemoryModel(kind(PROBER), OUTSIDE_BYTES, space).estimate(config) for kind in (Turning, NoisyPeaks)
        )
        assert turning is not None and still is not None
        found[spread] = (turning.peak_bytes - still.peak_bytes) / MIB
    assert found["fsdp"] == pytest.approx(found["ddp"] * (100 + 100 * GATHERED_TIMES) / 200, rel=0.01)


def test_where_nothing_is_traced_whole_gradients_are_reckoned_with_that_shards_accumulate() -> None:
    def held_mib(gradients_bytes: int, **config: Choice) -> float:
        space, asked = of_four(config)
        probes = [ran(of_four({})[1])]
        found = MemoryModel(None, OUTSIDE_BYTES, space, probes, gradients_bytes=gradients_bytes).estimate(asked)
        assert found is not None
        return found.peak_bytes / MIB

    for config, more_mib in (
        ({"parallel": "fsdp"}, 0),
        ({"parallel": "fsdp", "accumulation_steps": 2}, 75),
        ({"parallel": "hsdp:2", "accumulation_steps": 2}, 50),
        ({"parallel": "ddp", "accumulation_steps": 2}, 0),
    ):
        assert held_mib(100 * MIB, **config) == pytest.approx(held_mib(0, **config) + more_mib, abs=0.1), config


class WithoutWorkers(NoisyPeaks):
    """A trace does not show the processes that load data."""

    def peak(self, config: Config, techniques: Techniques) -> TracedPeak:
        return super().peak(config.replace(num_workers=0), techniques)


def test_on_a_cpu_data_workers_are_expected_to_hold_memory_before_one_was_seen(space: Space) -> None:
    config = next(iter(space))
    for target, held_bytes in (("cpu", 4 * WORKER_BYTES), ("cuda", 0)):  # the host's memory is none of a card's
        model = MemoryModel(WithoutWorkers(PROBER, target=target), OUTSIDE_BYTES, space)
        plain, with_workers = (model.estimate(config.replace(num_workers=number)) for number in (0, 4))
        assert plain is not None and with_workers is not None
        assert with_workers.peak_bytes - plain.peak_bytes == held_bytes
