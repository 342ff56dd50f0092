"""What a study leaves: ratios to its own baseline, and how alike two studies are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune.records.inspection import Layer, LossKind, ModelSignature
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.records.priors import Circumstances, PriorStudy, model_likeness
from autotune.records.study import Fingerprint, SearchFacts, Trial
from autotune.techniques import find_techniques
from tests.closed_form import measurement

TECHNIQUES = find_techniques()


def transformer(blocks: int = 4, width: int = 64) -> ModelSignature:
    layers = (
        Layer(kind="LayerNorm", shapes=((width,), (width,)), count=2 * blocks),
        Layer(kind="Linear", shapes=((4 * width, width), (4 * width,)), count=2 * blocks),
    )
    return ModelSignature(
        layers=layers, num_parameters=blocks * 8 * width**2, dtypes=("float32",), loss=LossKind.CROSS_ENTROPY
    )


CONVOLUTIONAL = ModelSignature(
    layers=(Layer(kind="Conv2d", shapes=((64, 64, 3, 3),), count=8),),
    num_parameters=8 * 64 * 64 * 9,
    dtypes=("float32",),
    loss=LossKind.CROSS_ENTROPY,
)


def here(**changes: object) -> Circumstances:
    known = Fingerprint(device="cpu Some Processor", num_threads=2, torch="2.13.0")
    return replace(Circumstances.of(transformer(), known, {"batch_size": 4, "accumulation_steps": 8}), **changes)


def test_a_study_is_wholly_alike_one_in_the_same_circumstances() -> None:
    assert here().likeness(here()) == 1.0


def test_one_more_layer_another_batch_and_the_next_torch_leave_most_of_the_likeness() -> None:
    for changed in ({"signature": transformer(blocks=5)}, {"samples_per_step": 64}, {"torch": "2.14.0"}):
        assert 0.7 < here().likeness(here(**changed)) < 1.0


def test_another_kind_of_model_or_of_device_leaves_next_to_none() -> None:
    assert here().likeness(here(signature=CONVOLUTIONAL)) < 0.05
    assert here().likeness(here(device="cuda:0 Some Card")) < 0.1
    assert here().likeness(here(signature=None)) == 0.0


def test_memory_is_as_alike_whatever_the_processor_and_however_many_micro_batches_a_step_has() -> None:
    for changed in ({"samples_per_step": 512}, {"torch": "2.14.0"}, {"device": "cpu Another"}, {"num_threads": 8}):
        assert here().likeness_in_memory(here(**changed)) == 1.0
    for changed in ({"signature": transformer(blocks=5)}, {"device": "cuda:0 Some Card"}, {"num_processes": 2}):
        assert here().likeness_in_memory(here(**changed)) < 1.0
    assert here().likeness_in_memory(here(signature=None)) == 0.0


def test_the_user_may_say_that_models_are_alike() -> None:
    assert here().likeness(here(signature=CONVOLUTIONAL), same_model=True) == 1.0


def test_likeness_is_the_same_both_ways_and_falls_with_what_models_have_in_common() -> None:
    one, wider = transformer(), transformer(width=256)
    assert model_likeness(one, wider) == pytest.approx(model_likeness(wider, one))
    assert model_likeness(one, wider) < model_likeness(one, transformer(width=128)) < 1.0


def trial(number: int, outcome: Outcome, **choices: object) -> Trial:
    config = TECHNIQUES.complete({"batch_size": 4, "accumulation_steps": 1, **choices})
    return Trial(number=number, stage="search", config=config, outcome=outcome, feasible=outcome.ok)


def ran(number: int, samples_per_s: float, peak_bytes: int, **choices: object) -> Trial:
    found = trial(number, Outcome(kind=Kind.OK), **choices)
    return replace(
        found, outcome=Outcome(kind=Kind.OK, measurement=measurement(found.config, samples_per_s, peak_bytes))
    )


def facts_of(baseline: Trial) -> SearchFacts:
    known = Fingerprint(device="cpu Some Processor", num_threads=2, torch="2.13.0", task="hash")
    return SearchFacts(
        task="some",
        model="/home/me/model.py",
        fingerprint=known,
        signature=transformer(),
        baseline_config=baseline.config.as_dict(),
    )


def test_what_is_kept_is_over_the_studys_own_baseline_and_names_no_path() -> None:
    baseline, faster = ran(0, 100.0, 1000), ran(1, 150.0, 600, amp="bf16")
    assert faster.outcome.measurement is not None
    grown = replace(faster.outcome.measurement, long_run_growth_bytes=200)
    faster = replace(faster, outcome=replace(faster.outcome, measurement=grown))
    late = trial(2, Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=40.0, peak_bytes_low=1)), amp="fp16")
    crashed = trial(
        3, Outcome(kind=Kind.CRASHED, cause="SIGSEGV", log="/home/me/studies/some.logs/3.log"), batch_size=8
    )
    left = PriorStudy.of(facts_of(baseline), [baseline, faster, late, crashed], None, "2026-01-01")
    assert left is not None
    assert [kept.speed for kept in left.trials] == pytest.approx([1.0, 1.5, 0.0, 0.0])
    assert left.trials[1].peak == pytest.approx(0.8)
    assert left.trials[2].speed_bound == pytest.approx(0.4)
    assert left.trials[3].kind is Kind.CRASHED
    assert "/" not in json.dumps(left.to_dict())
    assert PriorStudy.from_dict(json.loads(json.dumps(left.to_dict()))) == left


def test_a_study_without_its_baseline_or_with_nothing_beside_it_leaves_nothing() -> None:
    baseline, other = ran(0, 100.0, 1000), ran(1, 150.0, 800, amp="bf16")
    assert PriorStudy.of(facts_of(baseline), [baseline], None, "") is None
    assert PriorStudy.of(facts_of(baseline), [other], None, "") is None
