"""The life after the search: memory runs out in the middle of a run, and the run goes on as if it had not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.errors import ConfigError
from autotune.recovery import Halving
from autotune.task import Task
from autotune.task.batches import StepBatch

torch.set_num_threads(1)
MOST = 4  # samples that there is memory for
CANNOT = "autotune cannot take the step again"


class Hungry(nn.Module):
    """Changes what a forward pass may change, and then asks for a pebibyte if there are more than `most` samples."""

    def __init__(self, most=MOST, dropout=0.5):
        super().__init__()
        self.most = most
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6, 6))
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x):
        self.seen += len(x)
        self.mean.data.mul_(0.9).add_(x.detach().mean())  # behind torch's back
        x = self.dropout(x * self.mask)
        if len(x) > self.most:
            torch.empty(2**50, dtype=torch.uint8)
        return x


def model_of(**changes):
    return nn.Sequential(nn.Linear(6, 6), Hungry(**changes), nn.Linear(6, 3))


def pairs(batch_size):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def session_of(config, on_oom="halve", **changes):
    torch.manual_seed(0)
    task = Task(**{"build_model": model_of, "make_batch": pairs, "configure_optimizers": adam, **changes})
    session = prepare(task, config, device="cpu", on_oom=on_oom)
    torch.manual_seed(1)
    return session


def state_of(session):
    return [tensor.clone() for tensor in (*session.model.parameters(), *session.model.buffers())]


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_taken_again_is_bit_for_bit_the_step_of_the_smaller_micro_batches(caplog):
    batches = [pairs(MOST), pairs(4 * MOST), pairs(MOST), pairs(4 * MOST)]

    def trained(batch_size):
        session = session_of({"batch_size": batch_size, "accumulation_steps": 4 * MOST // batch_size})
        return [session.step(batch) for batch in batches], state_of(session)

    losses, state = trained(4 * MOST)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "16 to 8 and 8 to 4; the fourth step begins with 4"
    assert "out of memory in a micro batch of 16 samples (an allocation of 1024 TiB failed)" in said[0]
    assert "taken again in micro batches of 8" in said[0]
    expected_losses, expected_state = trained(MOST)
    assert_equal(losses, expected_losses)
    assert_equal(state, expected_state)
    assert len(caplog.records) == 2


def test_what_was_accumulated_before_memory_ran_out_is_dropped():
    small, large = pairs(2), pairs(2 * MOST)
    halves = [((large[0][i : i + MOST], large[1][i : i + MOST]), MOST) for i in (0, MOST)]

    def trained(*micro_batches):
        session = session_of({"batch_size": 2 * MOST})
        return [session.step(StepBatch(step)) for step in ([(small, 2)], micro_batches)], state_of(session)

    losses, state = trained((small, 2), (large, 2 * MOST))
    expected_losses, expected_state = trained((small, 2), *halves)
    assert_equal(losses, expected_losses)
    assert_equal(state, expected_state)


def test_without_random_masks_it_is_the_step_of_the_whole_batch_up_to_rounding():
    x, y = pairs(4 * MOST)

    def trained(most):
        session = session_of({"batch_size": 16}, build_model=lambda: model_of(most=most, dropout=0.0).double())
        return session.step((x.double(), y)), list(session.model.parameters())

    loss, parameters = trained(MOST)
    expected_loss, expected = trained(10**6)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


def model_with(buffer):
    model = model_of()
    model.register_buffer("constant", buffer)
    return model


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(1, 4).expand(3, 4),
    ],
    ids=["COO", "CSR", "jagged", "expanded"],
)
def test_buffers_of_every_layout_let_a_first_step_be_taken_again(buffer):
    """`torch.equal` knows no sparse tensors, and nothing can be copied into an expanded one."""
    session = session_of({"batch_size": 2 * MOST}, build_model=lambda: model_with(buffer))
    session.step(pairs(2 * MOST))
    session.step(pairs(MOST))
    assert session.model[1].seen == 3 * MOST


def not_saved(model, batch):  # for the backward pass, which inference tensors cannot be
    return nn.functional.cross_entropy(model(batch[0] + 0), batch[1] + 0)


def test_tensors_made_in_inference_mode_let_a_step_be_taken_again():
    with torch.inference_mode():
        batch, buffer = pairs(2 * MOST), torch.ones(3)
    session = session_of({"batch_size": 2 * MOST}, build_model=lambda: model_with(buffer), training_step=not_saved)
    session.step(batch)
    session.step(batch)
    assert session.model[1].seen == 4 * MOST


class Uncopyable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to and (kwargs or {}).get("copy"):
            raise NotImplementedError("no copies")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_failure_to_take_note_of_a_step_does_not_fail_it(caplog):
    buffer = torch.ones(3).as_subclass(Uncopyable)
    session = session_of({"batch_size": 2 * MOST}, build_model=lambda: model_with(buffer))
    for _ in range(2):
        session.step(pairs(MOST))
    assert [record.getMessage() for record in caplog.records] == [
        "should memory run out, autotune cannot take the step again: what steps change could not be noted "
        "(NotImplementedError: no copies)"
    ]


def test_only_micro_batches_of_a_step_that_was_cut_bear_the_numbers_that_they_had():
    halving = Halving(session_of({"batch_size": 8}).task, "micro batch", "the step is taken again")
    large, small = (pairs(8), 8), (pairs(4), 4)
    halving.learn(*large, MemoryError())
    whole = StepBatch([small, small])
    assert halving.cut(whole) is whole and not whole.numbers
    cut = halving.cut(StepBatch([small, large]))
    assert (cut.sizes, cut.numbers) == ([4, 4, 4], [0, 1, 1])


def test_batches_without_tensors_are_halved_only_until_they_fit():
    sizes = []

    def of_texts(model, texts):
        sizes.append(len(texts))
        x = torch.tensor([[float(text)] * 6 for text in texts])
        return nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64))

    session = session_of({"batch_size": 16}, make_batch=lambda n: [str(i) for i in range(n)], training_step=of_texts)
    for num_samples in (16, 16, 3):
        session.step(session.task.batch(num_samples))
    assert sizes == [16, 4, 2, 2, 8, *[4] * 8, 3], "the second to the fourth are compared"


def test_a_gradient_that_is_never_cleared_is_told_before_memory_runs_out(caplog):
    session = session_of({"batch_size": MOST}, configure_optimizers=lambda model: adam(model[0]))
    for _ in range(3):
        session.step(pairs(MOST))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "2.weight had a gradient before the step" in said


class OutOfMemory(torch.optim.SGD):
    def step(self, closure=None):
        torch.empty(2**50, dtype=torch.uint8)


def whole_step(model, optimizers, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizers.step()


def in_place(model, batch):
    return nn.functional.cross_entropy(model(batch[0].mul_(2)), batch[1])


@pytest.mark.parametrize(
    ("reason", "config", "changes"),
    [
        ("batch normalisation", {}, {"build_model": lambda: nn.Sequential(nn.BatchNorm1d(6), model_of())}),
        ("updates the parameters in each backward pass", {"optimizer_in_backward": True}, {}),
        ("one unit", {}, {"train_step": whole_step}),
        ("changed its batch in place", {}, {"training_step": in_place}),
        ("2.weight had a gradient before", {}, {"configure_optimizers": lambda model: adam(model[0])}),
        ("one sample alone does not fit", {"batch_size": 1}, {"build_model": lambda: model_of(most=0)}),
        ("2 samples of plain training do not fit", {}, {"build_model": lambda: model_of(most=0)}),
        ("only the task itself", {}, {"make_batch": lambda n: pairs(3 * n)}),
        (
            "optimizer may have updated some parameters",
            {},
            {
                "build_model": lambda: model_of(most=99),
                "configure_optimizers": lambda model: OutOfMemory(model.parameters(), lr=0.1),
            },
        ),
    ],
)
def test_where_a_step_cannot_be_taken_again_the_error_says_why(reason, config, changes):
    session = session_of({"batch_size": 8, **config}, **changes)
    batches = map(session.task.batch, (2, 8))
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        list(map(session.step, batches))
    assert CANNOT in caught.value.__notes__[0]
    assert reason in caught.value.__notes__[0]


def test_it_can_be_switched_off():
    session = session_of({"batch_size": 8}, on_oom="raise")
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        session.step(pairs(8))
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(ConfigError, match=r"on_oom='ignore' is not known; expected 'halve' or 'raise'"):
        session_of({}, on_oom="ignore")


def contrastive(model, batch):
    z = nn.functional.normalize(model(batch[0]), dim=-1)
    return nn.functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def test_a_step_whose_loss_couples_samples_is_not_taken_in_smaller_micro_batches():
    session = session_of({"batch_size": 16}, training_step=contrastive)
    session.step(pairs(MOST))
    before = state_of(session)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        session.step(pairs(16))
    (note,) = caught.value.__notes__
    assert (
        CANNOT in note and "couples the samples of a batch" in note and "choose a config that needs less memory" in note
    )
    assert_equal(state_of(session), before)
    session.step(pairs(MOST))


def test_whether_a_loss_couples_samples_is_found_out_once():
    sizes = []

    def seen(model, batch):
        sizes.append(len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    session = session_of({"batch_size": 16}, training_step=seen)
    for size in (16, 32):
        session.step(pairs(size))
    assert sizes[:4] == [16, 4, 2, 2] and sizes[4:] == [8, *[4] * 12], "16 are cut from the start"


LONG_RUN = """
import sys

