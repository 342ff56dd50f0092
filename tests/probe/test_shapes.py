import random

import numpy as np
import pytest
import torch

from autotune.probe.shapes import NUM_LEAVES, Held, Shapes, growth_per_shape, growth_where_it_grows
from autotune.units import MIB
from tests.batches_of_any_kind import Clip, Graphs


def drawn(num_lengths, num_batches, seed=0):
    """Micro batches of equally likely lengths."""
    draw, shapes = random.Random(seed), Shapes()
    for _ in range(num_batches):
        shapes.note({"text": torch.empty(2, draw.randrange(num_lengths)), "labels": [torch.empty(2)], "name": "x"})
    return shapes


def test_a_shape_is_that_of_every_tensor_in_the_batch():
    shapes = Shapes()
    for width, height in ((1, 1), (1, 2), (2, 1), (1, 1)):
        shapes.note((torch.empty(width, 3), {"target": torch.empty(height)}))
    assert shapes.num_seen == 3
    assert drawn(20, 1000).num_seen == 20


@pytest.mark.parametrize(
    "made",
    [
        lambda width: Clip(torch.empty(2, width), torch.empty(2)),
        lambda width: Graphs([(torch.empty(width, 4), torch.empty(()))]),
        lambda width: {"lines": np.zeros((2, width)), "text": "x"},
        lambda width: torch.nested.nested_tensor([torch.zeros(width, 3), torch.zeros(2, 3)]),
        lambda width: torch.nested.nested_tensor([torch.zeros(width, 3), torch.zeros(2, 3)], layout=torch.jagged),
    ],
)
def test_whatever_the_batch_is(made):
    shapes = Shapes()
    assert [shapes.note(made(width)) for width in (3, 4, 3)] == [True, True, False]


class Counted(list):
    """A list that knows how many of its elements were looked at."""

    num_seen = 0

    def __iter__(self):
        for element in super().__iter__():
            self.num_seen += 1
            yield element


def test_of_a_long_list_its_first_elements_are_looked_at():
    numbers = Counted(range(10_000))
    Shapes().note({"labels": numbers})
    assert numbers.num_seen <= NUM_LEAVES + 1


def test_a_batch_that_was_not_drawn_shows_that_shapes_differ_and_not_how_many_there_are():
    shapes = drawn(1, 5)
    assert not shapes.are_several
    shapes.note_chosen({"text": torch.empty(2, 30), "labels": [torch.empty(2)], "name": "x"})
    assert shapes.are_several and shapes.num_seen == 1 == shapes.num_expected()


def test_where_every_shape_was_seen_often_none_is_to_come():
    assert drawn(20, 1000).num_expected() == 20
    assert Shapes().num_expected() == 0


@pytest.mark.parametrize("num_batches", [50, 100, 300])
def test_how_many_shapes_there_are_is_estimated_from_those_seen_once_and_twice(num_batches):
    found = [drawn(100, num_batches, seed) for seed in range(20)]
    assert sum(one.num_expected() for one in found) / len(found) == pytest.approx(100, rel=0.15)
    assert all(one.num_seen <= one.num_expected() for one in found)


def held(num_steps, total_bytes):
    """What is held after each step, where each step's batch has a new shape."""
    return [Held(step, 2**30 + round(total_bytes(step))) for step in range(1, num_steps + 1)]


def met(lengths, total_bytes):
    """What is held after batches of such lengths, where it depends on those that occurred."""
    for step in range(1, len(lengths) + 1):
        so_far = lengths[:step]
        yield Held(len(set(so_far)), 2**30 + round(total_bytes(so_far)))


def test_one_wide_batch_makes_no_growth():
    assert growth_per_shape(held(16, lambda step: 100 * MIB * (step > 10))) == 0


@pytest.mark.parametrize("num_batches", [12, 30, 2000])
def test_what_is_cached_for_each_new_shape_is_told_however_many_batches_have_an_old_one(num_batches):
    draw = random.Random(0)
    lengths = [draw.randrange(3 * num_batches) for _ in range(num_batches)]
    found = growth_per_shape([*met(lengths, lambda so_far: 20 * MIB * len(set(so_far)))])
    assert found == pytest.approx(20 * MIB, rel=0.01)


def test_what_a_heap_takes_for_each_shape_is_no_growth_where_it_is_less_than_any_kernel():
    assert growth_per_shape(held(30, lambda step: step * 0.1 * MIB)) == 0
    assert growth_per_shape(held(30, lambda step: step * 0.3 * MIB)) == pytest.approx(0.3 * MIB, rel=0.01)


def test_what_an_allocator_takes_and_gives_back_is_no_growth():
    draw = random.Random(0)
    found = [growth_per_shape(held(14, lambda step: draw.uniform(0, 200) * MIB)) for _ in range(300)]
    assert sum(map(bool, found)) <= 6


def test_growth_that_has_ended_is_not_extrapolated():
    for num_steps in (15, 30, 60):
        ended = held(num_steps, lambda step, last=0.7 * num_steps: 20 * MIB * min(step, last))
        assert growth_per_shape(ended) == 0


def test_what_wider_and_wider_batches_take_is_seldom_growth():
    draw = random.Random(0)

    def widest():
        so_far = 0.0
        for step in range(1, 16):
            so_far = max(so_far, draw.gauss(0, 50))
            yield Held(step, 2**30 + round(so_far * MIB))

    assert sum(bool(growth_per_shape([*widest()])) for _ in range(300)) <= 15


def test_too_few_batches_tell_no_growth_unless_it_is_known_to_be_one():
    assert growth_per_shape([]) is None is growth_per_shape(held(6, lambda step: step * 50 * MIB))
    assert growth_where_it_grows(held(4, lambda step: step * 50 * MIB)) == 50 * MIB
    assert growth_where_it_grows([]) == 0 == growth_where_it_grows([Held(1, 5), Held(1, 9)])


@pytest.mark.parametrize(("num_lengths", "num_batches", "recur"), [(10, 40, True), (1000, 40, False), (1000, 4, False)])
def test_shapes_recur_once_some_have_come_again_unless_too_many_were_seen_only_once(num_lengths, num_batches, recur):
    shapes, chance = Shapes(), random.Random(0)
    for _ in range(num_batches):
        shapes.note(torch.ones(1, chance.randrange(1, 1 + num_lengths)))
    assert shapes.recur == recur


def test_what_is_kept_is_told_from_a_few_shapes_where_old_ones_take_nothing():
    few = [Held(num, 2**30 + 20 * MIB * num) for num in (1, 1, 2, 2, 5, 7, 7, 8, 9, 9)]
    assert growth_per_shape(few) == pytest.approx(20 * MIB)
    assert growth_per_shape(few[:6]) is None


def test_batches_of_old_shapes_make_no_trend_of_one_jump():
    jump = [Held(num, 2**30 + 50 * MIB * (num > 3)) for num in (1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4)]
    assert not growth_per_shape(jump)


def test_what_fluctuates_between_batches_of_old_shapes_hides_no_growth():
    draw = random.Random(0)
    numbers = [1 + place // 12 for place in range(120)]
    noisy = [Held(num, 2**30 + round(MIB * (18 * num + draw.uniform(-2, 2)))) for num in numbers]
    assert growth_per_shape(noisy) == pytest.approx(18 * MIB, rel=0.1)


def test_shapes_that_were_not_drawn_are_trained_and_say_nothing_of_how_many_come():
    shapes = drawn(3, 50)
    shapes.note_chosen({"text": torch.empty(2, 30), "labels": [torch.empty(2)], "name": "x"})
    assert (shapes.num_seen, shapes.num_trained) == (3, 4)
