"""Every technique by name, and configs made of them."""

from __future__ import annotations

import itertools

import pytest

from autotune.errors import ConfigError
from autotune.records.config import ALONE
from autotune.records.device import FP32
from autotune.techniques import Techniques, find_techniques

TECHNIQUES = find_techniques()
arithmetic_of = find_techniques().arithmetic_of
complete = find_techniques().complete
is_ordered = find_techniques().is_ordered
known = find_techniques().known
label_of = find_techniques().label


def test_techniques_stand_in_the_order_in_which_they_are_applied() -> None:
    ranks = [(t.phase, t.order, t.name) for t in TECHNIQUES.values()]
    assert all(one < other for one, other in itertools.pairwise(ranks))


def test_a_script_of_which_the_batch_alone_is_searched_has_none() -> None:
    none = Techniques(())
    config = none.complete({"batch_size": 8}, global_batch=16)
    assert (none.num_shards(config, ALONE), none.arithmetic_of(config)) == (1, FP32)


def test_a_config_names_the_batch_first_and_then_every_technique() -> None:
    assert list(complete({})) == ["batch_size", "accumulation_steps", *TECHNIQUES]


def test_the_batch_is_on_a_scale_and_no_technique() -> None:
    assert is_ordered("batch_size") and is_ordered("accumulation_steps")
    assert not {"batch_size", "accumulation_steps"} & TECHNIQUES.keys()
    assert known("batch_size") == "batch_size"
    with pytest.raises(ConfigError, match="there are: batch_size, accumulation_steps, "):
        known("telepathy")


def test_what_plain_training_is_called_and_what_usually_wins_are_choices() -> None:
    for technique in TECHNIQUES.values():
        assert technique.validate(technique.off) == technique.off
        assert technique.off not in technique.likely
        for choice in (technique.off, *technique.likely):
            assert technique.validate(choice) == choice
            assert technique.label(choice)


def test_a_technique_that_is_not_installed_here_can_still_be_named() -> None:
    assert label_of("naps", True) == "naps" and label_of("naps", False) == "no naps"
    assert label_of("naps", 3) == "naps 3"


def test_a_config_computes_in_the_shortest_type_that_a_technique_chooses() -> None:
    assert arithmetic_of(complete({})) == "fp32"
    assert arithmetic_of(complete({"matmul_precision": "tf32"})) == "tf32"
    assert arithmetic_of(complete({"matmul_precision": "tf32", "amp": "fp16"})) == "fp16"
