"""The config dict: complete, validated, and keeping the global batch, in a world of one process and of several."""

from __future__ import annotations

import json

import pytest

from autotune.errors import ConfigError
from autotune.probe.batch_support import batch_support
from autotune.records.config import ALONE, BatchPlan, ProbeSettings, World, divisors, largest_batch_size, share_of
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.space import build_space
from autotune.techniques import find_techniques
from tests.closed_form import inspection

techniques = find_techniques()
complete = techniques.complete
TWO = World(size=2, rank=1)
SHARDED = World(size=4, data_parallel=2)


def test_all_processes_share_the_samples_unless_stated():
    assert (ALONE.data_parallel, TWO.data_parallel, SHARDED.data_parallel) == (1, 2, 2)
    with pytest.raises(ConfigError, match=r"4 processes does not divide into 3"):
        World(size=4, data_parallel=3)


@pytest.mark.parametrize("world", [TWO, SHARDED])
def test_a_step_takes_the_samples_of_all_that_share_them(world):
    plan = BatchPlan(8, 3, world)
    assert plan.samples_per_step == 48
    assert plan.keeps(48) and plan.keeps(None) and not plan.keeps(24)
    assert BatchPlan.keeping(48, 8, world) == plan
    assert largest_batch_size(20, 48, world) == 12
    with pytest.raises(ConfigError, match=r"does not divide each process's 24 of the global batch 48.*nearest.* is 4"):
        BatchPlan.keeping(48, 5, world)


def test_a_global_batch_that_cannot_be_shared_says_which_can():
    with pytest.raises(ConfigError, match="7 cannot be shared by 2 processes; give --global-batch 6"):
        share_of(7, TWO)


def test_configs_spaces_and_sessions_follow_the_rule_of_their_world():
    config = techniques.complete({"batch_size": 8}, global_batch=48, world=TWO)
    assert config.accumulation_steps == 3 and config.plan_in(TWO).samples_per_step == 48
    with pytest.raises(ConfigError, match=r"batch_size 8 x accumulation_steps 6 x 2 processes is 96 samples"):
        techniques.complete({"batch_size": 8, "accumulation_steps": 6}, global_batch=48, world=TWO)
    support = batch_support(BatchPlan(4, 12, TWO), global_batch=96)
    assert support.sizes == support.accumulation_steps == tuple(divisors(48))
    found = inspection(
        world=TWO, batch=support, baseline=techniques.complete({"batch_size": 4}, global_batch=96, world=TWO).as_dict()
    )
    space, _ = build_space(found, techniques)
    assert {one.samples_per_step for one in space} == {48}
    smaller = space.with_smaller_baseline()
    assert smaller is not None and smaller.baseline.plan_in(TWO).samples_per_step == 96


def test_what_was_kept_before_there_were_worlds_is_of_one_process():
    for record in (Outcome(kind=Kind.OK), ProbeSettings(memory_limit_bytes=None), inspection()):
        old = {name: value for name, value in record.to_dict().items() if name != "world"}
        assert type(record).from_dict(old).world == ALONE
    assert Inspection.from_dict(inspection(world=TWO).to_dict()).world == TWO
    assert World.from_dict({"size": 2, "rank": 1}) == TWO


def test_what_is_missing_is_off():
    config = complete({"batch_size": 8})
    assert all(config[name] == technique.off for name, technique in techniques.items())


def test_a_config_survives_json():
    config = complete({"batch_size": 8, "amp": "bf16"})
    assert complete(json.loads(json.dumps(config.as_dict()))) == config


def test_accumulation_follows_from_the_global_batch():
    assert complete({"batch_size": 8}, global_batch=96).accumulation_steps == 12


def test_a_batch_size_that_does_not_divide_the_global_batch_is_refused_with_the_nearest_that_does():
    with pytest.raises(ConfigError, match="nearest batch_size that does is 6"):
        complete({"batch_size": 7}, global_batch=96)


def test_without_a_batch_size_the_largest_divisor_up_to_32_is_taken():
    assert complete({}, global_batch=100).batch_size == 25


def test_an_unknown_key_is_refused_with_near_names():
    with pytest.raises(ConfigError, match="did you mean batch_size"):
        complete({"batchsize": 8})


@pytest.mark.parametrize(
    ("name", "choice"),
    [("amp", "bf17"), ("batch_size", 0), ("batch_size", "8"), ("batch_size", True), ("channels_last", 1)],
)
def test_an_invalid_choice_is_refused_by_name(name, choice):
    with pytest.raises(ConfigError, match=name):
        complete({name: choice})


def test_differences_name_what_changed():
    assert complete({"batch_size": 8, "amp": "bf16"}).differences(complete({"batch_size": 8})) == {"amp": "bf16"}


def test_a_replaced_key_must_exist():
    with pytest.raises(KeyError):
        complete({"batch_size": 8}).replace(batchsize=4)


@pytest.mark.parametrize(
    ("global_batch", "world", "halves"),
    [(96, ALONE, (12, 8)), (96, TWO, (12, 4)), (48, TWO, (12, 2)), (None, ALONE, (12, 1))],
)
def test_half_a_micro_batch_keeps_the_global_batch(global_batch, world, halves):
    half = complete({"batch_size": 24}, global_batch=global_batch, world=world).halved(global_batch, world)
    assert (half.batch_size, half.accumulation_steps) == halves
    odd = complete({"batch_size": 3}, global_batch=global_batch, world=world).halved(global_batch, world)
    assert odd.batch_size == 1


def test_a_plan_keeps_the_global_batch_exactly():
    assert BatchPlan.keeping(96, 8) == BatchPlan(8, accumulation_steps=12)
    assert BatchPlan(8, accumulation_steps=12).keeps(96) and BatchPlan(8).keeps(None)
    assert not BatchPlan(8, accumulation_steps=3).keeps(96)


def test_divisors_are_exact_and_in_order():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_an_outcome_survives_json_and_ignores_keys_it_does_not_know():
    outcome = Outcome(kind=Kind.OOM, cause="no memory", attempted_bytes=3)
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict() | {"newer": 1}))) == outcome
