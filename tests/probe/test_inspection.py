"""What applies to a task: a technique that cannot be tried on it is off, with the reason, and the rest is searched.

The signature of a model is equal for one architecture, whatever its names, values and seeds.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from dataclasses import fields

import pytest
import torch
from torch import nn

from autotune.devices.cpu import CpuDevice
from autotune.errors import TaskError
from autotune.probe.inspection import inspect_task
from autotune.records.config import World
from autotune.records.inspection import Inspection, Layer, LossKind, ModelSignature, Support
from autotune.records.study import SearchFacts
from autotune.study.place import place_of
from autotune.study.reading import load_study
from autotune.study.store import Store
from autotune.task import Task
from autotune.techniques.channels_last import ChannelsLast

torch.set_num_threads(1)


class MixedConvolutions(nn.Module):
    """Convolves images, and owns a five-dimensional parameter, for which there is no channels_last."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.bank = nn.Parameter(torch.ones(1, 1, 1, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(self.convolution(images).mean((2, 3)) * self.bank.flatten())


def on_images():
    return Task(build_model=MixedConvolutions, make_batch=lambda n: (torch.randn(n, 3, 8, 8), torch.randint(3, (n,))))


def inspected(task):
    return inspect_task(task, device="cpu", memory_limit_bytes=None)["support"]


def derivative_fits(model, batch):
    """A loss on the derivative by the input, as in physics-informed networks and energy models."""
    x = batch.requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return nn.functional.mse_loss(slope, x.detach().cos())


def test_a_task_may_find_out_at_inspection_why_its_accumulation_stays():
    asked = []

    def why(model, batch):
        asked.append((type(model), len(batch[0])))
        return "it scales the gradients" if asked[1:] else ""

    task = dataclasses.replace(on_images(), global_batch=12, baseline={"batch_size": 3}, fixed_accumulation=why)
    free, kept = (inspect_task(task, device="cpu", memory_limit_bytes=None) for _ in range(2))
    assert free["batch"]["accumulation_steps"] == (1, 2, 3, 4, 6, 12) and not free["facts"]["warnings"]
    assert kept["batch"]["accumulation_steps"] == (4,)
    assert kept["facts"]["warnings"] == ("the accumulation steps are kept as they are: it scales the gradients",)
    assert asked == [(MixedConvolutions, 2)] * 2


def test_why_the_accumulation_stays_is_told_once_where_the_batch_may_not_be_cut_either():
    why = "it scales the gradients"
    task = dataclasses.replace(
        on_images(), global_batch=12, baseline={"batch_size": 3}, fixed_accumulation=lambda model, batch: why
    )
    found = inspect_task(task, device="cpu", memory_limit_bytes=None, not_compared="memory ran out")
    assert found["batch"]["stays_whole"]
    assert found["facts"]["warnings"] == (f"the accumulation steps are kept as they are: {why}",)


def test_a_training_step_that_takes_derivatives_itself_is_searched():
    task = Task(
        build_model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        make_batch=lambda n: torch.randn(n, 1),
        training_step=derivative_fits,
    )
    support = inspected(task)
    assert len(support["checkpoint_segments"]["choices"]) > 1, support["checkpoint_segments"]


def test_a_model_that_a_technique_cannot_be_tried_on_is_searched_without_it():
    support = inspected(on_images())
    assert support["channels_last"]["choices"] == (False,)
    assert "RuntimeError" in support["channels_last"]["reason"] and "rank 4" in support["channels_last"]["reason"]
    assert len(support["optimizer_impl"]["choices"]) > 1


def test_what_cannot_be_traced_is_found_here_for_the_process_that_searches():
    task = Task(
        build_model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))),
        make_batch=lambda n: (torch.randn(n, 8), torch.randn(n, 8)),
    )
    ((choice, reason),) = inspected(task)["checkpoint_policy"]["untraceable"]
    assert choice == "selective" and "not traced" in reason


