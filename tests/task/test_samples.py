from dataclasses import dataclass

import numpy
import pytest
import torch

from autotune.task import samples


@dataclass
class Pair:
    x: torch.Tensor
    label: int


@pytest.mark.parametrize(
    ("sample", "width"),
    [
        (torch.zeros(3, 4), 12),
        (numpy.zeros((3, 4)), 12),
        (numpy.float32(1), 1),
        ((torch.zeros(5), 1), 6),
        ({"ids": [1, 2, 3], "text": "four"}, 7),
        (Pair(torch.zeros(5), 1), 6),
        (None, 1),
    ],
)
def test_the_width_of_a_sample_is_its_number_of_elements(sample, width):
    assert samples.width(sample) == width


def test_at_most_512_samples_are_looked_at_the_same_ones_each_time():
    dataset = [torch.zeros(i % 700) for i in range(2000)]
    found, whole = samples.widest_first(dataset)
    assert not whole
    assert len(found) == len(set(found)) == 512
    assert found == samples.widest_first(dataset).positions
    widths = [len(dataset[position]) for position in found]
    assert widths == sorted(widths, reverse=True)


def test_looking_stops_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(samples, "MAX_SAMPLING_S", 0.0)
    found, whole = samples.widest_first([torch.zeros(2)] * 100)
    assert len(found) == 1 and not whole


def test_a_batch_larger_than_the_sample_repeats_the_widest():
    taken = samples.widest_samples([10, 11, 12, 13], (3, 2), 4)
    assert taken == [13, 12, 13, 12]
