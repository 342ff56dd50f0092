"""`session.evaluate`: what a plain loop over the batches finds, and training that does not notice it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune import prepare
from autotune.errors import TaskError
from autotune.task import Task
from autotune.task.batches import StepBatch

torch.set_num_threads(1)
MOST = 4  # samples that there is memory for


class Hungry(nn.Module):
    """Asks for a pebibyte if there are more than `most` samples."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        if len(x) > self.most:
            torch.empty(2**50, dtype=torch.uint8)
        return x


def model_of(most=10**6):
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), Hungry(most), nn.Linear(12, 3))


def pairs(batch_size):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))


def session_of(config=None, on_oom="halve", **changes):
    torch.manual_seed(0)
    task = Task(**{"build_model": model_of, "make_batch": pairs, **changes})
    return prepare(task, {"batch_size": 8, **(config or {})}, device="cpu", on_oom=on_oom)


def trained(**changes):
    """A session whose running statistics are not the initial ones."""
    session = session_of(**changes)
    for _ in range(3):
        session.step(pairs(8))
    return session


def plainly(model, batches):
    """The mean over all samples, as one writes it by hand."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x), y, reduction="none") for x, y in batches]
    return float(torch.cat(losses).double().mean())


def test_it_is_the_mean_over_all_samples_of_a_plain_loop():
    session = trained()
    batches = [pairs(8), pairs(8), pairs(3)]
    expected = pytest.approx(plainly(session.model, batches), rel=1e-6)
    assert session.evaluate(batches) == {"loss": expected}
    assert session.evaluate([StepBatch([(batches[0], 8), (batches[1], 8)]), batches[2]]) == {"loss": expected}


def test_a_dataset_is_cut_into_batches_of_any_size():
    data = torch.utils.data.TensorDataset(*pairs(22))
    session = trained(eval_dataset=lambda: data)
    expected = pytest.approx(plainly(session.model, [data.tensors]), rel=1e-6)
    sizes = []
    session.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    assert session.evaluate(batch_size=10) == {"loss": expected}
    assert session.evaluate(data) == {"loss": expected}
    assert sizes == [10, 10, 2, 8, 8, 6]


def test_what_is_evaluated_on_may_be_batched_otherwise_than_what_is_trained_on():
    made = []

    def collate(samples):
        made.append(len(samples))
        return torch.utils.data.default_collate(samples)

    data = torch.utils.data.TensorDataset(*pairs(6))
    session = trained(eval_dataset=lambda: data, eval_collate_fn=collate)
    assert session.evaluate(batch_size=4)["loss"] == pytest.approx(plainly(session.model, [data.tensors]), rel=1e-6)
    assert made == [4, 2]
    with pytest.raises(TaskError, match=r"eval_collate_fn makes.*there is no eval_dataset; write eval_dataset\(\)"):
        trained(eval_collate_fn=collate)


def test_samples_in_a_list_of_the_tasks_are_batched():
    x, y = pairs(22)
    session = trained(eval_dataset=lambda: list(zip(x, y, strict=True)))
    expected = pytest.approx(plainly(session.model, [(x, y)]), rel=1e-6)
    sizes = []
    session.model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    assert session.evaluate() == {"loss": expected}
    assert sizes == [8, 8, 6]


def test_labels_that_do_not_count_have_no_weight():
    x, y = pairs(12)
    y[2:8] = -100
    session = trained()
    whole = session.evaluate([(x, y)])["loss"]
    assert session.evaluate([(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])])["loss"] == pytest.approx(whole)
    with pytest.raises(TaskError, match="nothing was evaluated"):
        session.evaluate([(x[3:6], y[3:6])])


def test_what_the_tasks_own_function_returns_is_averaged():
    def eval_step(model, batch):
        x, y = batch
        assert not torch.is_grad_enabled() and not model.training
        return {"right": (model(x).argmax(-1) == y).float().mean(), "twelve": 12}

    session = trained(eval_step=eval_step)
    batches = [pairs(8), pairs(2)]
    model = copy.deepcopy(session.model).eval()
    right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in batches) / 10
    assert session.evaluate(batches) == {"right": pytest.approx(right), "twelve": 12}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "eval_step returned None; expected a scalar, the mean over the batch, or a dict of them: is `return`"),
        (torch.zeros(8), r"float32 tensor of shape \(8,\); expected a scalar.*`.mean\(\)`"),
        ({"accuracy": "high"}, "the string 'high' as 'accuracy'; expected a scalar"),
    ],
)
def test_what_is_no_mean_is_refused(returned, said):
    with pytest.raises(TaskError, match=said):
        session_of(eval_step=lambda model, batch: returned).evaluate([pairs(8)])


@pytest.mark.parametrize("as_dataset", [False, True])
def test_training_goes_on_as_if_nothing_had_been_evaluated(as_dataset):
    samples = list(zip(*pairs(24), strict=True))

    def run(evaluates):
        session = trained()
        session.model[1].eval()  # statistics that the user has frozen
        torch.manual_seed(1)
        for _ in range(2):
            if evaluates:
                data = samples if as_dataset else (pairs(8) for _ in range(3))
                session.evaluate(data, batch_size=8 if as_dataset else None)
            session.step(pairs(8))
        return [*session.model.parameters(), *session.model.buffers()], [m.training for m in session.model.modules()]

    (found, modes), (expected, expected_modes) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert modes == expected_modes == [True, True, False, True, True, True]


class Caching(nn.Module):
    """Keeps a mask for the widest input so far, as many transformers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.mask = torch.ones(1, 6)

    def forward(self, x):
        if len(x) > len(self.mask):
            self.mask = torch.ones(len(x), 6)
        return self.linear(x * self.mask[: len(x)])


