"""A loss that couples the samples of a batch is told from one that does not: a table of losses and verdicts."""

import math
import time
from collections import UserDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autotune.coupling.compare import find_coupling
from autotune.coupling.samples import SamplesOf, TypicalSamples
from autotune.devices import open_device
from autotune.devices.cpu import CpuDevice
from autotune.records.check import Cause, Verdict
from autotune.task import Task
from tests.coupling import losses
from tests.coupling.losses import CLASSES, WIDTH, cross_entropy, encoder, info_nce, simclr, task_of, views

torch.set_num_threads(1)
WHOLE = 48


def found(task, *, most=WHOLE, seconds=60.0, model=None, device=None, samples=None, **known):
    torch.manual_seed(0)
    model = model or task.model()
    samples = samples or TypicalSamples(task)
    return find_coupling(task, model, device or open_device("cpu"), samples, most=most, seconds=seconds, **known)


@pytest.mark.parametrize("name", losses.SEPARABLE)
def test_a_mean_over_samples_may_be_cut(name):
    result = found(losses.SEPARABLE[name])
    assert (result.verdict, result.num_samples, result.reason) == (Verdict.SEPARABLE, WHOLE, "")


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        (cause, name)
        for cause, tasks in (
            (Cause.SAMPLES, losses.COUPLED),
            (Cause.PARTNERS, losses.PARTNERS),
            (Cause.STATE, losses.STATE),
            (Cause.WEIGHTS, losses.WEIGHTS),
            (Cause.SCALE, losses.SCALE),
        )
        for name in tasks
    ],
)
def test_every_other_loss_is_not_and_it_is_said_why(cause, name):
    tasks = {**losses.COUPLED, **losses.PARTNERS, **losses.STATE, **losses.WEIGHTS, **losses.SCALE}
    result = found(tasks[name])
    assert (result.verdict, result.cause) == (Verdict.COUPLED, cause), result
    assert result.reason and "{include}" in result.remedy


@pytest.mark.parametrize("name", losses.STATE)
def test_the_model_and_everything_random_are_left_as_they_were(name):
    task = losses.STATE[name]
    model = task.model()
    model.add_module("norm", nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_passes = getattr(model, "num_passes", None)
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = np.random.get_state()[2]
    find_coupling(task, model, open_device("cpu"), TypicalSamples(task), most=8, seconds=9)
    assert torch.equal(torch.get_rng_state(), state) and np.random.get_state()[2] == drawn
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()] and num_passes == getattr(model, "num_passes", None)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_counter_is_named_as_what_changes():
    assert "model's num_passes," in found(losses.STATE["divergence annealed over few passes"]).reason


