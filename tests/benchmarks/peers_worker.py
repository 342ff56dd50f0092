"""One peer's search for a batch size, in a process of its own under a memory limit. Started by `peers.py`.

Each tool is used as its documentation says, on the study's own model, batches, loss and optimizer. Every size that trains is
appended to a file at once, so that a tool that dies still has told how far it came.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from autotune.devices.cpu import CpuDevice
from autotune.task import Task, load_task
from autotune.task.batches import split

STEPS = 3  # Lightning's default `steps_per_trial`; Accelerate's loop takes as many
STEPS_AN_EPOCH = 100
START = 128  # Accelerate's default `starting_batch_size`

Tell = Callable[[dict[str, Any]], None]


class Samples(torch.utils.data.Dataset[Any]):
    """The study's samples, drawn at random: from its data set, or from what `make_batch` returns.

    There are more of them than any batch takes: with fewer, Lightning's scaler returns sizes that failed (`power`) or never
    ends (`binsearch`).
    """

    def __init__(self, task: Task) -> None:
        assert task.global_batch is not None
        self._task, self._length = task, STEPS_AN_EPOCH * task.global_batch

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, positions: list[int]) -> Any:
        """A whole batch at once, as `make_batch` makes it."""
        dataset = self._task.dataset()
        if dataset is None:
            return self._task.batch(len(positions))
        drawn = torch.randint(len(dataset), (len(positions),)).tolist()
        collate = self._task.collate_fn or torch.utils.data.default_collate
        return collate([dataset[position] for position in drawn])


def loader(task: Task, batch_size: int) -> DataLoader[Any]:
    """The study's batches, loaded in this process."""
    return DataLoader(Samples(task), batch_size=batch_size, collate_fn=lambda batch: batch)


def num_samples(task: Task, batch: Any) -> int:
    """Samples of a batch that a tool's own loader made."""
    return sum(split(batch, task.cuts(), 2**31).sizes)


def scale_batch_size(task: Task, mode: str, tell: Tell) -> int | None:
    """`lightning.pytorch.tuner.Tuner.scale_batch_size` with its default settings."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 1
            self.model = task.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return task.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer(self.model)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(task, self.batch_size)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            tell({"trained": num_samples(task, batch)})

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return lightning.pytorch.tuner.Tuner(trainer).scale_batch_size(Module(), mode=mode)


def find_executable_batch_size(task: Task, tell: Tell) -> int:
    """`accelerate.utils.find_executable_batch_size` around a training loop, which here ends after a few steps."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert task.global_batch is not None

    @accelerate.utils.find_executable_batch_size(starting_batch_size=min(START, task.global_batch))
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        model = task.model()
        model, optimizer, batches = accelerator.prepare(model, task.optimizer(model), loader(task, batch_size))
        for batch in itertools.islice(batches, STEPS):
            optimizer.zero_grad()
            accelerator.backward(task.loss(model, batch))
            optimizer.step()
            tell({"trained": num_samples(task, batch)})
        return batch_size

    return int(train())


TOOLS: dict[str, Callable[[Task, Tell], int | None]] = {
    "Lightning, power": lambda task, tell: scale_batch_size(task, "power", tell),
    "Lightning, binsearch": lambda task, tell: scale_batch_size(task, "binsearch", tell),
    "Accelerate": find_executable_batch_size,
}


def trifle() -> Task:
    """A task of two parameters: a tool that has run on it has loaded what it loads."""
    return Task(
        build_model=lambda: torch.nn.Linear(1, 1),
        make_batch=lambda size: (torch.ones(size, 1), torch.ones(size, 1)),
        global_batch=4,
    )


def main() -> None:
    """Run one tool and append what it does to `--out`, a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--training-bytes", type=int, required=True, help="memory beside what the libraries hold")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    def tell(message: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(message) + "\n")

    find = TOOLS[options.tool]
    find(trifle(), lambda message: None)
    task = load_task(options.model)
    task.dataset()
    device = CpuDevice()
    torch.manual_seed(0)
    device.limit_memory(device.current_bytes() + options.training_bytes)
    started = time.perf_counter()
    try:
        end: dict[str, Any] = {"returned": find(task, tell)}
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        end = {"raised": f"{type(error).__name__}: {first_line}"}
    tell({**end, "wall_s": time.perf_counter() - started})


if __name__ == "__main__":
    main()
