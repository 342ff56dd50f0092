"""What lives in the user's process reaches the probes as copies, and is the same afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from transformers import BertConfig, BertModel

import autotune
from autotune.devices import linux
from autotune.errors import TaskError
from autotune.integrations.base import words_of_changes
from autotune.runners.local import LocalRunner
from autotune.session import prepare
from autotune.task.loading import load_source, load_task
from autotune.task.source import TaskSource
from autotune.techniques.frameworks import TRANSFORMERS
from autotune.units import GIB
from tests.export.test_export import of_world
from tests.integrations.answers import LAUNCHED

FEATURES, CLASSES = 12, 4
TINY_BERT = BertConfig(
    vocab_size=8,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=8,
    max_position_embeddings=8,
)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES))


def dataset(number: int = 64) -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (number,), generator=made)
    labels[::3] = -100
    return TensorDataset(torch.randn(number, FEATURES, generator=made), labels)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any, loss: Any) -> None:
    for x, y in loader:
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    own = [(p.data_ptr(), p.device, p.requires_grad, p.clone(), p.grad) for p in model.parameters()]
    drawn = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    return [own, model.training, len(model._forward_pre_hooks), str(optimizer.state_dict()), drawn]


@pytest.mark.usefixtures("measured_once", "short_play_off")
def test_a_search_leaves_model_optimizer_randomness_and_workers_as_they_were(tmp_path: Path) -> None:
    model, loss = net().eval(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset(), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    trained(model, optimizer, loader, loss)
    workers = psutil.Process().children()
    before = state_of(model, optimizer)
    task = autotune.Task.from_loader(model, loader, loss, optimizer)
    result = autotune.search(
        task, device="cpu", budget="60s", trials=1, storage=str(tmp_path / "live.db"), listeners=[]
    )
    assert result.baseline is not None and result.baseline.config["num_workers"] == 1
    after = state_of(model, optimizer)
    for was, now in zip(before[0], after[0], strict=True):
        assert was[:3] == now[:3] and torch.equal(was[3], now[3]) and was[4] is now[4]
    assert before[1:] == after[1:]
    assert psutil.Process().children() == workers and not torch.cuda.is_initialized()


@pytest.mark.parametrize(("times_held", "is_told"), [(5, True), (20, False)])
def test_what_this_process_holds_is_told_where_memory_is_short(
    times_held: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    task = autotune.Task.from_loader(
        model, DataLoader(dataset(), batch_size=16), torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters())
    )
    held_bytes = psutil.Process().memory_info().rss
    free = SimpleNamespace(total=64 * GIB, available=times_held * held_bytes)
    monkeypatch.setattr(linux, "memory_allowance", lambda: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with LocalRunner(TaskSource.of(task), device="cpu", logs=tmp_path) as runner:
        assert [("this process holds" in note and "iB of host memory" in note) for note in runner.notes] == [
            True
        ] * is_told


def test_a_copy_steps_as_the_loop_does(tmp_path: Path) -> None:
    """The labels that do not count are spread unevenly over the micro batches; one step has all samples."""
    model, loss = net(), torch.nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    groups = [{"params": model[2].parameters(), "lr": 0.5}, {"params": model[0].weight}]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(), batch_size=64)
    task = autotune.Task.from_loader(model, loader, loss, optimizer)
    task = load_source(TaskSource.of(task).hand_over(tmp_path))
    session = prepare(task, {"batch_size": 16}, device="cpu")
    assert session.config.accumulation_steps == 4 and session.optimizer.defaults["momentum"] == 0.9
    session.step(next(iter(session.loader)))
    assert not torch.equal(session.model.state_dict()["2.weight"], model.state_dict()["2.weight"])
    trained(model, optimizer, loader, loss)
    for ours, theirs in zip(session.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class Still(torch.nn.Sequential):
    """Keeps its parts in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self:
            part.eval()
        return self


