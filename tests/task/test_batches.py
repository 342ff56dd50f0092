"""Batches of any structure: walked, moved, copied and cut by one rule."""

import dataclasses
import threading
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from autotune.task.batches import (
    CannotCutError,
    StepBatch,
    find_cuts,
    fresh_copy,
    map_tensors,
    num_bytes,
    split,
    tensors,
    to_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "record"
    scale: float = 0.5
    width: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        object.__setattr__(self, "width", self.x.shape[-1])


class Graphs:
    """What torch_geometric's batches are to autotune: a class of its own that moves itself."""

    def __init__(self, samples):
        self.x = torch.ones(3 * samples, 4)
        self.edges = torch.zeros(2, 5 * samples).long()

    def to(self, device):
        self.x, self.edges = self.x.to(device), self.edges.to(device)
        return self


class Silent(Graphs):
    def to(self, device):
        super().to(device)


def ones(samples, *shape):
    return torch.ones(samples, *(shape or (3,)))


def nested(samples, layout):
    return torch.nested.nested_tensor([ones(i % 3 + 1, 4) for i in range(samples)], layout=layout)


STRUCTURES = {
    "tensor": ones,
    "tuple": lambda n: (ones(n), ones(n)),
    "list of two": lambda n: [ones(n), ones(n)],
    "namedtuple": lambda n: Pair(ones(n), ones(n)),
    "nested dicts": lambda n: {"a": ones(n), "b": {"c": [ones(n), None], "name": "text", "rate": 0.5}},
    "OrderedDict": lambda n: OrderedDict(a=ones(n)),
    "UserDict": lambda n: UserDict(a=ones(n)),
    "BatchEncoding": lambda n: BatchEncoding({"input_ids": ones(n).long(), "labels": ones(n)}),
    "dataclass": lambda n: Record(ones(n)),
    "list of images": lambda n: [ones(3, 8 + i, 8) for i in range(n)],
    "images and dicts": lambda n: ([ones(3, 8, 8)] * n, [{"boxes": ones(i + 1, 4), "id": i} for i in range(n)]),
    "transposed by zip": lambda n: tuple(zip(*[(ones(2, 8, 8), {"boxes": ones(1, 4)})] * n, strict=True)),
    "list of dicts": lambda n: [{"image": ones(3, 4 + i, 4), "name": "x"} for i in range(n)],
    "strings": lambda n: {"texts": ["a text"] * n, "y": ones(n)},
    "time first": lambda n: (torch.ones(7, n, 4), torch.ones(7, n)),
    "an array of one number": lambda n: (ones(n), np.array(0.5)),
    "numpy beside it": lambda n: (ones(n), np.arange(n)),
    "nested tensor": lambda n: (nested(n, torch.strided), ones(n)),
    "jagged tensor": lambda n: (nested(n, torch.jagged), ones(n)),
    "sparse": lambda n: (torch.eye(n, 9).to_sparse().coalesce(), ones(n)),
    "shared mask and scalars": lambda n: {
        "x": ones(n),
        "mask": ones(9, 9),
        "scale": torch.tensor(2.0),
        "k": 3,
        "no": None,
    },
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_the_micro_batches_of_every_structure_are_as_if_made_so(make):
    cuts = find_cuts(make(2), make(3), (2, 3))
    micro_batches = split(make(7), cuts, 3)
    assert isinstance(micro_batches, StepBatch) and micro_batches.sizes == [3, 3, 1]
    for micro, size in zip(micro_batches, micro_batches.sizes, strict=True):
        expected = make(size)
        assert type(micro) is type(expected)
        found = [sizes_of(tensor) for tensor in tensors(micro)]
        assert [len(shape) for shape in found] == [len(sizes_of(tensor)) for tensor in tensors(expected)]
    assert sum(t.numel() for m in micro_batches for t in tensors(m)) >= sum(t.numel() for t in tensors(make(7)))


def test_an_object_that_cannot_move_is_copied_too_and_what_cannot_be_copied_stays():
    class Graph:
        def __init__(self):
            self.nodes = torch.ones(2)

    batch = {"graph": Graph(), "lengths": np.ones(2), "lock": threading.Lock()}
    copied = fresh_copy(batch)
    copied["graph"].nodes.zero_()
    copied["lengths"][:] = 0
    assert batch["graph"].nodes.all() and batch["lengths"].all()
    assert copied["lock"] is batch["lock"]


def sizes_of(tensor):
    return [tensor.size(0)] if tensor.is_nested else list(tensor.shape)


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_every_structure_is_walked_copied_and_moved_and_keeps_its_type(make):
    batch = make(4)
    for walked in (map_tensors(lambda tensor: tensor * 2, batch), fresh_copy(batch), to_device(batch, CPU)):
        assert type(walked) is type(batch)
        assert len(list(tensors(walked))) == len(list(tensors(batch))) == len(list(tensors(make(4))))
    copied = fresh_copy(batch)
    for tensor in tensors(copied):
        tensor.zero_()
    assert all(
        bool((tensor if tensor.layout is torch.strided else tensor.values()).any())
        for tensor in tensors(batch)
        if not tensor.is_nested
    )


def test_samples_stay_in_order_and_together():
    x, y = torch.arange(7), [f"sample {i}" for i in range(7)]
    micro_batches = split((x, y), find_cuts((x[:2], y[:2]), (x[:3], y[:3]), (2, 3)), 3)
    assert [micro[0].tolist() for micro in micro_batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [micro[1] for micro in micro_batches] == [y[:3], y[3:6], y[6:]]


def test_a_dataclass_keeps_what_its_constructor_does_not_take():
    doubled = map_tensors(lambda tensor: tensor * 2, Record(ones(4), scale=0.25))
    assert (doubled.scale, doubled.width, doubled.x.sum()) == (0.25, 3, 24)


class Closed(Mapping):
    """A mapping that keeps its parts to itself, with no way to set or copy them."""

    def __init__(self, parts):
        self._parts = dict(parts)

    def __getitem__(self, key):
        return self._parts[key]

    def __iter__(self):
        return iter(self._parts)

    def __len__(self):
        return len(self._parts)


class Settable(Closed):
    def __setitem__(self, key, part):
        self._parts[key] = part


class Made(Settable):
    def __init__(self, samples):
        super().__init__({"x": ones(int(samples))})


@pytest.mark.parametrize(("kind", "cut_to"), [(Closed, Closed), (Settable, Settable), (Made, dict)])
def test_any_mapping_is_cut_and_the_users_own_stays_as_it_was(kind, cut_to):
    batch = Made(4) if kind is Made else kind({"x": ones(4)})
    micro_batches = split(batch, {"x": 0}, 3)
    assert [(type(micro), len(micro["x"])) for micro in micro_batches] == [(cut_to, 3), (cut_to, 1)]
    assert len(batch["x"]) == 4


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_has_the_bytes_of_its_parts(layout):
    tensor = torch.eye(4).to_sparse(layout=layout)
    numbers = 2 * 4 if layout is torch.sparse_coo else 4 + 5
    assert num_bytes(tensor) == 4 * 4 + 8 * numbers
    assert num_bytes(tensor.to_dense()) == 4 * 16


def test_a_batch_that_is_small_enough_is_not_touched():
    batch = (ones(2), ones(2))
    assert split(batch, {0: 0, 1: 0}, 2)[0] is batch


PACKED = {
    "rows packed into one": lambda n: {"tokens": ones(5 * n), "cu_seqlens": torch.arange(n + 1) * 5},
    "PackedSequence": lambda n: pack_sequence([ones(5, 4)] * n),
    "graphs of a class of their own": Graphs,
    "edges": lambda n: (ones(n), torch.zeros(2, 4 * n)),
    "two views of each sample": lambda n: ones(2 * n),
    "a matrix of all pairs": lambda n: (ones(n), torch.eye(n)),
    "the number of samples": lambda n: (ones(n), n),
    "its share in a sum": lambda n: (ones(n), 1 / n),
    "the number of its tokens": lambda n: (ones(n, 5), {"num_items_in_batch": 5 * n}),
    "the number as a tensor": lambda n: (ones(n), torch.tensor(n)),
    "the number as a tensor of one element": lambda n: (ones(n), torch.tensor([n])),
    "the number as an array": lambda n: (ones(n), np.array(n)),
    "an array that grows": lambda n: (ones(n), np.ones((2, 4 * n))),
    "as many items as columns": lambda n: [ones(1)] * (n + 1),
}


@pytest.mark.parametrize("make", PACKED.values(), ids=PACKED)
def test_what_only_its_maker_can_cut_says_so(make):
    with pytest.raises(CannotCutError):
        find_cuts(make(2), make(3), (2, 3))
    assert list(tensors(fresh_copy(make(4)))) and list(tensors(to_device(make(4), CPU)))


def test_a_batch_that_does_not_depend_on_its_size_has_no_cuts():
    assert find_cuts((ones(9), "a", 3), (ones(9), "b", 3), (2, 3)) is None


@pytest.mark.parametrize("graphs", [Graphs, Silent])
def test_an_object_that_can_move_moves_itself_and_the_original_stays(graphs):
    batch = {"graphs": graphs(2), "y": ones(2)}
    moved = to_device(batch, META)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert {tensor.device for tensor in tensors(batch)} == {CPU}


@pytest.mark.parametrize(
    ("batch", "holds"),
    [((ones(4),), "a tuple without 1"), ((ones(4), ones(5)), "parts of 4 and 5 samples"), ((ones(4), "text"), "a str")],
)
def test_a_batch_unlike_the_tasks_own_is_not_cut(batch, holds):
    with pytest.raises(CannotCutError, match=holds):
        split(batch, {0: 0, 1: 0}, 2)
