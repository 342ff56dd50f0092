import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from autotune import prepare
from autotune.errors import TaskError
from autotune.task import Task
from autotune.task.batches import CannotCutError


def pairs(batch_size):
    return torch.randn(batch_size, 4), torch.randint(3, (batch_size,))


def linear():
    return nn.Linear(4, 3)


def task_of(**changes):
    return Task(**{"build_model": linear, "make_batch": pairs, **changes})


def refused(call, *expected):
    with pytest.raises(TaskError) as caught:
        call()
    for text in expected:
        assert text in str(caught.value), str(caught.value)


class Lines(torch.utils.data.Dataset):
    """Line i has i + 1 tokens; there are ten."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.zeros(index + 1)


class Stream(IterableDataset):
    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        return (torch.zeros(4) for _ in (itertools.count() if self.length is None else range(self.length)))


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def lines():
    return Task(build_model=linear, train_dataset=Lines, collate_fn=padded)


def test_the_model_is_in_training_mode():
    assert task_of(build_model=lambda: nn.Linear(4, 3).eval()).model().training


def test_a_model_that_is_no_module_is_refused():
    refused(task_of(build_model=lambda: None).model, "build_model returned None", "torch.nn.Module", "`return model`")
    refused(task_of(build_model=lambda: nn.Linear).model, "the class Linear", "torch.nn.Module", "return the module")


def test_a_model_with_nothing_to_train_is_refused():
    refused(task_of(build_model=nn.ReLU).model, "ReLU", "no parameters", "assign its layers")
    frozen = linear().requires_grad_(False)
    refused(task_of(build_model=lambda: frozen).model, "Linear", "requires a gradient", "set requires_grad")


def test_a_model_whose_shapes_are_not_known_yet_is_refused_until_a_batch_has_passed():
    def lazy():
        return nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3))

    refused(task_of(build_model=lazy).model, "Sequential whose LazyLinear has no shape yet", "run a batch through")

    def build_model():
        model = lazy()
        model(torch.zeros(2, 4))
        return model

    assert task_of(build_model=build_model).model()


def test_a_model_that_is_not_a_new_one_is_refused():
    model = linear()
    task = task_of(build_model=lambda: model)
    task.model()
    refused(task.model, "the same Linear twice", "inside build_model")


def test_the_default_optimizer_is_adamw_over_what_requires_a_gradient():
    task = task_of()
    model = task.model()
    model.bias.requires_grad_(False)
    optimizer = task.optimizer(model)
    assert type(optimizer) is torch.optim.AdamW
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(model.weight)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sgd_and_scheduler(model):
    optimizer = sgd(model)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("configure", "num_schedulers"),
    [
        (sgd, 0),
        (lambda model: [sgd(model)], 0),
        (lambda model: {"optimizer": sgd(model)}, 0),
        (sgd_and_scheduler, 1),
        (lambda model: tuple([part] for part in sgd_and_scheduler(model)), 1),
        (lambda model: dict(zip(("optimizer", "lr_scheduler"), sgd_and_scheduler(model), strict=True)), 1),
    ],
)
def test_one_optimizer_in_any_of_lightnings_forms_is_taken(configure, num_schedulers):
    task = task_of(configure_optimizers=configure)
    optimizer, found = task.optimizer_and_schedulers(task.model())
    assert type(optimizer) is torch.optim.SGD
    assert found == num_schedulers


@pytest.mark.parametrize(
    "configure",
    [
        lambda model: (sgd(model), sgd(model)),
        lambda model: [sgd(model), sgd(model)],
        lambda model: ([sgd(model), sgd(model)], []),
        lambda model: [{"optimizer": sgd(model)}, {"optimizer": sgd(model)}],
    ],
)
def test_two_optimizers_are_refused(configure):
    task = task_of(configure_optimizers=configure)
    refused(lambda: task.optimizer(task.model()), "2 optimizers", "SGD and SGD", "expected one", "groups")


@pytest.mark.parametrize(("returned", "seen"), [(None, "None"), ([], "list of 0"), ("sgd", "'sgd'")])
def test_what_is_no_optimizer_is_refused(returned, seen):
    task = task_of(configure_optimizers=lambda model: returned)
    refused(lambda: task.optimizer(task.model()), seen, "torch.optim.Optimizer", "return torch.optim.AdamW")


def test_an_optimizer_over_another_model_is_refused():
    task = task_of(configure_optimizers=lambda model: sgd(linear()))
    refused(lambda: task.optimizer(task.model()), "SGD without any parameter", "model.parameters()")


def loss_of(returned):
    task = task_of(training_step=lambda model, batch: returned(model(batch[0])))
    return lambda: task.loss(task.model(), pairs(2))


def test_the_training_step_gives_the_loss():
    assert loss_of(lambda output: output.mean())().requires_grad


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda output: None, ("returned None", "`return loss`")),
        (lambda output: 2.5, ("the float 2.5", "scalar tensor")),
        (lambda output: (output.mean(), output), ("a tuple of 2", "return the loss itself")),
        (lambda output: output, ("shape (2, 3)", "scalar", "`.mean()`")),
        (lambda output: output.mean().reshape(1), ("shape (1,)", "scalar", "`.squeeze()`")),
        (lambda output: output.mean().detach(), ("no gradient", "`.detach()`")),
        (lambda output: torch.tensor(2.5), ("no gradient", "`torch.tensor(...)`")),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(returned, expected):
    refused(loss_of(returned), "training_step returned", *expected)


def test_a_loss_may_be_taken_without_a_gradient_where_gradients_are_off():
    with torch.no_grad():
        assert not loss_of(lambda output: output.mean())().requires_grad


def test_a_batch_has_the_size_that_was_asked_for():
    x, y = task_of().batch(5)
    assert len(x) == len(y) == 5


def test_a_make_batch_is_believed_whatever_it_makes():
    packed = {"tokens": torch.zeros(10), "cu_seqlens": torch.arange(3) * 5}
    assert task_of(make_batch=lambda n: packed).batch(2) is packed


@pytest.mark.parametrize("data", ["make_batch", "collate_fn"])
def test_a_batch_that_is_nothing_is_refused(data):
    task = task_of(make_batch=None, train_dataset=Lines, collate_fn=padded) if data == "collate_fn" else task_of()
    refused(lambda: dataclasses.replace(task, **{data: lambda n: None}).batch(2), f"{data} returned None", "`return`")


def test_the_cuts_of_a_batch_are_found_without_disturbing_random_numbers():
    task = task_of()
    before = torch.get_rng_state()
    assert task.cuts() == {0: 0, 1: 0} == task.cuts()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [2, 3])
def test_the_cuts_of_a_dataset_are_those_of_what_its_collate_function_makes(size):
    found = [(torch.zeros(4), i) for i in range(size)]
    assert Task(build_model=linear, train_dataset=lambda: found).cuts() == {0: 0, 1: 0}


def test_the_cuts_of_batches_that_must_be_of_certain_sizes_are_found_at_the_baselines():
    def make_batch(batch_size):
        assert batch_size % 4 == 0
        return pairs(batch_size)

    assert task_of(make_batch=make_batch, baseline={"batch_size": 8}).cuts() == {0: 0, 1: 0}
    assert task_of(make_batch=make_batch).cuts() == {0: 0, 1: 0}


def test_the_cuts_of_a_small_dataset_are_found_within_it():
    def even(members):
        assert len(members) % 4 == 0
        return torch.stack(members)

    task = Task(build_model=linear, train_dataset=lambda: [torch.zeros(4)] * 8, collate_fn=even)
    assert task.cuts() == 0


def test_where_no_two_batches_can_be_made_there_are_no_cuts_and_it_says_why():
    def make_batch(batch_size):
        assert batch_size == 32, "only 32 will do"
        return pairs(batch_size)

    task = task_of(make_batch=make_batch)
    with pytest.raises(CannotCutError, match="32 and 64 samples failed"):
        task.cuts()
    batch = task.batch(32)
    assert prepare(task, {"batch_size": 32}, device="cpu").step(batch).isfinite()


def test_a_batch_that_can_be_read_once_only_is_refused():
    refused(lambda: task_of(make_batch=lambda n: zip(*pairs(n), strict=True)).batch(2), "a zip", "once only", "list")


def test_a_batch_that_only_make_batch_can_cut_says_so_each_time():
    task = task_of(make_batch=lambda n: torch.zeros(5 * n))
    for _ in range(2):
        with pytest.raises(CannotCutError, match=r"\(10,\) and \(15,\)"):
            task.cuts()


def test_the_weight_is_the_number_of_samples_unless_the_task_knows_better():
    own_step = task_of(training_step=lambda model, batch: model(batch[0]).mean())
    assert own_step.weight(pairs(5), 5) == 5
    assert own_step.weight({"labels": torch.ones(5, 6).long()}, 5) == 5
    assert task_of(loss_weight=lambda batch: len(batch[0]) * 2).weight(pairs(5), 5) == 10


def test_the_weight_of_a_default_loss_counts_the_targets_that_are_not_ignored():
    assert task_of().weight((torch.zeros(2, 3, 4), torch.tensor([[1, 2, -100], [0, -100, -100]])), 2) == 3


def test_a_batch_of_a_dataset_is_made_of_its_widest_samples():
    assert lines().batch(3).shape == (3, 10)
    assert lines().widest() == (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)


def test_the_widest_samples_can_be_handed_on():
    task = lines()
    task.use_widest([4, 2])
    assert task.batch(3).shape == (3, 5)


def test_a_batch_larger_than_the_dataset_is_refused():
    refused(lambda: lines().batch(11), "11 samples", "has 10", "smaller batch_size")


def test_the_default_collation_is_torchs():
    task = Task(build_model=linear, train_dataset=lambda: [(torch.zeros(4), 1)] * 3)
    x, y = task.batch(2)
    assert x.shape == (2, 4) and y.tolist() == [1, 1]


def test_make_batch_gives_the_batch_where_there_is_a_dataset_too():
    task = task_of(train_dataset=Lines)
    assert task.batch(2)[0].shape == (2, 4) and len(task.dataset()) == 10


def test_a_collate_fn_may_put_the_samples_into_another_dimension():
    task = Task(build_model=linear, train_dataset=Lines, collate_fn=lambda samples: padded(samples).T)
    assert task.batch(2).shape == (10, 2)


def test_the_dataset_is_built_once_per_task():
    task = lines()
    assert task.dataset() is task.dataset()
    assert lines().dataset() is not task.dataset()


def test_a_stream_is_taken_as_a_dataset():
    task = Task(build_model=linear, train_dataset=Stream)
    assert task.batch(600).shape == (600, 4)
    assert len(task.widest()) <= 512


def test_an_empty_stream_is_refused():
    refused(lambda: Task(build_model=linear, train_dataset=lambda: Stream(0)).batch(1), "has 0")


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (DataLoader(Lines()), ("a DataLoader", "loader.dataset")),
        ({"train": Lines(), "test": Lines()}, ("a dict with 2 keys", "return the data set")),
        (None, ("None", "torch.utils.data.Dataset")),
        ([], ("0 samples", "check where it reads from")),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, expected):
    refused(Task(build_model=linear, train_dataset=lambda: dataset).dataset, "train_dataset returned", *expected)


def test_a_changed_copy_of_a_task_shares_nothing_that_was_found_out():
    task = lines()
    task.use_widest([4])
    assert dataclasses.replace(task, train_dataset=lambda: Lines(), global_batch=8).widest()[0] == 9
