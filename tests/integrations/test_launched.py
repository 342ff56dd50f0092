"""In a launched script rank 0 searches, the others wait, and each trains with its part of the answer."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autotune.errors import AutotuneError, TaskError
from autotune.integrations.launched import _as_if_alone, devices_of
from autotune.records.config import World
from autotune.task import Task
from tests.integrations.answers import known
from tests.integrations.test_base import dataset, net
from tests.notes import Notes
from tests.worlds import Ranks

SAMPLES = 384  # two steps of 192


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    for name in ("torch._dynamo", "optuna", "tests.integrations.test_transformers", "lightning", "accelerate"):
        with contextlib.suppress(ImportError, pytest.skip.Exception):
            import_module(name)  # once, before they part
    with Ranks(2) as started:
        yield started


@contextlib.contextmanager
def launched(world: World) -> Iterator[None]:
    """What a launcher sets, beside the group that is there."""
    numbers = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
            patch.setenv(name, str(value))
        yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


class Seen:
    """The samples that a module of the model is given, and in which arithmetic."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.samples, self.arithmetic = 0, set[bool]()
        module.register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, inputs: Any) -> None:
        self.samples += len(inputs[0])
        self.arithmetic.add(torch.is_autocast_enabled("cpu"))


def transformers_trains(world: World, folder: Path) -> Any:
    from tests.integrations.test_transformers import integration, sentences, trainer_of

    asked = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 24,
        "max_steps": -1,
        "num_train_epochs": 1,
    }
    trainer = trainer_of(
        folder,
        args=asked,
        train_dataset=sentences(SAMPLES),
        callbacks=[integration.AutotuneCallback(**known(folder, world))],
    )
    seen = Seen(trainer.model.classifier)
    trainer.train()
    args = trainer.args
    return (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        trainer.state.global_step,
        seen.samples,
        seen.arithmetic,
    )


def lightning_trains(world: World, folder: Path) -> Any:
    import lightning

    from autotune.integrations.lightning import AutotuneCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = net(), 4

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(dataset(SAMPLES), batch_size=self.batch_size)

    module, callback = Module(), AutotuneCallback(**known(folder, world))
    seen = Seen(module.net[0])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=24,
        max_epochs=1,
        callbacks=[callback],
        **quiet,
    )
    trainer.fit(module)
    return module.batch_size, trainer.accumulate_grad_batches, trainer.global_step, seen.samples, seen.arithmetic


def accelerate_trains(world: World, folder: Path) -> Any:
    import accelerate

    from autotune.integrations.accelerate import find_executable_config

    loss = torch.nn.CrossEntropyLoss()

    def task() -> Task:
        return Task.from_loader(net(), DataLoader(dataset(), batch_size=4), loss, baseline={"accumulation_steps": 24})

    @find_executable_config(task, **known(folder, world))
    def train(config: Any) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, **config.accelerator)
        model = net()
        seen = Seen(model[0])
        loader = DataLoader(dataset(SAMPLES), **config.dataloader)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        steps = 0
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
        return config["batch_size"], config["accumulation_steps"], steps, seen.samples, seen.arithmetic

    return train()


def a_loop_trains(world: World, folder: Path) -> Any:
    """Its micro batches stay: the others have learned of the precision and the optimizer."""
    from autotune.integrations.loops import tune

    model, loss = net(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset(SAMPLES), batch_size=4, sampler=DistributedSampler(dataset(SAMPLES)))
    options = known(folder, world) | {"fix": {"batch_size": 4}}
    loader = tune(model, loader, loss, optimizer, baseline={"accumulation_steps": 24}, **options).loader
    assert isinstance(loader.sampler, DistributedSampler) and optimizer.param_groups[0]["fused"]
    seen, steps = Seen(model[0]), 0
    spread = torch.nn.parallel.DistributedDataParallel(model)
    for number, (x, y) in enumerate(loader, 1):
        loss(spread(x), y).backward()
        if number % 24 == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return loader.batch_size, 24, steps, seen.samples, seen.arithmetic