def test_what_a_model_keeps_of_an_evaluation_can_be_trained_on():
    session = session_of(build_model=Caching)
    session.evaluate([pairs(32)])
    assert session.step(pairs(8)).isfinite()


def test_it_runs_in_the_precision_of_the_config():
    dtypes = []

    def eval_step(model, batch):
        dtypes.append(model(batch[0]).dtype)
        return 0.0

    session_of({"amp": "bf16"}, eval_step=eval_step).evaluate([pairs(8)])
    assert dtypes == [torch.bfloat16]


def test_a_batch_for_which_memory_is_short_is_evaluated_in_halves(caplog):
    session = session_of(build_model=lambda: model_of(MOST))
    batches = [pairs(4 * MOST), pairs(MOST), pairs(4 * MOST)]
    expected = plainly(nn.Sequential(*(m for m in session.model if not isinstance(m, Hungry))), batches)
    assert session.evaluate(batches)["loss"] == pytest.approx(expected, rel=1e-6)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "16 to 8 and 8 to 4; the third batch begins with 4"
    assert "out of memory in a batch of 16 samples" in said[0] and "it is evaluated in batches of 8" in said[0]


def test_where_halving_is_no_way_it_raises_and_leaves_training_as_it_was():
    session = session_of(build_model=lambda: model_of(0))
    with pytest.raises(RuntimeError) as raised:
        session.evaluate([pairs(8)])
    assert "autotune cannot evaluate it in smaller batches: one sample alone does not fit" in raised.value.__notes__
    assert session.model.training
    with pytest.raises(RuntimeError) as raised:
        session_of(build_model=lambda: model_of(MOST), on_oom="raise").evaluate([pairs(8)])
    assert not hasattr(raised.value, "__notes__")


def test_without_data_or_a_loss_it_says_what_to_write():
    with pytest.raises(TaskError, match=r"nothing to evaluate on; .*eval_dataset\(\)"):
        session_of().evaluate()

    def train_step(model, optimizers, batch):
        functional.cross_entropy(model(batch[0]), batch[1]).backward()

    whole = session_of(train_step=train_step)
    with pytest.raises(TaskError, match="no loss to evaluate with; write eval_step"):
        whole.evaluate([pairs(8)])


def ragged(batch_size):
    return torch.randn(7 * batch_size, 6), torch.randint(0, 3, (7 * batch_size,))


def test_batches_that_do_not_show_their_samples_need_a_weight():
    with pytest.raises(TaskError, match="how many samples this batch has is not known"):
        session_of(make_batch=ragged).evaluate([ragged(2)])
    session = session_of(make_batch=ragged, loss_weight=lambda batch: len(batch[1]))
    batches = [ragged(2), ragged(1)]
    assert session.evaluate(batches)["loss"] == pytest.approx(plainly(session.model, batches), rel=1e-6)
