"""What the time model knows before a probe, and what each probe teaches it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autotune.prediction.time import TimeModel, _observation
from autotune.records.config import Config
from autotune.records.inspection import BatchSupport
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.space import Space, build_space
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import find_techniques
from tests.closed_form import SIZES, ClosedFormRunner, inspection, measurement
from tests.rough_world import RoughRunner, rough_inspection


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space(inspection(), find_techniques())[0]


@pytest.fixture(scope="module")
def free_space() -> Space:
    """No global batch: the optimizer steps once a micro batch."""
    batch = BatchSupport(sizes=SIZES)
    baseline = inspection().baseline | {"accumulation_steps": 1}
    found = inspection(global_batch=None, batch=batch, baseline=baseline)
    return build_space(found, find_techniques())[0]


def ran(config: Config, samples_per_s: float, **changes: object) -> tuple[Config, Outcome]:
    measured = replace(measurement(config, samples_per_s, 2**29), **changes)  # type: ignore[arg-type]
    return config, Outcome(kind=Kind.OK, measurement=measured)


def test_a_part_of_a_step_is_the_same_share_of_it_however_many_processes_train(space: Space) -> None:
    phases = {"data": 0.02, "forward": 0.05, "backward": 0.08, "optimizer": 0.01}
    samples = space.baseline.samples_per_step
    shares = []
    for num_processes in (1, 4):
        found = measurement(space.baseline, num_processes * samples / 0.16, 2**29)
        seen = _observation(space.baseline, replace(found, step_s=0.16, phases_s=phases))
        shares.append({term: size - seen.value for term, size in seen.terms.items()})
    assert shares[1] == pytest.approx(shares[0])


def probed(prober: ClosedFormRunner, configs: list[Config], noise: float = 0.0) -> list[tuple[Config, Outcome]]:
    draw = random.Random(0)
    return [ran(c, prober.samples_per_s(c) * math.exp(noise * draw.gauss(0, 1))) for c in configs]


def speed_of(model: TimeModel, config: Config) -> float:
    return model.estimate([config])[0].samples_per_s


def test_before_any_probe_techniques_are_expected_to_do_what_they_usually_do(space: Space) -> None:
    model = TimeModel(space)
    plain, bf16, checkpointed = (
        space.baseline,
        space.complete({"amp": "bf16"}),
        space.complete({"checkpoint_segments": 6}),
    )
    assert speed_of(model, bf16) > speed_of(model, plain) > speed_of(model, checkpointed)


def test_a_probe_narrows_its_own_interval_most(space: Space) -> None:
    bf16, fp16 = space.complete({"amp": "bf16"}), space.complete({"amp": "fp16"})
    model = TimeModel(space, [ran(space.baseline, 50.0), ran(bf16, 70.0)])
    found, other = model.estimate([bf16, fp16])
    assert found.low < 70 < found.high and found.log_std < 0.03 < other.log_std


@pytest.mark.parametrize("fixed", [True, False])
def test_a_choice_that_the_space_lacks_is_not_taken_for_another(fixed: bool) -> None:
    """It has bf16 alone where the user fixed it, and not any more where it failed its comparison with plain fp32."""
    space = build_space(inspection(), find_techniques(), fix={"amp": "bf16"} if fixed else {})[0]
    plain, fast = space.baseline, space.baseline.replace(amp="bf16")
    left = space if fixed else space.without("amp", {"bf16"})
    model = TimeModel(left, [ran(plain, 100.0), ran(fast, 200.0)])
    larger = (one.replace(batch_size=8, accumulation_steps=12) for one in (plain, fast))
    slow, quick = (found.samples_per_s for found in model.estimate(list(larger)))
    assert quick > 1.3 * slow


def test_a_probe_of_one_group_teaches_the_others(space: Space) -> None:
    known = [ran(space.baseline, 50.0), ran(space.complete({"amp": "bf16"}), 41.0)]
    both = space.complete({"amp": "bf16", "optimizer_impl": "fused", "checkpoint_segments": 2})
    before = speed_of(TimeModel(space, known[:1]), both)
    after = speed_of(TimeModel(space, known), both)
    assert before > 50 > after


def test_padding_grows_with_the_batch_where_samples_are_of_unequal_width(space: Space) -> None:
    unequal = LengthDistribution(tuple(range(1, 101)))
    equal = LengthDistribution((50,))
    small, large = space.complete({"batch_size": 1}), space.complete({"batch_size": 48})
    plain, padded, same = (TimeModel(space, [ran(space.baseline, 50.0)], lengths) for lengths in (None, unequal, equal))
    assert speed_of(plain, large) > speed_of(plain, small)
    assert speed_of(padded, large) < speed_of(plain, large)
    assert speed_of(padded, small) > speed_of(plain, small)
    assert [speed_of(same, c) for c in (small, large)] == pytest.approx([speed_of(plain, c) for c in (small, large)])
    times = [1 / speed_of(padded, config) for config in (space.baseline, large)]
    widths = [unequal.mean_width(config.batch_size) for config in (space.baseline, large)]
    assert times[1] / times[0] == pytest.approx(widths[1] / widths[0], rel=0.1)


def test_the_floor_is_learned_from_two_batch_sizes(space: Space) -> None:
    prober = ClosedFormRunner()
    sizes = [space.complete({"batch_size": size}) for size in (2, 4, 8, 16, 32)]
    model = TimeModel(space, probed(prober, [sizes[0], sizes[1], sizes[3]]))
    for config in sizes:
        assert speed_of(model, config) == pytest.approx(prober.samples_per_s(config), rel=0.08)


def test_a_measured_optimizer_step_tells_what_larger_batches_save(free_space: Space) -> None:
    baseline, larger = free_space.baseline, free_space.complete({"batch_size": 16})
    step_s = baseline.batch_size / 50.0

    def gain(share: float) -> float:
        phases = {"data": 0.0, "forward": 0.3 * step_s, "backward": (0.7 - share) * step_s, "optimizer": share * step_s}
        model = TimeModel(free_space, [ran(baseline, 50.0, phases_s=phases)])
        return speed_of(model, larger) / speed_of(model, baseline)

    assert gain(0.5) > 1.3 > 1.1 > gain(0.005)


def test_a_phase_that_takes_next_to_nothing_says_nothing_of_what_techniques_do(space: Space) -> None:
    plain, reduced = space.baseline, space.complete({"amp": "bf16"})

    def gain(**changes: object) -> float:
        model = TimeModel(space, [ran(reduced, 50.0, **changes)])
        return speed_of(model, reduced) / speed_of(model, plain)

    step_s = space.baseline.samples_per_step / 50.0
    phases = {"data": 3e-5, "forward": 0.3 * step_s, "backward": 0.7 * step_s, "optimizer": 9e-4}
    assert gain(phases_s=phases) == pytest.approx(gain(), rel=0.1)


def test_what_accumulates_already_has_no_optimizer_step_to_save(space: Space) -> None:
    baseline = space.baseline
    phases = {"data": 0.0, "forward": 0.5, "backward": 0.9, "optimizer": 0.5}
    model = TimeModel(space, [ran(baseline, 96 / 1.9, phases_s=phases)])
    assert speed_of(model, space.complete({"batch_size": 16})) < 1.15 * speed_of(model, baseline)


def test_errors_that_two_configs_share_cancel(space: Space) -> None:
    model = TimeModel(space, [ran(space.baseline, 50.0)])
    pair = [space.complete({"amp": "fp16", "batch_size": size}) for size in (8, 12)]
    speeds = model.speeds(pair)
    variance, covariance = speeds.variance, speeds.covariance_with(0)
    difference = variance[0] + variance[1] - 2 * covariance[1]
    assert difference < 0.1 * variance[1]
    assert covariance[0] == pytest.approx(variance[0])


@pytest.mark.parametrize("count", [4, 12, 30])
def test_intervals_hold_what_they_promise(count: int) -> None:
    space = build_space(rough_inspection(), find_techniques())[0]
    inside: list[bool] = []
    for world in range(8):
        prober = RoughRunner(world=world)
        configs = random.Random(world).sample(list(space), count)
        model = TimeModel(space, probed(prober, configs, noise=0.03))
        rest = [config for config in space if config not in configs]
        inside += [e.low < prober.samples_per_s(c) < e.high for c, e in zip(rest, model.estimate(rest), strict=True)]
    assert np.mean(inside) > 0.88


def test_thirty_noisy_probes_of_a_rough_world_predict_the_rest_within_five_percent() -> None:
    space = build_space(rough_inspection(), find_techniques())[0]
    prober = RoughRunner(world=1)
    configs = random.Random(0).sample(list(space), 30)
    model = TimeModel(space, probed(prober, configs, noise=0.03))
    rest = [config for config in space if config not in configs]
    errors = [
        abs(math.log(e.samples_per_s / prober.samples_per_s(c)))
        for c, e in zip(rest, model.estimate(rest), strict=True)
    ]
    assert np.median(errors) < 0.05


def test_one_probe_out_of_line_does_not_bend_the_rest(space: Space) -> None:
    prober = ClosedFormRunner()
    configs = [space.complete({"batch_size": size, "amp": amp}) for size in (4, 8, 12, 16) for amp in ("off", "bf16")]
    good = probed(prober, configs)
    bad = [*good[:-1], ran(configs[-1], 0.3 * prober.samples_per_s(configs[-1]))]
    other = space.complete({"batch_size": 12, "amp": "bf16", "checkpoint_segments": 1})
    with_good, with_bad = (speed_of(TimeModel(space, p), other) for p in (good, bad))
    assert with_bad == pytest.approx(with_good, rel=0.15)


def test_a_disturbed_probe_counts_less(space: Space) -> None:
    bf16 = space.complete({"amp": "bf16"})
    calm = TimeModel(space, [ran(space.baseline, 50.0), ran(bf16, 70.0)])
    disturbed = ran(bf16, 70.0, disturbances=("others held the processor",))
    assert (
        TimeModel(space, [ran(space.baseline, 50.0), disturbed]).estimate([bf16])[0].log_std
        > 2 * calm.estimate([bf16])[0].log_std
    )


def test_noise_between_processes_is_learned(space: Space) -> None:
    prober = ClosedFormRunner()
    configs = random.Random(0).sample(list(space), 30)
    quiet, noisy = (TimeModel(space, probed(prober, configs, noise)).noise for noise in (0.003, 0.1))
    assert quiet < 0.02 < 0.05 < noisy


def test_what_did_not_run_tells_nothing_of_time(space: Space) -> None:
    failed = (space.complete({"amp": "fp16"}), Outcome(kind=Kind.ERROR, cause="no fp16"))
    known = ran(space.baseline, 50.0)
    target = space.complete({"batch_size": 16})
    assert speed_of(TimeModel(space, [known, failed]), target) == speed_of(TimeModel(space, [known]), target)


def test_fitting_is_deterministic(space: Space) -> None:
    target = space.complete({"batch_size": 16})
    fits = [TimeModel(space, [ran(space.baseline, 50.0)]).estimate([target]) for _ in range(2)]
    assert fits[0] == fits[1]


@pytest.mark.parametrize(
    "figures", [(0.0, 0.0, 0.0), (50.0, 0.0, math.inf), (1e300, 1e299, 1e301), (math.inf, 1.0, math.inf)]
)
def test_figures_that_cannot_be_leave_estimates_that_can_be_computed(space: Space, figures: tuple[float, ...]) -> None:
    speed, low, high = figures
    config, outcome = ran(space.complete({"amp": "fp16"}), 1.0)
    assert outcome.measurement is not None
    shown = replace(outcome.measurement, samples_per_s=speed, samples_per_s_low=low, samples_per_s_high=high)
    odd = config, replace(outcome, measurement=shown)
    for estimate in TimeModel(space, [ran(space.baseline, 50.0), odd]).estimate(list(space)):
        assert 0 <= estimate.low <= estimate.samples_per_s <= estimate.high


def test_a_bound_lowers_what_is_expected_of_a_config_and_of_those_like_it(space: Space) -> None:
    probes = [ran(space.baseline, 50.0)]
    bf16, larger = (space.complete({"amp": "bf16", "batch_size": size}) for size in (4, 8))
    ended = bf16, Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=10.0, peak_bytes_low=0))
    before, after = TimeModel(space, probes), TimeModel(space, [*probes, ended])
    assert speed_of(after, bf16) <= 10.5 < 50 < speed_of(before, bf16)
    assert speed_of(after, larger) < 0.5 * speed_of(before, larger)
    assert speed_of(after, space.complete({"amp": "fp16"})) > 2 * speed_of(after, bf16)


def test_a_bound_beyond_what_is_expected_says_nothing(space: Space) -> None:
    probes = [ran(space.baseline, 50.0)]
    bf16 = space.complete({"amp": "bf16"})
    ended = bf16, Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=1e6, peak_bytes_low=0))
    assert speed_of(TimeModel(space, [*probes, ended]), bf16) == speed_of(TimeModel(space, probes), bf16)
