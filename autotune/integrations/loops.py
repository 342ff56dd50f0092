"""Training loops of the user's own: `tune(model, loader, loss, optimizer)` tunes what a loop consists of; the loop stays.

```python
train_loader = autotune.integrations.loops.tune(model, train_loader, loss, optimizer, budget="2m").loader
for x, y in train_loader:
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
```
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from autotune import techniques
from autotune.errors import TaskError
from autotune.integrations.accelerate import of_this_process
from autotune.integrations.live import LiveModel
from autotune.integrations.words import changed, changes, read, search
from autotune.records.batch_plan import ACCUMULATION, BATCH_KEYS, BATCH_SIZE
from autotune.records.config import Choice
from autotune.records.result import Result
from autotune.session import Ready, prepare
from autotune.task import Task
from autotune.task.adapters import is_lightning
from autotune.task.batches import map_tensors
from autotune.task.describe import describe
from autotune.techniques.frameworks import DATALOADER, LOOP
from autotune.tuning.events import Listener

_OPTIONS = tuple(inspect.signature(DataLoader).parameters)
_STAYS = "the loop stays as it is, and with it the samples and the micro batches of an optimizer step"


@dataclass(frozen=True)
class Tuned:
    """The answer for a loop.

    Attributes:
        loader: to train with, in place of the one that was given: that one, where nothing of it changes.
        result: the whole answer.
    """

    loader: DataLoader[Any]
    result: Result


def tune(
    model: torch.nn.Module,
    loader: DataLoader[Any],
    loss: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer,
    *,
    baseline: Mapping[str, Choice] | None = None,
    listeners: Sequence[Listener] | None = None,
    **options: Any,
) -> Tuned:
    """Find what trains `model` fastest on this machine in a loop that stays as it is, and switch it on.

    The search trains copies. Then the answer is switched on in `model` and `optimizer` themselves, which keep their
    parameters, state and schedulers. Precision and layout are those of `model(...)`, also in evaluation; it returns what is
    floating in the model's own type. A Hugging Face model stops caching keys and values (`config.use_cache`), as in probes.
    Searched is what needs no other loop: no micro batch, no accumulation, no scaled loss. These are tried with
    `Task.from_loader`, for a loop of `session.step(batch)`.

    Args:
        model: on the device to train on. The loop has to call the model itself, and not a method of it.
        loader: of the training set.
        loss: of the model's output and the last element of a batch; None for the model's own, or the default losses.
        optimizer: of the model's parameters.
        baseline: what else the loop itself does, such as `{"accumulation_steps": 4, "amp": "bf16"}`; it goes on doing so.
            An `Accelerator` that exists already is asked for its precision and compilation.
        listeners: watch the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.

    Raises:
        TaskError: one of them cannot be taken, or the model was tuned before.
        AutotuneError: as `autotune.search` does.
    """
    if is_lightning(model):
        raise TaskError(
            f"{type(model).__name__} is a LightningModule, which a Trainer trains; use "
            "autotune.integrations.lightning.tune(module, datamodule, trainer)"
        )
    if isinstance(vars(model).get("forward"), _Forward):
        raise TaskError(
            "this model was tuned before, and would be compared with itself; make it and its optimizer anew"
        )
    today = {**of_this_process(), **(baseline or {})}
    task = replace(task_of(model, loader, loss, optimizer, baseline=today), fixed_accumulation=_STAYS)
    own = {
        name: today[name]
        for name, technique in techniques.REGISTRY.items()
        if today.get(name, technique.off) != technique.off
    }
    options["fix"] = {**own, **options.get("fix", {})}
    # a loader of another class may be made by other arguments
    frameworks = (LOOP, DATALOADER) if type(loader) is DataLoader else (LOOP,)
    result = search(task, frameworks, options, listeners, device=str(next(model.parameters()).device))
    said = changes(task, result, frameworks)
    found = {
        name: choice
        for name, choice in changed(task, result).items()
        if name not in own and LOOP in techniques.REGISTRY[name].frameworks
    }
    if found:
        _switch_on(found, task, model, optimizer)
    if said.get(DATALOADER):
        options_now = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
        del options_now["batch_sampler"]
        loader = DataLoader(**{**options_now, **said[DATALOADER]})
    return Tuned(loader=loader, result=result)


def _switch_on(
    found: Mapping[str, Choice], task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Let the session's own way of preparing change a model and its optimizer in place."""
    was_training = model.training
    live = replace(task, build_model=lambda: model, configure_optimizers=lambda model: optimizer)
    plan = {name: choice for name, choice in (task.baseline or {}).items() if name in BATCH_KEYS}
    state = optimizer.state_dict()["state"]
    optimizer.state.clear()  # as each technique expects it
    try:
        session = prepare(live, {**plan, **found}, device=str(next(model.parameters()).device), on_oom="raise")
    finally:
        model.train(was_training)
        if state:  # which each implementation keeps in its own place
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    model.forward = _Forward(model, session.ready)


