"""The config dict: complete, validated, and keeping the global batch."""

import json

import pytest

from autotune.errors import ConfigError
from autotune.records.batch_plan import BatchPlan, divisors
from autotune.records.outcome import Kind, Outcome
from autotune.techniques import find_techniques

TECHNIQUES = find_techniques()
complete = find_techniques().complete


def test_what_is_missing_is_off():
    config = complete({"batch_size": 8})
    assert all(config[name] == technique.off for name, technique in TECHNIQUES.items())


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


def test_a_plan_keeps_the_global_batch_exactly():
    assert BatchPlan.keeping(96, 8) == BatchPlan(8, accumulation_steps=12)
    assert BatchPlan(8, accumulation_steps=12).keeps(96) and BatchPlan(8).keeps(None)
    assert not BatchPlan(8, accumulation_steps=3).keeps(96)


def test_divisors_are_exact_and_in_order():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_an_outcome_survives_json_and_ignores_keys_it_does_not_know():
    outcome = Outcome(kind=Kind.OOM, cause="no memory", attempted_bytes=3)
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict() | {"newer": 1}))) == outcome
