"""The default sampler: what it proposes, how fast it finds the best, and when it has enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from autotune.prediction.memory import MemoryEstimate, MemoryModel
from autotune.prediction.time import TimeModel
from autotune.prediction.traces import Traces
from autotune.proposers.acquisition import MAX_ENUMERATED, Acquisition
from autotune.proposers.cost_model import CostModel
from autotune.records.config import Choice, Config, ProbeSettings
from autotune.records.inspection import BatchSupport, Support
from autotune.records.objective import OBJECTIVES, Objective
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.records.study import Prediction, Proposal
from autotune.space import Space, build_space
from autotune.techniques import find_techniques
from autotune.tuning.explore import measure_baseline
from autotune.tuning.state import Search
from tests.closed_form import LIMIT_BYTES, SUPPORT, ClosedFormRunner, inspection, make_search
from tests.rough_world import OUTSIDE_BYTES, NoisyPeaks, RoughRunner, rough_inspection

SETTINGS = ProbeSettings(memory_limit_bytes=LIMIT_BYTES)
Probes = list[tuple[Config, Outcome]]


def objective(name: str = "throughput", headroom: float = 0.05) -> Objective:
    return OBJECTIVES[name](memory_limit_bytes=LIMIT_BYTES, headroom=headroom)


def plain_space() -> Space:
    return build_space(inspection(), find_techniques())[0]


def acquisition(space: Space, peaks: Traces | None, probes: Probes, goal: Objective | None = None) -> Acquisition:
    goal = goal or objective()
    baseline = next((outcome for config, outcome in probes if config == space.baseline and outcome.ok), None)
    if baseline is not None:
        goal = goal.with_baseline(baseline)
    return Acquisition(space, goal, TimeModel(space, probes), MemoryModel(peaks, OUTSIDE_BYTES, space, probes), probes)


def search(
    prober: ClosedFormRunner,
    space: Space,
    peaks: Traces | None,
    goal: Objective | None = None,
    run: Callable[[Config], Outcome] | None = None,
) -> Probes:
    """Every probe until nothing is likely to win, at most 40, the baseline's first."""
    run = run or (lambda config: prober.probe(config, SETTINGS))
    probes = Probes([(space.baseline, run(space.baseline))])
    while len(probes) < 40:
        tried = {config for config, _ in probes}
        found = acquisition(space, peaks, probes, goal).next(lambda config, tried=tried: config not in tried)  # type: ignore[misc]
        if found is None:
            break
        probes.append((found, run(found)))
    return probes


def probes_until_near(prober: ClosedFormRunner, space: Space, probes: Probes, share: float = 0.98) -> int:
    """How many probes it took to run a config with that share of the best one's throughput; 40 if none did."""
    usable = objective().usable_bytes
    best = prober.best_samples_per_s(space, usable)
    near = [
        prober.samples_per_s(config) >= share * best and prober.peak_bytes(config) <= usable for config, _ in probes
    ]
    return near.index(True) + 1 if any(near) else 40


def num_oom(probes: Probes) -> int:
    return sum(outcome.kind is Kind.OOM for _, outcome in probes)


def test_what_usually_helps_is_tried_together_at_once() -> None:
    prober, space = ClosedFormRunner(), plain_space()
    probes = search(prober, space, NoisyPeaks(prober))
    assert probes[0][0] == space.baseline
    second = probes[1][0]
    assert (second["amp"], second["optimizer_impl"], second["checkpoint_segments"]) == ("bf16", "fused", 0)
    assert second.batch_size > space.baseline.batch_size


@pytest.mark.parametrize("traced", [True, False])
def test_the_closed_forms_best_is_found_in_a_few_probes(traced: bool) -> None:
    space, found, stopped, out_of_memory = plain_space(), [], [], []
    for seed in range(5):
        prober = ClosedFormRunner(noise=0.03, seed=seed)
        probes = search(prober, space, NoisyPeaks(prober) if traced else None)
        found.append(probes_until_near(prober, space, probes))
        stopped.append(len(probes))
        out_of_memory.append(num_oom(probes))
    assert median(found) <= 5 and median(stopped) <= 15 and median(out_of_memory) <= 1 and max(out_of_memory) <= 2


def test_rough_worlds_are_searched_in_a_few_probes() -> None:
    space = build_space(rough_inspection(), find_techniques())[0]
    found, stopped, out_of_memory = [], [], []
    for world in range(7):
        prober = RoughRunner(noise=0.03, seed=world, world=world)
        probes = search(prober, space, NoisyPeaks(prober))
        found.append(probes_until_near(prober, space, probes, share=0.96))  # single probes differ by 3 %
        stopped.append(len(probes))
        out_of_memory.append(num_oom(probes))
    assert median(found) <= 10 and median(stopped) <= 16
    assert median(out_of_memory) == 0 and max(out_of_memory) <= 1