@pytest.mark.parametrize("error", [ValueError("not\nthis one"), KeyError("images")])
def test_whatever_a_trial_raises_is_its_reason_in_one_line(monkeypatch, error):
    def support(self, setting):
        raise error

    monkeypatch.setattr(ChannelsLast, "support", support)
    found = inspected(on_images())["channels_last"]
    assert found["choices"] == (False,)
    assert type(error).__name__ in found["reason"] and "\n" not in found["reason"]


@pytest.mark.parametrize("fits_without_activations", [True, False])
def test_a_trial_that_runs_out_of_memory_is_repeated_without_activations(monkeypatch, fits_without_activations):
    def support(self, setting):
        if torch.is_grad_enabled() or not fits_without_activations:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Support(choices=(False, True))

    monkeypatch.setattr(ChannelsLast, "support", support)
    found = inspected(on_images())["channels_last"]
    assert found["choices"] == ((False, True) if fits_without_activations else (False,))
    assert fits_without_activations or "Tried to allocate 2.00 GiB" in found["reason"]


def by_threes(model, batch):
    images, labels = batch
    if len(images) % 3:
        raise ValueError("not a whole number of triplets")
    return nn.functional.cross_entropy(model(images), labels)


def test_a_step_that_needs_batches_divisible_by_three_is_legal():
    task = dataclasses.replace(on_images(), training_step=by_threes, baseline={"batch_size": 6})
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)
    assert (found["step_samples"], found["shortage"]) == (6, "") and found["step_s"] > 0
    assert len(found["support"]["optimizer_impl"]["choices"]) > 1


def test_a_step_that_fails_at_the_baselines_batch_too_is_told_as_it_failed_first():
    task = dataclasses.replace(on_images(), training_step=by_threes, baseline={"batch_size": 4})
    with pytest.raises(TaskError, match="not a whole number of triplets"):
        inspected(task)


@pytest.mark.parametrize(
    ("baseline", "global_batch", "expected"),
    [
        ({"batchsize": 4}, None, ("batchsize", "did you mean batch_size")),
        ({"amp": "bf17"}, None, ("bf17", "amp")),
        ({"batch_size": 5}, 48, ("5 does not divide the global batch 48",)),
        ({"batch_size": 4, "accumulation_steps": 2}, 48, ("8 samples", "48")),
    ],
)
def test_a_baseline_that_is_no_config_of_the_task_is_refused(baseline, global_batch, expected):
    task = dataclasses.replace(on_images(), baseline=baseline, global_batch=global_batch)
    with pytest.raises(TaskError) as caught:
        inspected(task)
    for text in ("the baseline", *expected, "correct"):
        assert text in str(caught.value), str(caught.value)


def test_a_baseline_of_more_samples_than_the_training_set_has_is_refused_at_once():
    three = torch.utils.data.TensorDataset(torch.ones(3, 3, 8, 8), torch.zeros(3, dtype=torch.long))
    task = dataclasses.replace(on_images(), make_batch=None, train_dataset=lambda: three, baseline={"batch_size": 8})
    with pytest.raises(TaskError, match="the training set has 3 samples, fewer than one micro batch; correct BASELINE"):
        inspected(task)


@pytest.mark.parametrize(
    ("baseline", "global_batch", "together", "alone"),
    [
        ({"batch_size": 8}, 32, (8, 2), (8, 4)),
        ({"batch_size": 32}, 32, (16, 1), (32, 1)),  # a process's share is all that it can take
        ({"batch_size": 8, "accumulation_steps": 2, "parallel": "fsdp", "amp": "bf16"}, 32, (8, 2), (8, 4)),
        ({"batch_size": 20}, 32, (16, 1), (16, 2)),
        (None, 32, (16, 1), (32, 1)),
        ({"batch_size": 8}, None, (8, 1), (8, 1)),
    ],
)
def test_what_one_device_would_run_is_the_baseline_with_nothing_that_spreads_the_model(
    baseline, global_batch, together, alone
):
    task = dataclasses.replace(on_images(), baseline=baseline, global_batch=global_batch)
    told = inspect_task(task, device="cpu", memory_limit_bytes=None, world=World(size=2))
    for name, plan in (("baseline", together), ("baseline_alone", alone)):
        assert (told[name]["batch_size"], told[name]["accumulation_steps"]) == plan
    assert told["baseline_alone"]["parallel"] == "ddp"
    assert told["baseline_alone"]["amp"] == (baseline or {}).get("amp", "off")


