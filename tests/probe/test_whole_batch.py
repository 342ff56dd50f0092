"""What an inspection makes of a loss that couples the samples of a batch."""

import traceback

import pytest
import torch
from torch import nn

from autotune.probe.inspection import inspect_task
from autotune.records.inspection import Inspection
from autotune.task import Task
from tests.coupling.losses import WIDTH, cross_entropy, encoder, info_nce, labelled, views

torch.set_num_threads(1)


def inspected(step=info_nce, make_batch=views, *, comparing_s=9.0, **fields):
    usual = {"build_model": encoder, "global_batch": 96}
    task = Task(**{**usual, "training_step": step, "make_batch": make_batch, **fields})
    found = inspect_task(task, device="cpu", memory_limit_bytes=None, comparing_s=comparing_s)
    return Inspection.from_dict(found)


def plan(inspection):
    return inspection.baseline["batch_size"], inspection.baseline["accumulation_steps"]


def test_the_baseline_is_the_whole_global_batch_unless_the_user_says_how_it_is_cut():
    assert plan(inspected()) == (96, 1)
    assert plan(inspected(baseline={"batch_size": 16})) == (16, 6)
    assert plan(inspected(baseline={"amp": "bf16"})) == (96, 1)
    assert plan(inspected(cross_entropy, labelled)) == (32, 3)


def test_it_is_told_in_every_answer():
    assert any("couples the samples" in warning for warning in inspected().facts.warnings)
    assert not inspected(cross_entropy, labelled).facts.warnings


def test_it_is_not_looked_into_where_nobody_asks_or_a_step_is_one_unit():
    assert inspected(comparing_s=0.0).coupling is None and plan(inspected(comparing_s=0.0)) == (32, 3)
    whole = inspected(None, train_step=lambda model, optimizer, batch: info_nce(model, batch).backward())
    assert whole.coupling is None


@pytest.mark.parametrize(("step", "make_batch"), [(cross_entropy, labelled), (info_nce, views)])
@pytest.mark.parametrize("global_batch", [96, None])
def test_what_passes_move_is_looked_at_where_the_batch_may_be_cut_once_the_comparison_is_told(
    step, make_batch, global_batch
):
    stages, stage = [], [""]

    def traced(model, batch):
        if any(frame.name == "moved_by_passes" for frame in traceback.extract_stack()):
            stages.append(stage[0])
        return step(model, batch)

    task = Task(build_model=encoder, training_step=traced, make_batch=make_batch, global_batch=global_batch)
    told = {"report": lambda progress: stage.__setitem__(0, progress.stage)}
    inspect_task(task, device="cpu", memory_limit_bytes=None, comparing_s=9.0, **told)
    assert stages == (["setup", "setup"] if step is cross_entropy and global_batch else [])


def test_batch_norm_keeps_its_own_sentence_unless_the_loss_couples_samples_too():
    def normalised():
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

    plain = inspected(cross_entropy, labelled, build_model=normalised)
    assert "batch normalisation" in plain.batch.reason and plan(plain) == (32, 3)
    both = inspected(build_model=normalised)
    assert "couples the samples" in both.batch.reason and plan(both) == (96, 1)


@pytest.mark.parametrize("number", [40, 400])
def test_a_training_set_that_is_smaller_than_the_global_batch_bounds_what_is_compared(number):
    samples = [tuple(view[0] for view in views(1)) for _ in range(number)]
    found = inspected(make_batch=None, train_dataset=lambda: samples)
    assert found.coupling.verdict == "coupled" and plan(found) == ((96, 1) if number == 400 else (32, 3))
