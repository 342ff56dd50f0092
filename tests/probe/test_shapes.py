import random

import pytest
import torch

from autotune.probe.shapes import Shapes


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


def test_where_every_shape_was_seen_often_none_is_to_come():
    assert drawn(20, 1000).num_expected() == 20
    assert Shapes().num_expected() == 0


@pytest.mark.parametrize("num_batches", [50, 100, 300])
def test_how_many_shapes_there_are_is_estimated_from_those_seen_once_and_twice(num_batches):
    found = [drawn(100, num_batches, seed) for seed in range(20)]
    assert sum(one.num_expected() for one in found) / len(found) == pytest.approx(100, rel=0.15)
    assert all(one.num_seen <= one.num_expected() for one in found)