def test_one_process_has_no_other_baseline_for_one_device():
    assert inspect_task(on_images(), device="cpu", memory_limit_bytes=None)["baseline_alone"] is None


def test_a_technique_that_changes_what_is_learned_is_optional_and_labelled(monkeypatch):
    monkeypatch.setattr(ChannelsLast, "changes_learning", True)
    convolution = dataclasses.replace(
        on_images(), build_model=lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    support = inspected(convolution)["channels_last"]
    assert support["choices"] == (False,) and support["optional"] == (True,)
    assert "changes what is learned" in support["reason"] and "validation" in support["note"]


class Shared(CpuDevice):
    """A device whose memory others hold."""

    def is_crowded(self, attempted_bytes):
        return True


def short_of_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_that_others_hold_the_memory_is_neither_a_shortage_nor_a_reason_against_a_technique(monkeypatch):
    short = dataclasses.replace(on_images(), training_step=short_of_memory)
    assert "2.00 GiB" in inspect_task(short, device="cpu", memory_limit_bytes=None)["shortage"]
    with pytest.raises(torch.OutOfMemoryError):
        inspect_task(short, device=Shared(), memory_limit_bytes=None)
    monkeypatch.setattr(ChannelsLast, "support", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        inspect_task(on_images(), device=Shared(), memory_limit_bytes=None)


def test_a_device_is_described_once_it_is_entered_since_cuda_says_only_then_which_gpu_it_is():
    class Second(CpuDevice):
        entered = False

        def enter(self):
            self.entered = True

        def info(self):
            return dataclasses.replace(super().info(), model="the fastest" if self.entered else "the first on the bus")

    assert inspect_task(on_images(), device=Second(), memory_limit_bytes=None)["device"]["model"] == "the fastest"


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def renamed() -> nn.Module:
    """As `small`, under other names, in another nesting and with other values."""
    torch.manual_seed(7)
    body = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    return nn.Sequential(OrderedDict(entry=nn.Linear(4, 8), act=nn.ReLU(), body=body, head=nn.Linear(8, 3)))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 3))


def classified(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


def signature(build_model, make_batch=classified, **fields) -> ModelSignature:
    task = Task(build_model=build_model, make_batch=make_batch, **fields)
    told = json.loads(json.dumps(inspect_task(task, device="cpu", memory_limit_bytes=None)))
    found = Inspection.from_dict(told).signature
    assert found is not None
    return found


def differing(one: ModelSignature, other: ModelSignature) -> set[str]:
    return {field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)}


def test_models_of_one_architecture_have_one_signature_and_others_differ_by_field() -> None:
    found = signature(small)
    assert found == signature(renamed)
    assert found.layers == (
        Layer(kind="Linear", shapes=((3, 8), (3,)), count=1),
        Layer(kind="Linear", shapes=((8, 4), (8,)), count=1),
        Layer(kind="Linear", shapes=((8, 8), (8,)), count=2),
        Layer(kind="ReLU", shapes=(), count=1),
    )
    assert (found.num_parameters, found.dtypes, found.loss) == (211, ("float32",), LossKind.CROSS_ENTROPY)
    assert differing(found, signature(wider)) == {"layers", "num_parameters"}


def test_a_loss_is_told_by_where_it_comes_from() -> None:
    def regression(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4), torch.randn(size, 3)

    def own(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.l1_loss(model(batch[0]), batch[1])

    found = signature(small)
    assert differing(found, signature(small, regression)) == {"loss"}
    assert signature(small, regression).loss is LossKind.MEAN_SQUARED_ERROR
    assert signature(small, regression, training_step=own).loss is LossKind.OWN


def test_a_study_keeps_the_signature_and_an_older_one_has_none(tmp_path) -> None:
    place, found = place_of(str(tmp_path / "some.db"), None, "some"), signature(small)
    Store(place, SearchFacts(signature=found))
    assert load_study(tmp_path / "some.db").facts.signature == found
    assert SearchFacts.from_dict({"task": "some"}).signature is None
