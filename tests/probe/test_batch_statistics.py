"""How many samples are compared where a model normalises over them."""

import pytest
import torch
from torch import nn

from autotune.devices import open_device
from autotune.probe.runs import NUM_VALUES, enough_samples
from autotune.task import Task


def task_of(make_model, *shape, allowed=lambda n: True):
    def make_batch(n):
        if not allowed(n):
            raise ValueError("an illegal batch")
        return torch.randn(n, *shape), torch.randint(0, 2, (n,))

    return Task(build_model=make_model, make_batch=make_batch)


def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def vectors():
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def samples(task, most=NUM_VALUES):
    return enough_samples(task, open_device("cpu"), most)


def test_a_few_images_have_enough_values_for_each_channel_and_few_vectors_do_not():
    assert samples(task_of(images, 3, 10, 10)) == 4
    assert samples(task_of(images, 3, 4, 4)) == NUM_VALUES // 4
    assert samples(task_of(vectors, 8)) == NUM_VALUES


@pytest.mark.parametrize("most", [2, 4, 24])
def test_never_more_than_asked_for(most):
    assert samples(task_of(vectors, 8), most) == most


def test_where_so_few_are_an_error_it_stays_at_what_is_asked_for():
    assert samples(task_of(images, 3, 10, 10, allowed=lambda n: n == 24), 24) == 24


def test_a_model_that_normalises_nothing_keeps_what_is_asked_for():
    assert samples(task_of(lambda: nn.Linear(8, 2), 8), 24) == 24
