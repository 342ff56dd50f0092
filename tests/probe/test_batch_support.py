"""Which micro batches and accumulation steps are searched for a task."""

import itertools

import pytest
from torch import nn

from autotune.errors import ConfigError
from autotune.probe.batch_support import batch_support, fine_sizes
from autotune.records.check import Coupling, Verdict
from autotune.records.config import BatchPlan, World
from autotune.task.facts import uses_batch_statistics
from autotune.techniques import find_techniques

validate = find_techniques().validate


def linear() -> nn.Module:
    return nn.Linear(8, 4)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def support_of(model=None, batch_size=32, *, global_batch=None, dataset_size=None):
    plan = BatchPlan(batch_size) if global_batch is None else BatchPlan.keeping(global_batch, batch_size)
    normalises = uses_batch_statistics(model or linear())
    return batch_support(plan, global_batch=global_batch, dataset_size=dataset_size, normalises=normalises)


def test_a_global_batch_gives_its_exact_divisors():
    assert support_of(global_batch=96).sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)


def test_divisors_larger_than_the_dataset_are_left_out_with_the_reason():
    support = support_of(global_batch=96, dataset_size=50)
    assert support.sizes[-1] == 48
    assert "50 samples" in support.sizes_reason


def test_without_a_global_batch_steps_are_fine_and_reach_far_around_the_baseline():
    sizes = support_of(batch_size=32).sizes
    assert sizes[0] == 2 and sizes[-1] == 2048
    assert all(b / a <= 4 / 3 for a, b in itertools.pairwise(sizes) if a >= 3)


def test_the_baseline_is_always_a_choice():
    assert 37 in support_of(batch_size=37).sizes


def test_sizes_from_32_on_are_multiples_of_8():
    sizes = fine_sizes(5000)
    assert sizes[:15] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48]
    assert all(size % 8 == 0 for size in sizes if size >= 24)


@pytest.mark.parametrize("choice", [0, -1, True, 2.0, "8", None])
def test_what_is_not_a_positive_integer_is_refused(choice):
    with pytest.raises(ConfigError, match="at least 1"):
        validate("batch_size", choice)


def test_steps_follow_from_the_global_batch():
    support = support_of(global_batch=12, batch_size=12)
    assert support.accumulation_steps == (1, 2, 3, 4, 6, 12)
    assert support.optional_accumulation_steps == ()


def test_without_a_global_batch_there_is_one_step():
    assert support_of().accumulation_steps == (1,)


def test_with_batch_norm_accumulating_more_than_the_baseline_has_to_be_asked_for():
    support = support_of(with_batch_norm(), 6, global_batch=12)
    assert support.accumulation_steps == (1, 2)
    assert support.optional_accumulation_steps == (3, 4, 6, 12)
    assert "batch normalisation" in support.reason and "batch normalisation" in support.note


def test_where_accumulating_is_part_of_what_is_learned_the_baselines_steps_are_kept():
    support = batch_support(BatchPlan(3, 4), global_batch=12, fixed_accumulation="it scales the gradients")
    assert support.accumulation_steps == (4,) and support.optional_accumulation_steps == (1, 2, 3, 6, 12)
    assert support.reason == "it scales the gradients"


COUPLED = Coupling(verdict=Verdict.COUPLED, reason="it couples", remedy="{include} allows others")
UNKNOWN = Coupling(verdict=Verdict.UNKNOWN, reason="nobody knows", remedy="{include} allows others")


def test_where_the_loss_couples_samples_the_baselines_micro_batch_is_kept():
    support = batch_support(BatchPlan(3, 4), global_batch=12, coupling=COUPLED)
    assert support.accumulation_steps == (4,) and support.optional_accumulation_steps == (1, 2, 3, 6, 12)
    assert "it couples; what you run today cuts it into 4 micro batches of 3" in support.reason
    assert "--include accumulation_steps" in support.reason
    assert support.stays_whole and "it couples" in support.note


def test_where_nobody_knows_the_batch_is_not_cut_further_than_in_the_baseline():
    support = batch_support(BatchPlan(3, 4), global_batch=12, coupling=UNKNOWN)
    assert support.accumulation_steps == (1, 2, 3, 4) and support.optional_accumulation_steps == (6, 12)
    assert support.stays_whole and "nobody knows" in support.reason


def test_where_processes_share_a_batch_whose_samples_a_loss_couples_it_is_told_over_which_of_them():
    support = batch_support(BatchPlan(6, world=World(size=2)), global_batch=12, coupling=COUPLED)
    assert support.accumulation_steps == (1,) and support.stays_whole
    assert "its 6 samples of a step in one micro batch; its loss is over these, and not over all 12" in support.reason


def test_without_a_global_batch_only_a_loss_that_couples_samples_keeps_the_batch():
    support = batch_support(BatchPlan(32), global_batch=None, coupling=COUPLED)
    assert support.sizes == (32,) and len(support.optional_sizes) > 9 and "--include batch_size" in support.sizes_reason
    assert batch_support(BatchPlan(32), global_batch=None, coupling=UNKNOWN) == support_of(batch_size=32)


def test_where_the_loss_may_be_cut_nothing_changes():
    free = Coupling(verdict=Verdict.SEPARABLE)
    assert batch_support(BatchPlan(12), global_batch=12, coupling=free) == support_of(global_batch=12, batch_size=12)


def test_a_loss_that_couples_samples_behind_batch_norm_says_so():
    support = batch_support(BatchPlan(12), global_batch=12, normalises=True, coupling=COUPLED)
    assert "it couples" in support.reason and "normalisation" not in support.reason


def test_frozen_batch_norm_does_not_mind():
    model = with_batch_norm()
    model[1].eval()
    assert support_of(model, 12, global_batch=12).optional_accumulation_steps == ()


def test_layer_norm_does_not_mind():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    assert support_of(model, 4, global_batch=4).optional_accumulation_steps == ()


def test_what_each_micro_batch_changes_is_noted_beside_batch_norm():
    for normalises in (False, True):
        found = batch_support(BatchPlan(8, 2), global_batch=16, normalises=normalises, moved="teacher.weight")
        assert "each forward pass of your training code changes teacher.weight" in found.note
        assert "--fix accumulation_steps=2" in found.note
        assert ("batch normalisation sees one micro batch at a time" in found.note) is normalises
    assert not batch_support(BatchPlan(16), global_batch=None, moved="teacher.weight").note  # a step takes one batch