def test_copies_of_a_live_model_keep_the_modes_of_its_parts(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES), torch.nn.BatchNorm1d(CLASSES).eval())
    model.append(BertModel(TINY_BERT).eval())  # as `from_pretrained` returns it, to be switched on by `model.train()`
    model.append(Still(torch.nn.Dropout()))
    task = autotune.Task.from_loader(model, DataLoader(dataset(), batch_size=16), torch.nn.CrossEntropyLoss())
    copied = load_source(TaskSource.of(task).hand_over(tmp_path)).model()
    assert [module.training for module in (copied, *copied)] == [True, True, False, True, True]
    assert not copied[3][0].training  # type: ignore[index]
    model.eval()
    assert task.model()[1].training  # type: ignore[index]


class Scaled(torch.optim.SGD):
    """Steps by attributes of its own, one of which lists the parameters again, as L-BFGS does."""

    def __init__(self, parameters: Any, scale: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.scale = scale
        self.listed = list(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.listed:
            parameter.grad.mul_(self.scale)
        super().step()


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_optimizer_keeps_its_own_attributes(tmp_path: Path, handed_over: bool) -> None:
    model, loss = net(), torch.nn.CrossEntropyLoss()
    optimizer = Scaled(model.parameters(), scale=5.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # hangs a `step` on it, which is of the user's optimizer
    loader = DataLoader(dataset(), batch_size=64)
    task = autotune.Task.from_loader(model, loader, loss, optimizer)
    if handed_over:
        task = load_source(TaskSource.of(task).hand_over(tmp_path))
    session = prepare(task, {"batch_size": 64}, device="cpu")
    before = model[0].weight.clone()  # type: ignore[index]
    session.step(next(iter(session.loader)))
    assert torch.equal(model[0].weight, before)  # type: ignore[index]
    trained(model, optimizer, loader, loss)
    for ours, theirs in zip(session.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tasks_that_one_script_makes_of_other_things_are_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    loader = DataLoader(dataset(), batch_size=8)

    def digest(activation: Any = torch.nn.ReLU, kind: Any = torch.optim.SGD, lr: float = 0.1, loss: Any = None) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES), activation())
        task = autotune.Task.from_loader(
            model, loader, loss or (lambda y, target: y.mean()), kind(model.parameters(), lr)
        )
        return TaskSource.of(task).script_digest()

    def scaled(scale: int) -> Any:
        return lambda y, target: y.mean() * scale

    assert digest() == digest() != ""
    others = [digest(torch.nn.GELU), digest(kind=torch.optim.Adam), digest(lr=0.2), digest(loss=torch.nn.NLLLoss())]
    assert len({digest(), *others, digest(loss=scaled(1)), digest(loss=scaled(12))}) == 7


def test_two_models_of_one_class_are_named_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

    def version(width: int) -> str:
        return TaskSource.of(autotune.Task.from_loader(Net(width), DataLoader(dataset(), batch_size=8))).version

    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert version(2) == version(2) != version(3) != ""
    script.unlink()  # as in a notebook, where nobody knows what was edited
    assert version(2) != ""
    assert TaskSource.of(autotune.Task(build_model=net, make_batch=lambda number: None)).version == ""


def test_micro_batches_weigh_as_much_as_the_classes_in_them() -> None:
    model, loss = net(), torch.nn.CrossEntropyLoss(torch.tensor([1.0, 10.0, 0.1, 3.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset(), batch_size=64)
    session = prepare(autotune.Task.from_loader(model, loader, loss, optimizer), {"batch_size": 16}, device="cpu")
    session.step(next(iter(session.loader)))
    trained(model, optimizer, loader, loss)
    for ours, theirs in zip(session.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_users_loss_stays_where_it_is() -> None:
    loss = torch.nn.CrossEntropyLoss(torch.ones(CLASSES))
    task = autotune.Task.from_loader(net(), DataLoader(dataset(), batch_size=8), loss)
    assert task.training_step is not None
    y = torch.empty(8, CLASSES, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    task.training_step(torch.nn.Identity(), y)
    assert loss.weight is not None and loss.weight.device.type == "cpu"


def test_a_loader_says_the_baseline(tmp_path: Path) -> None:
    loader = DataLoader(dataset(), batch_size=16, num_workers=2, prefetch_factor=4, drop_last=True)
    task = autotune.Task.from_loader(net(), loader, baseline={"accumulation_steps": 3, "amp": "bf16"})
    assert task.baseline is not None and task.global_batch == 48
    expected = {"batch_size": 16, "accumulation_steps": 3, "num_workers": 2, "prefetch_factor": 4, "amp": "bf16"}
    assert expected.items() <= task.baseline.items()


def test_a_loaders_batch_is_one_process_of_a_script_and_all_of_a_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "model.py").write_text(
        "from torch.utils.data import DataLoader\nimport autotune\n"
        "from tests.integrations.test_base import dataset, net\n"
        "task = autotune.Task.from_loader(net(), DataLoader(dataset(), batch_size=8))\n"
    )
    assert autotune.Task.from_loader(net(), DataLoader(dataset(), batch_size=8)).global_batch == 16
    assert load_task(f"{tmp_path / 'model.py'}:task").global_batch == 8


def test_an_answer_takes_an_option_back_to_the_frameworks_default() -> None:
    """Where nothing is said in its place, what the script says holds."""
    task = autotune.Task(build_model=net, train_dataset=dataset, baseline={"bucket_mb": 100, "ddp_static_graph": True})
    said = words_of_changes(task, replace(of_world(), baseline=None), (TRANSFORMERS,))[TRANSFORMERS]
    assert (said["ddp_bucket_cap_mb"], said["ddp_static_graph"]) == (25, False)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(dataset())


def nothing(worker: int) -> None: ...


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(dataset(), batch_size=8, shuffle=True), ()),
        (DataLoader(Stream(), batch_size=8), ()),
        (DataLoader(dataset(), batch_size=8, shuffle=True, drop_last=True), ("drop_last=True (its last step has",)),
        (DataLoader(dataset(), batch_size=8), ("shuffle=False (its samples come in random order)",)),
        (DataLoader(dataset(), batch_size=8, shuffle=True, worker_init_fn=nothing), ("DataLoader's worker_init_fn; ",)),
        (
            DataLoader(Stream(), batch_size=8, drop_last=True, worker_init_fn=nothing),
            (
                "drop_last=True",
                "worker_init_fn (where that gives each worker its part of the stream",
                "get_worker_info",
            ),
        ),
    ],
)
def test_what_a_sessions_loader_does_not_take_over_is_told(loader: DataLoader[Any], told: tuple[str, ...]) -> None:
    warnings = autotune.Task.from_loader(net(), loader).warnings
    if told:
        (warning,) = warnings
        assert all(part in warning for part in (*told, "session.step(batch)"))
    else:
        assert not warnings


def test_what_no_task_can_be_made_of_is_refused_with_the_next_step() -> None:
    model = net()
    cut = DataLoader(dataset(), batch_sampler=BatchSampler(SequentialSampler(range(64)), 8, drop_last=True))
    with pytest.raises(TaskError, match=r"batch_sampler.*give one with a batch_size"):
        autotune.Task.from_loader(model, cut)
    with pytest.raises(TaskError, match=r"expected one torch.utils.data.DataLoader"):
        autotune.Task.from_loader(model, [1, 2])  # type: ignore[arg-type]
    loader = DataLoader(dataset(), batch_size=8)
    with pytest.raises(TaskError, match=r"parameters that the Sequential does not have.*made after"):
        autotune.Task.from_loader(model, loader, optimizer=torch.optim.SGD(net().parameters(), lr=1.0))
    with pytest.raises(TaskError, match=r"wrapped in DataParallel; give the model itself, model.module"):
        autotune.Task.from_loader(torch.nn.DataParallel(model), loader)


def test_a_batch_without_a_target_is_refused_with_the_next_step() -> None:
    loader = DataLoader(torch.randn(8, FEATURES), batch_size=4)  # type: ignore[arg-type]
    task = autotune.Task.from_loader(net(), loader, torch.nn.CrossEntropyLoss())
    with pytest.raises(TaskError, match=r"which part of it is the target.*training_step"):
        prepare(task, {}, device="cpu").step(torch.randn(4, FEATURES))