def test_the_least_memory_is_looked_for_when_the_baseline_does_not_fit() -> None:
    large = inspection(baseline=inspection().baseline | {"batch_size": 48, "accumulation_steps": 2})
    space = build_space(large, find_techniques())[0]
    for peaks in (None, NoisyPeaks(ClosedFormRunner())):
        probes = search(ClosedFormRunner(), space, peaks)
        assert probes[0][1].kind is Kind.OOM and num_oom(probes) <= 2
        assert probes_until_near(ClosedFormRunner(), space, probes) <= 10


def test_what_fails_is_not_tried_again_and_again_in_other_sizes() -> None:
    def run(config: Config) -> Outcome:
        failed = Outcome(kind=Kind.NONFINITE, cause="the loss was nan")
        return failed if config["amp"] == "bf16" else prober.probe(config, SETTINGS)

    prober, space = ClosedFormRunner(), plain_space()
    probes = search(prober, space, NoisyPeaks(prober), run=run)
    assert sum(outcome.kind is Kind.NONFINITE for _, outcome in probes) <= 5
    assert max(prober.samples_per_s(c) for c, o in probes if o.ok) > 90


def test_the_memory_objective_finds_the_smallest_that_is_fast_enough() -> None:
    prober, space = ClosedFormRunner(noise=0.005), plain_space()
    probes = search(prober, space, NoisyPeaks(prober), objective("memory"))
    needed = 0.97 * prober.samples_per_s(space.baseline)
    smallest = min(prober.peak_bytes(c) for c in space if prober.samples_per_s(c) >= needed)
    found = min(prober.peak_bytes(c) for c, o in probes if o.ok and prober.samples_per_s(c) >= 0.99 * needed)
    assert found <= 1.05 * smallest and len(probes) <= 20


def test_the_balanced_objective_weighs_both() -> None:
    def merit(config: Config) -> float:
        return prober.samples_per_s(config) / math.sqrt(prober.peak_bytes(config))

    prober, space = ClosedFormRunner(noise=0.005), plain_space()
    probes = search(prober, space, NoisyPeaks(prober), objective("balanced"))
    best = max(merit(config) for config in space if prober.peak_bytes(config) <= 0.95 * LIMIT_BYTES)
    assert max(merit(config) for config, _ in probes) >= 0.97 * best and len(probes) <= 20


@pytest.mark.parametrize("fix", [pytest.param({}, marks=pytest.mark.slow), {"amp": "bf16", "checkpoint_segments": 1}])
def test_a_space_too_large_to_list_is_climbed(fix: dict[str, Choice]) -> None:
    loading = {
        "num_workers": Support(choices=(0, 1, 2, 4, 8)),
        "prefetch_factor": Support(choices=(2, 4, 8)),
        "persistent_workers": Support(choices=(False, True)),
        "channels_last": Support(choices=(False, True)),
    }
    base = inspection()
    changes = {
        "batch": BatchSupport(sizes=tuple(range(1, 61))),
        "global_batch": None,
        "baseline": base.baseline | {"accumulation_steps": 1},
    }
    space = build_space(
        inspection(support=base.support | loading, **changes), find_techniques(), fix=fix, include=(), exclude=()
    )[0]
    assert space.num_combinations > MAX_ENUMERATED
    prober = ClosedFormRunner(noise=0.01)
    probes = search(prober, space, NoisyPeaks(prober))
    assert probes_until_near(prober, space, probes) <= 12


def test_a_prediction_says_what_was_expected_and_why() -> None:
    prober, space = ClosedFormRunner(), plain_space()
    first = acquisition(space, NoisyPeaks(prober), []).predict(space.baseline)
    assert first.reason == "what you run today"
    assert first.samples_per_s is None and first.chance_to_win is None and first.peak_bytes is not None
    probes = [(space.baseline, prober.probe(space.baseline, SETTINGS))]
    acquired = acquisition(space, NoisyPeaks(prober), probes)
    second = acquired.next(lambda config: config != space.baseline)
    assert second is not None
    prediction = acquired.predict(second)
    assert prediction.samples_per_s and prediction.samples_per_s_low and prediction.samples_per_s_high
    assert prediction.samples_per_s_low < prediction.samples_per_s < prediction.samples_per_s_high
    assert (
        prediction.chance_to_win is not None and 0.5 < prediction.chance_to_win < 1 and prediction.chance_to_fit > 0.8
    )
    assert prediction.reason.startswith("likely faster") and "bf16" in prediction.reason
    assert Prediction.from_dict(prediction.to_dict()) == prediction