def test_batch_statistics_of_the_model_are_left_as_they_were():
    model = losses.Normalised()
    task = losses.SEPARABLE["batch normalisation"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert found(task, model=model).may_be_cut
    norm = model.layers[1]
    assert norm.training and norm.momentum == 0.1 and norm.track_running_stats
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_samples_of_a_training_set_are_drawn_from_all_of_it():
    """Ordered by class, as many are on disk: the first ones have no negatives."""

    def step(model, batch):
        z, y = model(batch[0]), batch[1]
        far = torch.cdist(z, z)
        return (1 - far[y[:, None] != y]).relu().sum() / len(z) + F.cross_entropy(z, y)

    points = [(torch.randn(WIDTH) / 9, torch.tensor(position // 200)) for position in range(1000)]
    task = Task(build_model=encoder, train_dataset=lambda: points, training_step=step)
    assert found(task).cause is Cause.SAMPLES


def packed(samples):
    """One long row, as packed sentences are."""
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"tokens": torch.cat(samples), "ends": lengths.cumsum(0)}


def packed_step(model, batch):
    means = [part.mean(0) for part in torch.tensor_split(model(batch["tokens"]), batch["ends"][:-1])]
    return torch.stack(means).pow(2).mean()


def packed_contrastive(model, batch):
    means = torch.stack([part.mean(0) for part in torch.tensor_split(model(batch["tokens"]), batch["ends"][:-1])])
    return F.cross_entropy(means @ means.T, torch.arange(len(means)))


@pytest.mark.parametrize(("step", "verdict"), [(packed_step, "separable"), (packed_contrastive, "coupled")])
def test_what_only_the_collate_function_can_make_smaller_is_collated_anew(step, verdict):
    rows = [torch.randn(2 + position % 3, WIDTH) for position in range(100)]
    task = Task(build_model=encoder, train_dataset=lambda: rows, collate_fn=packed, training_step=step)
    assert found(task).verdict == verdict


class Backwards(nn.Module):
    """Reads padded rows from their end too, so that padding comes before what is read."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, rows):
        return self.head(self.rnn(rows)[0][:, 0])


def padded(samples):
    """Rows padded to the longest, in the order of their lengths, and a row of all their ends."""
    samples = sorted(samples, key=len)
    ends = torch.tensor([len(sample) for sample in samples]).cumsum(0)
    return {"rows": nn.utils.rnn.pad_sequence(samples, batch_first=True), "last": ends[-1:], "ends": ends}


@pytest.mark.parametrize(
    ("couples", "cause"),
    [
        (lambda z: F.cross_entropy(z, torch.ones(len(z)).long()), Cause.PADDING),
        (lambda z: torch.cov(z.T).triu(1).pow(2).sum() + z.pow(2).mean(), Cause.SAMPLES),
    ],
)
def test_padding_that_reaches_the_loss_is_told_from_samples_that_do(couples, cause):
    rows = [torch.randn(2 + position % 5, WIDTH) for position in range(100)]
    task = Task(
        build_model=Backwards,
        train_dataset=lambda: rows,
        collate_fn=padded,
        training_step=lambda model, batch: couples(model(batch["rows"])),
    )
    result = found(task)
    assert result.cause is cause
    assert ("pack_padded_sequence" in result.remedy) == (cause is Cause.PADDING)


def rows_and_labels(samples):
    """A batch that can be cut, whose parts have its padding."""
    rows = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"rows": rows, "y": torch.tensor([len(sample) % CLASSES for sample in samples])}


class Forwards(Backwards):
    """Reads padded rows as far as their first element, which padding does not reach."""

    def forward(self, rows):
        return self.head(self.rnn(rows[:, :1])[0][:, 0])


@pytest.mark.parametrize(("build_model", "cause"), [(Backwards, Cause.PADDING), (Forwards, None)])
def test_micro_batches_that_a_loader_pads_anew_show_padding_that_reaches_the_loss(build_model, cause):
    rows = [torch.randn(2 + position % 5, WIDTH) for position in range(100)]
    task = Task(
        build_model=build_model,
        train_dataset=lambda: rows,
        collate_fn=rows_and_labels,
        training_step=lambda model, batch: F.cross_entropy(model(batch["rows"]), batch["y"]),
    )
    assert found(task).cause is cause
    assert found(task, samples=SamplesOf(task, rows_and_labels(rows[:20])), most=20).may_be_cut


def test_samples_that_nothing_pads_are_read_once_more_to_see_that():
    read = []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, position):
            read.append(position)
            return torch.full((WIDTH,), float(position)), torch.tensor(position % CLASSES)

    compared = []

    class Watched(TypicalSamples):
        def halves(self, num_samples):
            compared.append(num_samples)
            return super().halves(num_samples)

    task = Task(
        build_model=lambda: nn.Linear(WIDTH, CLASSES),
        train_dataset=Rows,
        training_step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    assert found(task, samples=Watched(task)).may_be_cut
    assert len(read) < 2.5 * sum(compared)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_collate_function_that_draws_is_not_taken_for_padding(generator):
    def masked(samples):
        batch = rows_and_labels(samples)
        return {**batch, "rows": batch["rows"] * (torch.rand(batch["rows"].shape, generator=generator) < 0.8)}

    rows = [torch.randn(2 + position % 5, WIDTH) for position in range(100)]
    task = Task(
        build_model=Backwards,
        train_dataset=lambda: rows,
        collate_fn=masked,
        training_step=lambda model, batch: F.cross_entropy(model(batch["rows"][:, :2]), batch["y"]),
    )
    assert found(task).may_be_cut


def test_where_too_few_samples_are_of_one_length_padding_is_not_ruled_out():
    rows = [torch.randn(1 + position // 3, WIDTH) for position in range(12)]
    task = Task(
        build_model=Backwards,
        train_dataset=lambda: rows,
        collate_fn=padded,
        training_step=lambda model, batch: F.cross_entropy(z := model(batch["rows"]), torch.ones(len(z)).long()),
    )
    result = found(task, most=6)
    assert (result.verdict, result.cause) == (Verdict.COUPLED, Cause.SAMPLES)
    assert "or padding reaches it" in result.reason and "pack_padded_sequence" in result.remedy


class Boxes(nn.Module):
    """Finds one thing for each sample, and another for each of its boxes."""

    def __init__(self):
        super().__init__()
        self.image, self.box = encoder(), encoder()

    def forward(self, images, boxes):
        return self.image(images).pow(2).mean() + self.box(boxes).pow(2).mean()


def pictures(samples):
    """As detection has it: tuples of tensors, each sample with its own number of boxes."""
    images, boxes = zip(*samples, strict=True)
    return {"images": images, "boxes": boxes}


def padded_boxes(samples):
    """The same in one tensor, with a mask."""
    images, boxes = zip(*samples, strict=True)
    padded = nn.utils.rnn.pad_sequence(boxes, batch_first=True)
    known = nn.utils.rnn.pad_sequence([torch.ones(len(box)) for box in boxes], batch_first=True)
    return {"images": images, "boxes": padded, "known": known > 0}


def encoded_boxes(samples):
    """The same as tokenizers return it."""
    return UserDict(padded_boxes(samples))


def of_pictures(model, batch):
    return model(torch.stack(batch["images"]), torch.cat(batch["boxes"]))


def of_known_boxes(model, batch):
    return model(torch.stack(batch["images"]), batch["boxes"][batch["known"]])


@pytest.mark.parametrize(
    ("collate_fn", "step"),
    [(pictures, of_pictures), (padded_boxes, of_known_boxes), (encoded_boxes, of_known_boxes)],
)
def test_means_over_unequal_numbers_of_terms_are_not_called_padding(collate_fn, step):
    samples = [(torch.randn(WIDTH), torch.randn(1 + position % 5, WIDTH)) for position in range(100)]
    task = Task(build_model=Boxes, train_dataset=lambda: samples, collate_fn=collate_fn, training_step=step)
    result = found(task)
    assert result.cause is Cause.TERMS
    assert "pad" not in result.reason + result.remedy and "number of samples" in result.remedy


def test_pairs_that_as_few_samples_of_one_length_lack_are_not_called_padding():
    """Two samples couple where they are of one class, as some of many are; there are four of each length, of four classes."""

    def step(model, batch):
        z, y = model(batch["rows"].sum(1)), batch["y"]
        alike = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
        return (torch.cdist(z, z) * alike).sum() / len(z) + F.cross_entropy(z, y % CLASSES)

    def collate(samples):
        rows, classes = zip(*samples, strict=True)
        return {"rows": nn.utils.rnn.pad_sequence(rows, batch_first=True), "y": torch.tensor(classes)}

    rows = [(torch.randn(2 + position // 4, WIDTH), position % 40) for position in range(100)]
    task = Task(build_model=encoder, train_dataset=lambda: rows, collate_fn=collate, training_step=step)
    assert found(task).cause is Cause.SAMPLES


def test_a_verdict_stands_where_its_cause_cannot_be_looked_for():
    def collate(samples):
        if len(samples) == 1:
            raise ValueError("one sample alone is no batch")
        return packed(samples)

    rows = [torch.randn(2 + position % 3, WIDTH) for position in range(100)]
    task = Task(build_model=encoder, train_dataset=lambda: rows, collate_fn=collate, training_step=packed_contrastive)
    assert found(task).cause is Cause.SAMPLES


def test_what_only_make_batch_can_make_smaller_cannot_be_told():
    def make_batch(n):
        return packed([torch.randn(2 + position % 3, WIDTH) for position in range(n)])

    result = found(Task(build_model=encoder, make_batch=make_batch, training_step=packed_step))
    assert result.verdict is Verdict.UNKNOWN and "only the task itself can make smaller batches" in result.reason


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda model, batch: cross_entropy(model, batch) * 0, "is zero"),
        (lambda model, batch: cross_entropy(model, batch) * math.inf, "is not finite"),
        (lambda model, batch: model(batch[0]).reshape(100, -1).mean(), "raised RuntimeError"),
    ],
)
def test_where_no_batch_tells_anything_it_is_said_why(step, reason):
    result = found(task_of(step))
    assert result.verdict is Verdict.UNKNOWN and reason in result.reason


def test_a_size_that_is_an_error_is_passed_over():
    def step(model, batch):
        assert len(batch[0]) % 8 == 0
        return cross_entropy(model, batch)

    assert found(task_of(step), most=64, legal=16).num_samples == 64


def test_one_sample_has_nothing_to_be_cut_from():
    assert found(losses.COUPLED["InfoNCE"], most=1).may_be_cut


def test_larger_batches_are_compared_as_long_as_there_is_time():
    seen = []

    def slow(model, batch):
        seen.append(len(batch[0]))
        time.sleep(0.02 * len(batch[0]))
        return cross_entropy(model, batch)

    assert found(task_of(slow), seconds=1.0).num_samples < WHOLE and seen[:3] == [6, 3, 3]
    seen.clear()
    assert found(task_of(slow), seconds=1.0, sample_s=1.0).may_be_cut and seen[:3] == [2, 1, 1]
    assert found(losses.COUPLED["InfoNCE"], seconds=1.0, sample_s=1.0).verdict is Verdict.COUPLED


def test_what_takes_too_long_is_given_up_and_the_model_is_left_as_it_was():
    model = encoder()
    before = [parameter.clone() for parameter in model.parameters()]
    result = found(losses.COUPLED["InfoNCE"], seconds=1e-9, model=model)
    assert result.verdict is Verdict.UNKNOWN and "a larger --budget gives it more" in result.reason
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Hungry(nn.Module):
    """Has memory for `most` samples, or for their forward pass alone."""

    def __init__(self, most):
        super().__init__()
        self.layers, self.most = encoder(), most

    def forward(self, x):
        if len(x) > self.most and torch.is_grad_enabled():
            torch.empty(2**50, dtype=torch.uint8)
        return self.layers(x)


@pytest.mark.parametrize(("most", "compared"), [(30, 26), (6, 6), (5, 2), (1, 2)])
def test_the_largest_that_fits_is_compared_and_in_the_end_the_losses_alone(most, compared):
    plain = found(task_of(cross_entropy, model=lambda: Hungry(most)))
    assert (plain.verdict, plain.num_samples) == (Verdict.SEPARABLE, compared)
    assert (plain.gradient_error is None) is (most == 1)
    assert found(task_of(info_nce, views, model=lambda: Hungry(most))).verdict is Verdict.COUPLED


def test_memory_that_others_hold_is_no_finding():
    class Shared(CpuDevice):
        def is_crowded(self, attempted_bytes):
            return True

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        found(task_of(cross_entropy, model=lambda: Hungry(0)), device=Shared())


def test_a_batch_at_hand_is_compared_with_its_own_samples():
    task = losses.COUPLED["InfoNCE"]
    result = found(task, samples=SamplesOf(task, views(20)), most=20)
    assert result.verdict is Verdict.COUPLED
    assert "6 samples" in result.reason and "micro batches of 3 samples" in result.reason


def test_a_rounding_that_decides_is_told_from_coupling():
    """Units whose inputs are all but zero: the order of a sum decides which side of a ReLU they are on."""

    class Rough(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(WIDTH, 256), nn.Linear(256, CLASSES)

        def forward(self, x):
            h = self.into(x)
            noise = (h * 1e6 - (h * 1e6).round()) * 1e-6  # what is left of it is rounding
            return self.out(h.relu() + 100 * (noise * 1e4).sin())

    assert found(task_of(cross_entropy, model=Rough), most=24).may_be_cut


def test_noise_that_numpy_draws_for_each_sample_couples_nothing():
    def noisy(model, batch):
        return cross_entropy(model, (batch[0] + torch.from_numpy(np.random.randn(*batch[0].shape)).float(), batch[1]))

    assert found(task_of(noisy)).may_be_cut


def test_a_model_that_is_compiled_is_not_compiled_again_for_each_size():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    def build():
        model = encoder()
        model.compile(backend=backend)
        return model

    task = task_of(simclr, views, model=build)
    model = task.model()
    task.loss(model, views(4)).backward()
    model.zero_grad()
    before = len(compiled)
    assert found(task, model=model).verdict is Verdict.COUPLED
    assert len(compiled) == before


def test_a_loss_weight_that_counts_the_terms_makes_a_mean_over_tokens_separable():
    task = losses.WEIGHTS["mean over the batch's tokens"]
    plain = found(task)
    assert "loss_weight(batch)" in plain.remedy and "0.500 without a loss_weight)" in plain.reason
    assert found(replace(task, loss_weight=losses.num_tokens)).may_be_cut
    miscounted = found(replace(task, loss_weight=lambda batch: losses.num_tokens(batch) + 1))
    assert miscounted.cause is Cause.WEIGHTS and " by loss_weight)" in miscounted.reason