class _Forward:
    """A model's forward as a session calls it. An object, so that a deep copy of the model has its own."""

    def __init__(self, model: torch.nn.Module, ready: Ready) -> None:
        self.__wrapped__ = model.forward  # for whoever looks at its arguments
        self._ready = ready
        self._dtype = next(model.parameters()).dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._ready((args, kwargs)) as (args, kwargs):
            output = self.__wrapped__(*args, **kwargs)
        return map_tensors(self._widened, output)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        shorter = tensor.is_floating_point() and tensor.element_size() < self._dtype.itemsize
        return tensor.to(self._dtype) if shorter else tensor


def task_of(
    model: torch.nn.Module,
    loader: DataLoader[Any],
    loss: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    **fields: Any,
) -> Task:
    """`Task.from_loader`."""
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"the model is {describe(model)}; expected a torch.nn.Module")
    for part in (loader, optimizer):
        if type(part).__module__.startswith("accelerate."):
            raise TaskError(
                f"the {type(part).__name__} was prepared by Accelerate; make the task before accelerator.prepare(...)"
            )
    live = LiveModel(model, optimizer)
    criterion = None if loss is None else Criterion(loss)
    baseline = baseline_of(loader)
    made: dict[str, Any] = {
        "build_model": live.build_model,
        "training_step": None if criterion is None else criterion.training_step,
        "loss_weight": criterion.weight if criterion is not None and criterion.ignored is not None else None,
        "configure_optimizers": None if optimizer is None else live.configure_optimizers,
        **data_of(loader),
        "baseline": {**baseline, **fields.pop("baseline", {})},
        "global_batch": baseline[BATCH_SIZE],
        "name": type(model).__name__,
    }
    steps = made["baseline"].get(ACCUMULATION, 1)
    made["global_batch"] = int(made["baseline"][BATCH_SIZE]) * int(steps)
    return Task(**{**made, **fields})


def data_of(loader: Any) -> dict[str, Any]:
    """The fields of a task for a loader's data. The loader is not read from.

    Raises:
        TaskError: it is no DataLoader, or makes its batches itself.
    """
    if not isinstance(loader, DataLoader):
        raise TaskError(f"the loader is {describe(loader)}; expected one torch.utils.data.DataLoader")
    if loader.batch_size is None:
        raise TaskError(
            "the DataLoader makes its batches by a batch_sampler or takes them from the dataset as they are, so that "
            "no other batch size can be tried; give one with a batch_size"
        )
    warnings: tuple[str, ...] = ()
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler | _InfiniteConstantSampler):
        warnings = (
            f"the DataLoader's {type(loader.sampler).__name__} was not used: probes draw samples in random order",
        )
    return {
        "train_dataset": partial(_same, loader.dataset),
        "collate_fn": loader.collate_fn,
        "warnings": warnings,
    }


def baseline_of(loader: DataLoader[Any]) -> dict[str, Choice]:
    """A loader's batch size and options as a partial config."""
    given = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return read(DATALOADER, given)


class Criterion:
    """A loss of the model's output and a target: the batch's last element is the target, the others the model's inputs."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self._loss = copy.deepcopy(loss) if isinstance(loss, torch.nn.Module) else loss  # is moved to where targets are
        self.ignored: int | None = getattr(loss, "ignore_index", None)

    def training_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise TaskError(
                f"a batch of the loader is {describe(batch)}, of which `loss` cannot be told what is the target; expected "
                "inputs and a target; else give training_step=lambda model, batch: ... in place of loss"
            )
        *inputs, target = batch
        if isinstance(self._loss, torch.nn.Module):
            self._loss.to(target.device)  # with the weights of classes, say
        return self._loss(model(*inputs), target)

    def weight(self, batch: Any) -> float:
        """How many targets the mean is over; where classes have weights, the sum of the targets' weights."""
        target = batch[-1]
        counts = target.ne(self.ignored)
        weights = getattr(self._loss, "weight", None)
        if isinstance(weights, torch.Tensor) and weights.dim() == 1 and not target.is_floating_point():
            return float(weights.to(target.device)[target[counts]].sum())
        return float(counts.sum())

    def task_identity(self) -> str:
        """What tells this loss from others in the same script."""
        return repr(self._loss)


def _same(dataset: Any) -> Any:
    return dataset