def a_loop_of_accelerate_trains(world: World, folder: Path) -> Any:
    """Its `Accelerator` divides a loader's batches, accumulates, and has options of DDP."""
    import accelerate
    from accelerate import utils

    from autotune.integrations.loops import tune

    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=24,
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[utils.DistributedDataParallelKwargs(bucket_cap_mb=100)],
    )
    model, loss, notes = net(), torch.nn.CrossEntropyLoss(), Notes()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(dataset(SAMPLES), batch_size=4 * world.size)
    options = known(folder, world, bucket_mb=100) | {"fix": {"batch_size": 4}, "listeners": [notes]}
    tuned = tune(model, loader, loss, optimizer, **options)
    assert world.rank or "stays as the script has it: bucket_mb=100" in notes.texts[0]
    assert tuned.loader.batch_size == 8
    seen, steps = Seen(model[0]), 0
    spread, optimizer, loader = accelerator.prepare(model, optimizer, tuned.loader)
    for x, y in loader:
        with accelerator.accumulate(spread):
            accelerator.backward(loss(spread(x), y))
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    return tuned.result.config["batch_size"], 24, steps, seen.samples, seen.arithmetic


def train_by(world: World, folder: Path, peer: str) -> Any:
    with launched(world):
        return TRAIN[peer](world, folder)


TRAIN = {
    "transformers": transformers_trains,
    "lightning": lightning_trains,
    "accelerate": accelerate_trains,
    "accelerate, a loop": a_loop_of_accelerate_trains,
    "torch": a_loop_trains,
}


@pytest.mark.parametrize("peer", TRAIN)
def test_every_rank_trains_with_the_answer_that_the_first_has_found(ranks: Ranks, peer: str, tmp_path: Path) -> None:
    """192 samples a step as before, of all ranks together."""
    pytest.importorskip(peer.partition(",")[0])
    first, second = ranks.run(train_by, tmp_path, peer)
    size, accumulation, steps, samples, arithmetic = first
    assert (
        size * accumulation == 96 and (size == 4) == (peer in ("torch", "accelerate, a loop")) and arithmetic == {True}
    )
    assert (steps, samples) == (2, SAMPLES // 2) and first == second


def fail(world: World, folder: Path, host: str = "") -> str:
    from autotune.integrations import base

    if host:
        platform.node = lambda: host.format(world.rank)
    task = Task.from_loader(net(), DataLoader(dataset(), batch_size=4), torch.nn.CrossEntropyLoss())
    options = known(folder, world) | {"fix": {"amp": "bf61"}}
    with launched(world), pytest.raises(AutotuneError) as caught:
        base.search(task, (), options, options.pop("listeners"))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_first_rank_is_raised_in_all(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(fail, tmp_path)
    assert told[0] == told[1] and re.match(r"ConfigError: .*'bf61'.*expected one of", told[0]), told


def test_a_search_has_the_threads_of_all_ranks_and_nothing_of_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a probe's world share them out: each then has as many as a rank."""
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with launched(World(size=4)), _as_if_alone(4):
            assert torch.get_num_threads() == 12
            assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("12", "12")
            assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
        assert torch.get_num_threads() == 3
        assert (os.environ["MKL_NUM_THREADS"], os.environ["TORCHELASTIC_RUN_ID"]) == ("1", "7")
    finally:
        torch.set_num_threads(before)


def search_in_the_first_alone(world: World, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.integrations.launched.WAIT_S", 0.0)
        return "" if world.rank else fail(world, folder)


def test_a_search_that_the_others_do_not_come_to_ends_with_the_next_step(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        told, _ = ranks.run(search_in_the_first_alone, tmp_path)
    assert re.match(r"TaskError: rank 1 has not come to the search within .*; let every process", told), told


def test_several_machines_and_a_gpu_that_is_shared_are_refused_with_the_next_step(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(fail, tmp_path, "host{}")
    assert told[0] == told[1] and re.match(
        r"TaskError: .*2 machines \(host0, host1\).*on one of them first", told[0]
    ), told
    assert devices_of([("here", "cuda:1"), ("here", "cuda:0")]) == "cuda:1,0"
    with pytest.raises(TaskError, match=r"ranks 0 and 2 train on cuda:0, as each of them sees it; .*let every process"):
        devices_of([("here", "cuda:0"), ("here", "cuda:1"), ("here", "cuda:0")])
