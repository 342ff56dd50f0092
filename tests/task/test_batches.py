import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from autotune.task.batches import StepBatch, map_tensors, num_samples, split, tensors


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str = "record"


def ones(samples):
    return torch.ones(samples, 3)


@pytest.mark.parametrize(
    "batch",
    [
        ones(4),
        (ones(4), ones(4)),
        [ones(4), "text"],
        Pair(ones(4), ones(4)),
        {"a": ones(4), "b": [ones(4), None]},
        OrderedDict(a=ones(4)),
        Record(ones(4)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_structure_is_walked_and_keeps_its_type(batch):
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert type(doubled) is type(batch)
    assert all(torch.equal(tensor, ones(4) * 2) for tensor in tensors(doubled))
    assert len(list(tensors(doubled))) == len(list(tensors(batch))) > 0
    assert num_samples(batch) == 4


def test_what_is_no_tensor_stays():
    assert map_tensors(torch.neg, {"names": ["a", "b"], "x": ones(1)})["names"] == ["a", "b"]


def test_a_batch_is_cut_into_micro_batches_the_last_of_which_may_be_smaller():
    micro_batches = split((torch.arange(7), ones(7)), 3)
    assert isinstance(micro_batches, StepBatch)
    assert [micro[0].tolist() for micro in micro_batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(micro[1]) for micro in micro_batches] == [3, 3, 1]


def test_tensors_without_a_sample_dimension_go_to_every_micro_batch_whole():
    micro_batches = split({"x": ones(4), "mask": torch.ones(9, 9), "scale": torch.tensor(2.0)}, 2)
    assert all(micro["mask"].shape == (9, 9) and micro["scale"].dim() == 0 for micro in micro_batches)


def test_a_batch_that_is_small_enough_is_not_touched():
    batch = (ones(2), ones(2))
    assert split(batch, 2)[0] is batch


def test_a_batch_without_samples_is_an_error():
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        num_samples({"x": torch.tensor(1.0)})
