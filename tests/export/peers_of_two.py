"""Run by two processes: the session's losses and, config by config, those of what is exported, run by the peers.

`python -m torch.distributed.run --nproc-per-node 2 -m tests.export.peers_of_two FILE PEER:CONFIG...` writes to FILE what the losses
of the steps are, by peer and config. The dataset is one global batch, so that a step takes all of it in whatever order.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import autotune
from autotune.export import export
from autotune.group import gather
from autotune.records.result import Result
from tests.report.sample_study import answer, but

GLOBAL_BATCH, NUM_STEPS, WIDTH = 16, 4, 8
CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {"batch_size": 4, "bucket_mb": 1, "ddp_bucket_view": True},
    "zero1": {"batch_size": 4, "parallel": "zero1"},
    "fsdp": {"batch_size": 4, "parallel": "fsdp"},
    "fsdp_grad": {"batch_size": 4, "parallel": "fsdp_grad"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """In the form that Hugging Face's Trainer takes; it keeps the losses of its micro batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x), labels)
        self.seen.append(float(loss.detach()))
        return {"loss": loss}

    def losses(self) -> list[float]:
        """Of each step, the mean over the micro batches of both processes."""
        of_all = torch.tensor(gather(self.seen)).mean(dim=0)
        return of_all.view(NUM_STEPS, -1).mean(dim=1).tolist()


def make_dataset() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(GLOBAL_BATCH, WIDTH, generator=draw), torch.randint(3, (GLOBAL_BATCH,), generator=draw)
    return [{"x": x[number], "labels": labels[number]} for number in range(GLOBAL_BATCH)]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


task = autotune.Task(
    build_model=Net, train_dataset=make_dataset, configure_optimizers=make_optimizer, global_batch=GLOBAL_BATCH
)


def answer_of(config: dict[str, Any], places: dict[str, dict[str, Any]]) -> Result:
    """The answer of a search for two processes on the CPU that found the config."""
    return but(
        answer("sqlite:///gpt.db"),
        config=config,
        device="cpu",
        model=f"{__file__}:task",
        parts=("build_model", "train_dataset", "configure_optimizers"),
        num_processes=2,
        places=places,
        warnings=(),
    )


def on_gpus(result: Result) -> Result:
    """The answer as one of two GPUs, if it shards: Accelerate does that on none but GPUs. Its own code then shards on the CPU."""
    if not str(result.config["parallel"]).startswith("fsdp"):
        return result
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    return but(result, device="cuda:0")


def run_torch(result: Result, file: Path) -> list[float]:
    if distributed.get_rank() == 0:
        file.write_text(export(result, "torch").text)
    distributed.barrier()
    script = runpy.run_path(str(file), run_name="exported")
    return [float(script["step"](batch)) for _ in range(NUM_STEPS) for batch in script["steps"]()]


def run_transformers(result: Result, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    said = json.loads(export(on_gpus(result), "transformers").text)
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    optimizer = {"learning_rate": 0.01, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(output_dir=str(folder), max_steps=NUM_STEPS, **quiet, **optimizer, **said)
    net = Net()
    trainer = Trainer(model=net, args=arguments, train_dataset=make_dataset())
    trainer.train()
    wrapped = "FSDPModule" if "fsdp" in said else "DistributedDataParallel"
    assert wrapped in {kind.__name__ for kind in type(trainer.model_wrapped).__mro__}
    return net.losses()


def run_lightning(result: Result, folder: Path) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    session = autotune.prepare(replace(task, build_model=Module), result.config, device="cpu")
    said = json.loads(export(replace(result, places=session.places), "lightning").text)
    if "configure_model" in said:
        own: dict[str, Any] = {}
        exec("\n".join(said["configure_model"]), own)
        Module.configure_model = own["configure_model"]
    strategy = said["trainer"]["strategy"]
    if not isinstance(strategy, str):
        module, _, name = strategy["class_path"].rpartition(".")
        said["trainer"]["strategy"] = getattr(import_module(module), name)(**strategy["init_args"])
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=NUM_STEPS,
        default_root_dir=folder,
        **dict.fromkeys(quiet, False),
        **said["trainer"],
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(make_dataset(), **said["dataloader"]))
    return module.net.losses()


def run_accelerate(result: Result, folder: Path) -> list[float]:
    """Under `accelerate launch` with the file."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
    from torch.utils.data import DataLoader

    result = on_gpus(result)
    calls = [line.partition(": ")[2] for line in export(result, "accelerate").text.splitlines() if "# In train" in line]
    names = {"Accelerator": Accelerator, "DistributedDataParallelKwargs": DistributedDataParallelKwargs}
    names |= {"DataLoader": DataLoader, "dataset": make_dataset()}
    accelerator, loader = (eval(call, names) for call in calls[:2])
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, make_optimizer(net), loader)
    for batch in (batch for _ in range(NUM_STEPS) for batch in loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    wrapped = "FSDPModule" if accelerator.is_fsdp2 else "DistributedDataParallel"
    assert wrapped in {kind.__name__ for kind in type(model).__mro__}
    return net.losses()


def run_deepspeed(result: Result, folder: Path) -> list[float]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # collectives of its own, which it would compile: minutes
    )
    said = json.loads(export(result, "deepspeed").text)
    net = Net()
    engine, *_ = deepspeed.initialize(model=net, optimizer=make_optimizer(net), config=said, dist_init_required=False)
    assert engine.train_batch_size() == GLOBAL_BATCH
    assert engine.zero_optimization_stage() == said.get("zero_optimization", {}).get("stage", 0)
    sampler = torch.utils.data.DistributedSampler(make_dataset())
    size = engine.train_micro_batch_size_per_gpu()
    loader = torch.utils.data.DataLoader(make_dataset(), batch_size=size, sampler=sampler)
    for batch in (batch for _ in range(NUM_STEPS) for batch in loader):
        engine.backward(engine(**batch)["loss"])
        engine.step()
    return net.losses()


PEERS: dict[str, Callable[[Result, Path], list[float]]] = {
    "torch": run_torch,
    "transformers": run_transformers,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "deepspeed": run_deepspeed,
}


def main(file: str, *runs: str) -> None:
    distributed.init_process_group("gloo")
    found: dict[str, list[float]] = {}
    for name in CONFIGS:
        if not (peers := [peer for peer, _, of in (run.partition(":") for run in runs) if of == name]):
            continue
        session = autotune.prepare(task, CONFIGS[name], device="cpu")
        found[f"session:{name}"] = [float(session.step(batch)) for _ in range(NUM_STEPS) for batch in session.loader]
        for peer in peers:
            result = answer_of(session.config.as_dict(), session.places)
            found[f"{peer}:{name}"] = PEERS[peer](result, Path(file).parent / f"{peer}_{name}.py")
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
