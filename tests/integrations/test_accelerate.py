"""A decorator hands the config to a function that trains by Accelerate."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune.errors import ConfigError, TaskError
from autotune.probe.inspection import inspect_task
from autotune.records.config import World
from autotune.task import Task
from tests.coupling.searches import rewarding_cutting
from tests.integrations.answers import known
from tests.integrations.test_base import CLASSES, dataset, net
from tests.notes import Notes
from tests.report.sample_study import answer, but

accelerate = pytest.importorskip("accelerate")
from autotune.integrations.accelerate import find_executable_config  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """One process has one precision, and tests of other files have chosen theirs."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1 GiB."


def task() -> Task:
    return Task.from_loader(net(), DataLoader(dataset(), batch_size=4), baseline={"accumulation_steps": 24})


def test_the_function_receives_the_config_and_its_words(tmp_path: Path) -> None:
    @find_executable_config(task, **known(tmp_path))
    def train(config: Any, epochs: int) -> tuple[int, str, int]:
        accelerator = accelerate.Accelerator(cpu=True, **config.accelerator)
        loader = DataLoader(dataset(), **config.dataloader)
        return loader.batch_size or 0, accelerator.mixed_precision, accelerator.gradient_accumulation_steps * epochs

    size, precision, steps = train(1)
    assert size * steps == 96 and size != 4 and precision == "bf16"


def test_the_answer_is_told_with_its_interval(tmp_path: Path) -> None:
    notes = Notes()
    find_executable_config(task, **{**known(tmp_path), "listeners": [notes]})(lambda config: None)()
    told = notes.texts[-1]
    sure = r"\d\.\d\dx \(95% interval \d\.\d\dx to \d\.\d\dx\)|at least \d\.\d\dx \(95% sure\)"
    assert re.match(rf"faster, ({sure}): batch_size=\d+, .*amp=bf16; .* tells why$", told), told


def test_a_function_that_runs_out_of_memory_is_called_with_smaller_micro_batches(tmp_path: Path) -> None:
    seen = []

    @find_executable_config(task(), **known(tmp_path))
    def train(config: Any) -> str:
        seen.append((config["batch_size"], config["accumulation_steps"]))
        if config["batch_size"] > 3:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return "trained"

    assert train() == "trained" and len(seen) > 1 and {size * steps for size, steps in seen} == {96}
    assert train() == "trained" and seen[-1] == seen[-2], "it starts where it ended"


def test_a_function_whose_loss_couples_samples_is_not_called_with_smaller_micro_batches(tmp_path: Path) -> None:
    def in_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))

    coupled = Task.from_loader(net(), DataLoader(dataset(), batch_size=8), in_batch)
    seen = []

    @find_executable_config(coupled, **rewarding_cutting(coupled, tmp_path))
    def train(config: Any) -> None:
        seen.append((config["batch_size"], config["accumulation_steps"]))
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    assert seen == [(8, 1)] and "couples the samples" in caught.value.__notes__[0]


def normalised() -> torch.nn.Module:
    return torch.nn.Sequential(*net().children(), torch.nn.BatchNorm1d(CLASSES))


def test_a_function_whose_model_has_batch_normalisation_is_not_called_with_smaller_micro_batches(
    tmp_path: Path,
) -> None:
    of_it = Task.from_loader(normalised(), DataLoader(dataset(), batch_size=8), torch.nn.CrossEntropyLoss())
    seen = []

    @find_executable_config(of_it, **rewarding_cutting(of_it, tmp_path))
    def train(config: Any) -> None:
        seen.append((config["batch_size"], config["accumulation_steps"]))
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    assert seen == [(8, 1)] and "batch normalisation would see smaller micro batches" in caught.value.__notes__[0]


def test_batch_normalisation_may_see_smaller_micro_batches_if_accumulation_is_included_and_each_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered(monkeypatch, {"has_batchnorm": True}, batch_size=8, accumulation_steps=1)
    seen, notes = [], Notes()

    @find_executable_config(task, listeners=[notes], include=["accumulation_steps"])
    def train(config: Any) -> None:
        seen.append((config["batch_size"], config["accumulation_steps"]))
        if len(seen) < 3:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    train()
    assert seen == [(8, 1), (4, 2), (2, 4)]
    again = "train ran out of memory: it is called again with batch"
    assert notes.warnings == [f"{again} 4 x2", f"{again} 2 x4"]


@pytest.mark.parametrize(("steps", "parts"), [(2, ("loss_weight",)), (1, ("loss_weight",)), (2, ())])
def test_an_answer_that_accumulates_says_that_accelerate_does_not_know_the_tasks_weights(
    steps: int, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, {"parts": parts}, batch_size=8, accumulation_steps=steps)
    notes = Notes()
    find_executable_config(task, listeners=[notes])(lambda config: None)()
    if steps == 2 and parts:
        (told,) = notes.warnings
        assert (
            "weights of micro batches are not Accelerate's: micro batches count alike there" in told
            and "multiply the loss" in told
        )
    else:
        assert not notes.warnings


