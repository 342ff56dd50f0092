"""A decorator hands the config to a function that trains by Accelerate."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune.errors import ConfigError, TaskError
from autotune.probe.inspection import inspect_task
from autotune.task import Task
from tests.coupling.searches import rewarding_cutting
from tests.integrations.answers import LAUNCHED, known
from tests.integrations.test_base import dataset, net
from tests.notes import Notes

accelerate = pytest.importorskip("accelerate")
from autotune.integrations.accelerate import (  # noqa: E402
    choices_of_launcher,
    choices_of_shards,
    find_executable_config,
    groups_of,
    require_whole_samples,
)


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """One process has one precision, and tests of other files have chosen theirs."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


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
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
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
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    assert seen == [(8, 1)] and "couples the samples" in caught.value.__notes__[0]


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
    monkeypatch.setattr(
        "autotune.integrations.accelerate.search",
        lambda task, *_: (
            baselines.append(task.baseline)
            or SimpleNamespace(config={"batch_size": 4}, subject=SimpleNamespace(coupling=None))
        ),
    )
    find_executable_config(task)(lambda config: None)()
    assert baselines == [{"amp": "bf16", "compile": "off", **(task().baseline or {})}]


def plugin(version: int, kept: Any, offload: Any) -> Any:
    """Accelerate's settings of FSDP, which it makes on a GPU alone."""
    name = "sharding_strategy" if version == 1 else "reshard_after_forward"
    fields = {"sharding_strategy": None, "reshard_after_forward": None, name: kept}
    return SimpleNamespace(fsdp_version=version, cpu_offload=offload, **fields)


def test_what_accelerate_shards_is_read_with_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    found = choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "bf16"}, {})
    assert found == {"amp": "off", "parallel": "fsdp", "shard_dtype": "bf16", "shard_offload": False}
    for settings in (
        plugin(2, False, CPUOffloadPolicy()),
        plugin(1, ShardingStrategy.SHARD_GRAD_OP, CPUOffload(offload_params=True)),
    ):
        found = choices_of_shards(settings, {"mixed_precision": "no"}, {})
        assert found == {"amp": "off", "parallel": "fsdp_grad", "shard_offload": True}
    copies = plugin(1, ShardingStrategy.NO_SHARD, CPUOffload())
    with pytest.raises(
        TaskError, match=r"\(NO_SHARD, no\), which probes do not; expected one that shards, in fp32 or bf16"
    ):
        choices_of_shards(copies, {"mixed_precision": "no"}, {})
    with pytest.raises(TaskError, match=r"\(version 2, fp16\), which probes do not"):
        choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "fp16"}, {})


def groups(**sizes: int) -> Any:
    """What an Accelerator's state keeps of its groups of processes."""
    return SimpleNamespace(parallelism_config=SimpleNamespace(**sizes))


def test_copies_of_shards_are_read_and_what_shares_out_a_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of four; as `accelerate launch` says it, and as an Accelerator has it that is there."""
    from torch.distributed.fsdp import OffloadPolicy

    for name, value in {**LAUNCHED, "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    hybrid = groups_of(groups(dp_replicate_size=2, dp_shard_size=2))
    found = choices_of_shards(plugin(2, True, OffloadPolicy()), {"mixed_precision": "no"}, hybrid)
    assert found["parallel"] == "hsdp:2"
    with pytest.raises(TaskError, match=r"version 2, in copies, not resharded, no\), which probes do not"):
        choices_of_shards(plugin(2, False, OffloadPolicy()), {"mixed_precision": "no"}, hybrid)
    with pytest.raises(TaskError, match=r"share out sequences \(cp_size=2\).*with cp_size=1 first"):
        require_whole_samples(groups_of(groups(dp_shard_size=2, cp_size=2)))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for name in ("DP_REPLICATE", "DP_SHARD"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", "2")
    monkeypatch.setattr("autotune.integrations.accelerate._plugin", lambda: plugin(2, True, OffloadPolicy()))
    assert choices_of_launcher()["parallel"] == "hsdp:2"
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(TaskError, match=r"share out tensors \(tp_size=2\).*`autotune search --command`"):
        choices_of_launcher()


@pytest.mark.parametrize("stated", [None, {"batch_size": 4}])
def test_what_accelerate_launch_hands_over_says_nothing_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any] | None
) -> None:
    """`accelerate launch` always names a precision. A batch of 32 is what the user runs only if the user says so."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    searched = []
    monkeypatch.setattr(
        "autotune.integrations.accelerate.search",
        lambda task, *_: (
            searched.append(task) or SimpleNamespace(config={"batch_size": 4}, subject=SimpleNamespace(coupling=None))
        ),
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


def test_what_accelerate_has_prepared_is_refused_with_the_next_step() -> None:
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(dataset(), batch_size=4))
    with pytest.raises(TaskError, match=r"make the task before accelerator.prepare"):
        Task.from_loader(net(), loader)