import torch
from torch import nn

from autotune import prepare
from autotune.devices.cpu import CpuDevice
from autotune.task import Task
from autotune.task.batches import StepBatch

room_mib, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)


def block():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))


def make_batch(batch_size, length=64):
    return torch.randn(batch_size, length, 64), torch.randn(batch_size, length, 64)


torch.manual_seed(0)
device = CpuDevice()
task = Task(build_model=lambda: nn.Sequential(*(block() for _ in range(12))), make_batch=make_batch)
session = prepare(task, {"batch_size": 16}, device=device)
x, y = make_batch(16, 1024)
if room_mib:
    device.limit_memory(device.current_bytes() + room_mib * 2**20)
    long = x, y
else:
    long = StepBatch([((x[at : at + size], y[at : at + size]), size) for at in range(0, 16, size)])
losses = [session.step(batch) for batch in (make_batch(16), make_batch(16), long, make_batch(16), make_batch(16))]
torch.save([losses, [p.detach() for p in session.model.parameters()]], path)
"""


def test_a_run_survives_a_longer_input_under_a_real_memory_limit(tmp_path):
    """The long batch needs some 210 MiB whole and 140 MiB in two; only the limited process is given it whole."""

    def train(room_mib, size):
        path = tmp_path / f"{room_mib}.pt"
        command = [sys.executable, "-c", LONG_RUN, str(room_mib), str(size), str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
        assert ended.returncode == 0, ended.stderr
        return *torch.load(path), ended.stderr

    losses, parameters, told = train(room_mib=175, size=16)
    assert "out of memory in a micro batch of 16 samples" in told
    sizes = re.findall(r"taken again in micro batches of (\d+)", told)
    expected_losses, expected, nothing = train(room_mib=0, size=int(sizes[-1]))
    assert "out of memory" not in nothing
    assert_equal(losses, expected_losses)
    assert_equal(parameters, expected)


CONTRASTIVE_RUN = """
import torch
from torch import nn

from autotune import prepare
from autotune.devices.cpu import CpuDevice
from autotune.task import Task

torch.set_num_threads(1)


def build_model():
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))


def make_batch(batch_size, length=64):
    return torch.randn(batch_size, length, 64)


def training_step(model, batch):
    z = nn.functional.normalize(model(batch).mean(1), dim=-1)
    return nn.functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


device = CpuDevice()
task = Task(build_model=build_model, make_batch=make_batch, training_step=training_step)
session = prepare(task, {"batch_size": 16}, device=device)
device.limit_memory(device.current_bytes() + 80 * 2**20)
session.step(make_batch(16))
session.step(make_batch(16, 1024))
"""


@pytest.mark.slow  # another process; that a loss that couples samples is not cut is held above
def test_under_a_real_memory_limit_a_contrastive_loss_is_never_cut():
    """Two halves of the long batch would fit, as in the test above, and would be another loss."""
    command = [sys.executable, "-c", CONTRASTIVE_RUN]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert ended.returncode == 1 and "can't allocate memory" in ended.stderr, ended.stderr
    assert "couples the samples of a batch" in ended.stderr and "is taken again" not in ended.stderr