@pytest.mark.parametrize("of_task", [True, False])
def test_the_precision_of_an_accelerator_that_is_there_already_is_kept(tmp_path: Path, of_task: bool) -> None:
    """As in Accelerate's own example, which makes it outside of the function, or where what makes the task needs one."""

    def made() -> Task:
        if of_task:
            accelerate.Accelerator(cpu=True)
        return task()

    if not of_task:
        accelerate.Accelerator(cpu=True, mixed_precision="no")

    notes = Notes()

    @find_executable_config(made, **{**known(tmp_path), "listeners": [notes]})
    def train(config: Any) -> tuple[dict[str, Any], str]:
        return config.accelerator, accelerate.Accelerator(cpu=True, **config.accelerator).mixed_precision

    said, precision = train()
    assert said["mixed_precision"] == precision == "no" and said["gradient_accumulation_steps"] < 24
    assert "make the Accelerator in the function" in notes.texts[0]


def test_what_accelerate_launch_hands_over_is_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    baselines = []
    found = but(answer(""), config={"batch_size": 4})
    monkeypatch.setattr(
        "autotune.integrations.accelerate.search", lambda task, *_, **__: baselines.append(task.baseline) or found
    )
    find_executable_config(task)(lambda config: None)()
    assert baselines == [{"amp": "bf16", "compile": "off", **(task().baseline or {})}]


@pytest.mark.parametrize(("by", "device"), [("the launcher", "cpu"), ("an Accelerator", "cpu"), ("nobody", "auto")])
def test_the_search_takes_place_where_accelerate_will_train(
    by: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "the launcher":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    elif by == "an Accelerator":
        accelerate.Accelerator(cpu=True)
    given, found = [], but(answer(""), config={"batch_size": 4})
    monkeypatch.setattr("autotune.integrations.accelerate.search", lambda *_, **options: given.append(options) or found)
    find_executable_config(task, listeners=())(lambda config: None)()
    assert given == [{"device": device}]


def answered(monkeypatch: pytest.MonkeyPatch, subject: dict[str, Any] | None = None, **config: Any) -> None:
    """A search finds this config, of what `subject` says."""
    found = but(answer(""), config=config, **(subject or {}))
    monkeypatch.setattr("autotune.integrations.accelerate.search", lambda *_, **__: found)


def test_an_accelerator_that_trains_other_batches_than_the_config_is_refused_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered(monkeypatch, batch_size=8, accumulation_steps=2)

    def train(config: Any, **arguments: Any) -> int:
        return accelerate.Accelerator(cpu=True, **arguments).gradient_accumulation_steps

    tuned = find_executable_config(task)(train)
    assert tuned() == 1  # the function accumulates by itself
    assert tuned(gradient_accumulation_steps=2) == 2
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=4)
    with pytest.raises(TaskError, match=r"with accumulation_steps=4, and the config is accumulation_steps=2; leave"):
        tuned(gradient_accumulation_plugin=plugin)
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert made.gradient_accumulation_steps == 4, "outside of the function nothing is looked at"


def test_options_of_ddp_that_were_not_measured_are_told_when_the_accelerator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered(monkeypatch, batch_size=8, accumulation_steps=1, bucket_mb=25)
    notes, of_ddp = Notes(), accelerate.utils.DistributedDataParallelKwargs(bucket_cap_mb=100)

    @find_executable_config(task, listeners=[notes])
    def train(config: Any) -> None:
        accelerate.Accelerator(cpu=True, kwargs_handlers=[of_ddp])

    for module in ("accelerator", "base"):
        monkeypatch.setattr(f"autotune.integrations.{module}.launched_world", lambda: World(size=2))
    train()
    assert (
        notes.texts[-1]
        == "the Accelerator has bucket_mb=100, and probes had bucket_mb=25: state it as the task's baseline"
    )


@pytest.mark.parametrize("stated", [None, {"batch_size": 4}])
def test_what_accelerate_launch_hands_over_says_nothing_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any] | None
) -> None:
    """`accelerate launch` always names a precision. A batch of 32 is what the user runs only if the user says so."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    searched = []
    found = but(answer(""), config={"batch_size": 4})
    monkeypatch.setattr(
        "autotune.integrations.accelerate.search", lambda task, *_, **__: searched.append(task) or found
    )
    plain = Task(build_model=net, train_dataset=dataset, baseline=stated)
    find_executable_config(plain)(lambda config: None)()
    inspected = inspect_task(searched[0], device="cpu", memory_limit_bytes=None)
    assert inspected["baseline"]["batch_size"] == (4 if stated else 32)
    assert inspected["baseline_given"] is bool(stated)


def test_the_decorator_without_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"put on train without a task; write @find_executable_config\(task\)"):

        @find_executable_config
        def train(config: Any) -> None: ...


class Experiment:
    """Makes a task, as a user's own class may."""

    def task(self) -> Task:
        return task()

    def train(self, config: Any) -> None: ...


def test_whatever_makes_a_task_without_arguments_is_taken_for_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, batch_size=8, accumulation_steps=1)
    model = net()
    for made in (
        Experiment().task,
        lambda model=model: Task.from_loader(model, DataLoader(dataset())),
        functools.partial(Task.from_loader, model, DataLoader(dataset())),
    ):
        assert find_executable_config(made, listeners=[])(lambda config: config["batch_size"])() == 8
    with pytest.raises(ConfigError, match="put on train without a task"):
        find_executable_config(Experiment().train)


def test_what_accelerate_has_prepared_is_refused_with_the_next_step() -> None:
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(dataset(), batch_size=4))
    with pytest.raises(TaskError, match=r"make the task before accelerator.prepare"):
        Task.from_loader(net(), loader)
