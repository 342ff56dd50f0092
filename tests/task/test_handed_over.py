import pytest
import torch
from torch import nn

from autotune.errors import TaskError
from autotune.task import Task
from autotune.task import handed_over as room
from autotune.task.facts import check_task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource


class Tied(nn.Module):
    """A whole table and its first rows, each a parameter, and a buffer that is the table, too."""

    def __init__(self, table):
        super().__init__()
        self.table, self.rows = nn.Parameter(table), nn.Parameter(table[:2])
        self.register_buffer("mirror", table)


def handed_over(tmp_path, **fields):
    return load_source(TaskSource.of(Task(**fields)).hand_over(tmp_path))


def test_each_model_of_captured_tensors_begins_with_what_was_handed_over(tmp_path):
    vectors, backbone = torch.ones(50, 3), nn.BatchNorm1d(3)
    task = handed_over(
        tmp_path,
        build_model=lambda: nn.Sequential(nn.Embedding.from_pretrained(vectors, freeze=False), backbone),
        make_batch=torch.zeros,
    )
    other = load_source(TaskSource.of(task))  # another process's, which reads the same file
    model = task.model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    begins = other.model()
    assert begins[0].weight.eq(1).all() and begins[1].weight.eq(1).all() and begins[1].running_mean.eq(0).all()


def test_what_shares_memory_in_a_model_of_captured_tensors_still_does(tmp_path):
    table = torch.ones(4, 3)
    model = handed_over(tmp_path, build_model=lambda: Tied(table), make_batch=torch.zeros).model()
    assert isinstance(model.table, nn.Parameter) and model.table.requires_grad
    with torch.no_grad():
        model.table.fill_(7)
    assert model.rows.eq(7).all() and model.mirror.eq(7).all()


def test_a_batch_that_is_part_of_a_captured_tensor_can_be_changed_in_place(tmp_path):
    numbers = torch.ones(8, 3)
    task = handed_over(tmp_path, build_model=lambda: nn.Linear(3, 1), make_batch=lambda n: (numbers[:n], "a name"))
    task.batch(4)[0].zero_()
    batch, name = load_source(TaskSource.of(task)).batch(4)
    assert batch.eq(1).all() and name == "a name"


def test_what_a_step_changes_in_place_is_for_no_other_process(tmp_path):
    teacher, bank = torch.zeros(3), [torch.zeros(4, 3)]

    def training_step(model, batch):
        teacher.add_(1)
        bank[0][0] = teacher
        return (model(batch) - teacher - bank[0].mean()).pow(2).mean()

    task = handed_over(
        tmp_path, build_model=lambda: nn.Linear(3, 3), make_batch=torch.ones, training_step=training_step
    )
    model, batch = task.model(), torch.ones(2, 3)
    first, second = task.training_step(model, batch), task.training_step(model, batch)
    other = load_source(TaskSource.of(task)).training_step(model, batch)  # another process's, which reads the same file
    assert first == other != second


MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def test_an_error_of_two_devices_tells_of_what_lay_on_a_gpu(tmp_path, monkeypatch):
    weights = torch.ones(3)

    def training_step(model, batch):
        if weights.device != torch.device("cuda:0"):
            raise RuntimeError(MIXED)

    # a tensor of a GPU is saved with where it was
    monkeypatch.setattr(torch.serialization, "_package_registry", [(1, lambda storage: "cuda:0", None)])
    monkeypatch.setattr(room, "_GPUS", set())
    task = handed_over(
        tmp_path, build_model=lambda: nn.Linear(3, 1), make_batch=torch.ones, training_step=training_step
    )
    with pytest.raises(
        TaskError, match=r"cuda:0 and cpu!; tensors that lie on cuda:0 in the process that built the task .*inside"
    ):
        check_task(task, torch.device("cpu"))