def test_the_ranking_does_not_fall_for_one_lucky_probe() -> None:
    prober, space = ClosedFormRunner(), plain_space()
    configs = random.Random(1).sample([c for c in space if prober.peak_bytes(c) < 0.9 * LIMIT_BYTES], 30)
    probes = [
        (config, ClosedFormRunner(noise=0.06, seed=n).probe(config, SETTINGS)) for n, config in enumerate(configs)
    ]
    first = acquisition(space, NoisyPeaks(prober), probes).ranked()[0]
    assert prober.samples_per_s(first) >= 0.97 * max(map(prober.samples_per_s, configs))


def proposed(search: Search) -> Config | None:
    """The next config of a new cost model, which knows the search's history alone."""
    peaks = NoisyPeaks(ClosedFormRunner())
    found = CostModel(lambda: peaks, OUTSIDE_BYTES, seed=0).propose(search.history)
    return None if found is None else found.config


def ready(folder: Path) -> Search:
    """A search whose baseline is measured."""
    search = make_search(folder, ClosedFormRunner(noise=0.02), sampler="cost-model")
    measure_baseline(search)
    return search


def test_a_resumed_study_goes_on_with_the_same_proposal(tmp_path: Path) -> None:
    search = ready(tmp_path)
    first = proposed(search)
    assert first is not None
    search.probe(Proposal(config=first))
    resumed = make_search(tmp_path, ClosedFormRunner(), sampler="cost-model")
    assert proposed(search) == proposed(resumed) != first


def test_what_runs_is_not_proposed_again(tmp_path: Path) -> None:
    search = ready(tmp_path)
    first = proposed(search)
    assert first is not None
    search.history.running.add(first)
    assert proposed(search) not in (None, first)


def test_the_search_ends_when_nothing_is_likely_to_win(tmp_path: Path) -> None:
    search = ready(tmp_path)
    tried = [search.history.space.baseline]
    while (config := proposed(search)) is not None and len(tried) < 30:
        search.probe(Proposal(config=config))
        tried.append(config)
    assert len(tried) <= 20
    best = ClosedFormRunner().best_samples_per_s(search.history.space, search.history.objective.usable_bytes)
    assert max(map(ClosedFormRunner().samples_per_s, tried)) >= 0.98 * best


def test_a_single_config_that_is_left_ends_the_search_at_once() -> None:
    fixed = {name: support.choices[0] for name, support in SUPPORT.items()}
    space = build_space(inspection(), find_techniques(), fix=fixed | {"batch_size": 4})[0]
    prober = ClosedFormRunner()
    assert [config for config, _ in search(prober, space, None)] == [space.baseline]


def test_what_was_too_slow_to_go_on_ran_and_its_batch_is_not_blamed() -> None:
    space = plain_space()
    runs, slow, larger = (space.complete({"batch_size": size}) for size in (4, 8, 12))
    outcome = Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=1e9, peak_bytes_low=1))
    hung = replace(outcome, bound=Bound(samples_per_s_high=1e9, peak_bytes_low=0))
    chances = [
        acquisition(space, None, [(runs, ClosedFormRunner().probe(runs, SETTINGS)), (slow, ended)])
        .posterior([space.complete({"batch_size": 8, "amp": "bf16"}), larger])
        .chance
        for ended in (outcome, hung)
    ]
    assert chances[0][0] > chances[1][0] and chances[0][1] == pytest.approx(chances[1][1])


def test_where_nothing_is_expected_to_fit_the_leanest_comes_first_and_not_the_least_known() -> None:
    """What is less known has the better chance to fit against all expectation, which would say nothing of the rest."""
    space = plain_space()
    models, known, unknown = acquisition(space, None, []), space.baseline, space.complete({"amp": "bf16"})

    class Peaks:
        def estimates(self, configs: list[Config]) -> list[MemoryEstimate]:
            return [
                MemoryEstimate(peak_bytes=int(LIMIT_BYTES * 1.1), log_std=0.1 if c["amp"] == "bf16" else 0.02)
                for c in configs
            ]

    models.memory = Peaks()  # type: ignore[assignment]
    found = models.posterior([known, unknown])
    assert found.to_fit[1] > found.to_fit[0]
    assert found.score[0] > found.score[1]
