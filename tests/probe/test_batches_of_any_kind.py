"""Batches of any structure through everything that treats them: facts, inspection, training, checks, tracing."""

import dataclasses

import pytest
import torch

from autotune.devices import open_device
from autotune.errors import TaskError
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import plan_traces
from autotune.probe.checks import run_checks
from autotune.probe.inspection import inspect_task
from autotune.probe.measure import Run
from autotune.records.config import ProbeSettings
from autotune.session import prepare
from autotune.task.batches import StepBatch
from autotune.techniques import find_techniques
from tests.batches_of_any_kind import BELIEVED, CUT, TASKS

techniques = find_techniques()

torch.set_num_threads(1)
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
believed = pytest.mark.parametrize("task", BELIEVED.values(), ids=BELIEVED)


@every_task
def test_a_task_is_inspected_and_its_small_batch_is_known(task):
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)
    assert (
        found["facts"]["batch"] and found["facts"] == inspect_task(task, device="cpu", memory_limit_bytes=None)["facts"]
    )


def test_lists_of_images_are_offered_the_layout_of_images():
    found = inspect_task(TASKS["lists of images and dicts"], device="cpu", memory_limit_bytes=None)
    assert found["support"]["channels_last"]["choices"] == (False, True)


@every_task
def test_a_probe_measures_it_also_where_it_accumulates(task):
    device = open_device("cpu")
    session = prepare(task, {"batch_size": 4, "accumulation_steps": 2}, device=device)
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.05, max_warmup_s=0.05)
    assert Run(session, device, settings, lambda progress: None).measure(0.0).samples_per_s > 0


@pytest.mark.parametrize("kind", TASKS)
def test_its_memory_is_traced_unless_its_shapes_are_values(kind):
    configs = [techniques.complete({"batch_size": size}) for size in (4, 8)]
    messages = list(trace_plan(TASKS[kind], plan_traces(configs, find_techniques()), "cpu"))
    failures = [message["traces"]["failures"] for message in messages if message.get("traces", {}).get("failures")]
    assert bool(failures) == (kind in ("jagged", "nested", "PackedSequence"))  # learned from probes


@pytest.mark.parametrize("task", CUT.values(), ids=CUT)
def test_its_accumulated_gradients_are_those_of_the_whole_batch(task):
    check = run_checks(task, {"accumulation_steps": 2}, "cpu", batch_size=6)
    assert check.passed, check.reason


@believed
def test_a_check_compares_the_techniques_where_micro_batches_cannot_be_cut(task):
    check = run_checks(task, {"accumulation_steps": 2, "optimizer_impl": "foreach"}, "cpu", batch_size=6)
    assert check.passed and "accumulation is not compared" in check.reason


@believed
def test_a_foreign_batch_that_cannot_be_cut_is_refused_with_the_way_out(task):
    session = prepare(task, {"batch_size": 2, "accumulation_steps": 2}, device="cpu")
    with pytest.raises(TaskError, match="cannot be cut into 2 micro batches") as caught:
        session.step(task.batch(4))
    assert "session.loader" in str(caught.value) and "StepBatch" in str(caught.value)
    assert session.step(StepBatch((task.batch(2), 2) for _ in range(2))).isfinite()
    assert session.step(next(iter(session.loader))).isfinite()


@believed
def test_one_that_cannot_be_cut_is_a_step_of_its_own_where_nothing_accumulates(task):
    assert prepare(task, {"batch_size": 2}, device="cpu").step(task.batch(7)).isfinite()


def test_graphs_are_weighted_by_their_number_also_in_an_incomplete_last_step():
    task = dataclasses.replace(BELIEVED["graphs"], train_dataset=lambda: graphs_of(7))
    session = prepare(task, {"batch_size": 4, "accumulation_steps": 2}, device="cpu")
    steps = list(session.loader)
    assert [step.sizes for step in steps] == [[4, 3]]
    y = torch.cat([micro.y for micro in steps[0]])
    with torch.no_grad():
        outputs = torch.cat([session.model(micro) for micro in steps[0]])
    torch.testing.assert_close(session.accumulate(steps[0]), torch.nn.functional.mse_loss(outputs, y))


def graphs_of(number):
    return BELIEVED["graphs"].train_dataset()[:number]
