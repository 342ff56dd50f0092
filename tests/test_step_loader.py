"""Optimizer steps from a training set, and without one."""

import pytest
import torch

from autotune import prepare
from autotune.task.batches import StepBatch
from tests.test_session import task_of


class Plain(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 3)


class Numbers(torch.utils.data.Dataset):
    """Sample i is filled with i; there are 22 of them."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 3


def test_the_loader_groups_micro_batches_and_ends_with_what_is_left():
    session = prepare(task_of(train_dataset=Numbers), {"batch_size": 4, "accumulation_steps": 2}, device="cpu")
    groups = list(session.loader)
    assert all(isinstance(group, StepBatch) for group in groups)
    assert [[len(micro[1]) for micro in group] for group in groups] == [[4, 4], [4, 4], [4, 2]]
    assert sorted(int(x) for group in groups for micro in group for x in micro[0][:, 0]) == list(range(22))
    assert len(session.loader) == 3


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize(("build_model", "lengths"), [(Normalised, [7, 7, 7]), (Plain, [7, 7, 7, 1])])
def test_a_sample_that_would_be_normalised_alone_is_left_out_of_the_pass_and_it_is_said_once(
    caplog, build_model, lengths
):
    session = prepare(task_of(build_model=build_model, train_dataset=Numbers), {"batch_size": 7}, device="cpu")
    for _ in range(2):
        assert [len(micro[1]) for group in session.loader for micro in group] == lengths
        assert all(session.step(batch).isfinite() for batch in session.loader)
    assert len(session.loader) == len(lengths)
    assert sum("leaves one sample out" in record.message for record in caplog.records) == (build_model is Normalised)


def test_without_a_dataset_the_loader_makes_batches_without_end():
    session = prepare(task_of(), {"batch_size": 4, "accumulation_steps": 2}, device="cpu")
    loader = iter(session.loader)
    assert [[len(micro[1]) for micro in next(loader)] for _ in range(5)] == [[4, 4]] * 5
    with pytest.raises(TypeError, match="without end"):
        len(session.loader)


def test_what_the_loader_yields_can_be_stepped_on():
    session = prepare(task_of(train_dataset=Numbers), {"batch_size": 4, "accumulation_steps": 2}, device="cpu")
    assert all(session.step(batch).isfinite() for batch in session.loader)
