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

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from autotune.errors import TaskError
from autotune.group import host_or
from autotune.integrations.accelerator import (
    choices_of_accelerator,
    choices_of_launcher,
    choices_of_loop,
    device_of_this_process,
)
from autotune.integrations.base import LiveModel, batch_of_all, find_changes, name_of, read, search, words_of_changes
from autotune.records.config import ACCUMULATION, ALONE, BATCH_KEYS, BATCH_SIZE, Choice
from autotune.records.result import Result
from autotune.session import PROCESS_WIDE, Ready, lay_out, prepare
from autotune.task import Task
from autotune.task.adapters import is_lightning
from autotune.task.batches import map_tensors
from autotune.task.held import held_by
from autotune.task.usercode import describe
from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import DATALOADER, LOOP
from autotune.tuning.events import Listener

_OPTIONS = tuple(inspect.signature(DataLoader).parameters)
_TUNED = "tuned_by_autotune"
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
    training_step: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
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
        model: on the device to train on, if no `Accelerator` will put it there. The loop has to call the model itself, and
            not a method of it. In a launched script it is not wrapped yet (`DistributedDataParallel`, `accelerator.prepare`).
        loader: of the training set, with the batch size of this process.
        loss: of the model's output and the last element of a batch; None for the model's own, or the default losses.
        optimizer: of the model's parameters.
        training_step: the loss of a model on a batch, for batches of another form, beside None as `loss`. It calls the model as the
            loop does.
        baseline: what else the loop itself does, such as `{"accumulation_steps": 4, "amp": "bf16"}`; it goes on doing so.
            An `Accelerator` that exists already is asked for its device, precision, compilation, sharding, options of DDP,
            accumulation and `split_batches`, and `accelerate launch` for what it says of these where there is none yet. Without
            an `Accelerator`, options of DDP are not seen: `{"bucket_mb": 100}` states one.
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
    settings, told = choices_of_loop(getattr(loader, "batch_size", None) or 1)
    today = {**choices_of_launcher(), **choices_of_accelerator(), **settings, **(baseline or {})}
    own_step: dict[str, Any] = {} if training_step is None else {"training_step": training_step}
    task = task_of(model, loader, None if own_step else loss, optimizer, baseline=today, **own_step)
    # the loop keeps its loader, so what a session's does not have is no matter
    told = (*data_of(loader)["warnings"], *told)
    task = replace(task, fixed_accumulation=_STAYS, warnings=told, made_by=_call(loss, training_step, today))
    _require_fresh(model, optimizer)
    techniques = find_techniques()
    own = {
        name: today[name] for name, technique in techniques.items() if today.get(name, technique.off) != technique.off
    }
    options["fix"] = _fixed(own, options.get("fix", {}), options.get("exclude", ()))
    # a loader of another class may be made by other arguments
    frameworks = (LOOP, DATALOADER) if type(loader) is DataLoader else (LOOP,)
    device = device_of_this_process() or _device_of(model)
    result = search(task, frameworks, options, listeners, device=device)
    if said := words_of_changes(task, result, frameworks).get(DATALOADER):
        loader = _changed_loader(loader, said)
    found = {
        name: choice
        for name, choice in find_changes(task, result).items()
        if name not in own and LOOP in techniques[name].frameworks
    }
    if found:
        _switch_on(found, task, model, optimizer, device)
    return Tuned(loader=loader, result=result)


def _call(loss: Any, training_step: Any, today: Mapping[str, Choice]) -> str:
    """The call of `task_of`, by the names that `tune` has for what was given."""
    given = ["model", "loader", "None" if loss is None or training_step is not None else "loss", "optimizer"]
    given += [] if training_step is None else ["training_step=training_step"]
    given += [f"baseline={dict(today)!r}"] if today else []
    return f"{__name__}.task_of({', '.join(given)})"


def _require_fresh(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise TaskError where there is no optimizer to switch the answer on in, or the model has an answer already."""
    if optimizer is None:
        raise TaskError("the optimizer is None; expected the loop's own torch.optim.Optimizer")
    if hasattr(vars(model).get("forward"), _TUNED):
        raise TaskError(
            "this model was tuned before, and would be compared with itself; make it and its optimizer anew"
        )


def _device_of(model: torch.nn.Module) -> str:
    """Where the loop trains: where the model is, or will be, where the process group can put nothing on the host together."""
    gathers = distributed.is_available() and distributed.is_initialized()
    if gathers and host_or(device := torch.device("cuda")) == device:
        return f"cuda:{torch.cuda.current_device()}"
    return name_of(next(model.parameters()).device)


def _fixed(own: Mapping[str, Choice], fix: Mapping[str, Choice], exclude: Sequence[str]) -> dict[str, Choice]:
    """What the search may not change: what the loop itself does, and what the user fixed beside it."""
    for name in own.keys() & fix.keys():
        if find_techniques().validate(name, fix[name]) != own[name]:
            raise TaskError(
                f"fix={{{name!r}: {fix[name]!r}}}, but the loop itself has {own[name]!r}; change the loop, or leave it out"
            )
    return {**{name: choice for name, choice in own.items() if name not in exclude}, **fix}


def _changed_loader(loader: DataLoader[Any], said: Mapping[str, Any]) -> DataLoader[Any]:
    """A loader with other options. Torch says which of the old ones they exclude: those of workers where there are none, say."""
    options = dict(said)
    # other options need workers
    make = functools.partial(DataLoader, dataset=loader.dataset, num_workers=loader.num_workers)
    for name in _OPTIONS:
        if name not in options and hasattr(loader, name):
            with contextlib.suppress(ValueError):
                make(**options, **{name: getattr(loader, name)})
                options[name] = getattr(loader, name)
    made = make(**options)
    if not made.num_workers:
        made.timeout = 0  # which torch refuses later, when batches are asked for
    return made


def _switch_on(
    found: Mapping[str, Choice], task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> None:
    """Let the session's own way of preparing change a model and its optimizer in place."""
    modes = [(module, module.training) for module in model.modules()]
    live = replace(
        task,
        build_model=lambda: model,
        # without one the model may be built once more, to see whether it takes steps of its own
        training_step=task.training_step or task.loss,
        configure_optimizers=lambda model: optimizer,
        global_batch=None,
    )
    plan = {name: choice for name, choice in (task.baseline or {}).items() if name in BATCH_KEYS}
    state, packed = dict(optimizer.state), optimizer.state_dict()["state"]
    optimizer.state.clear()  # as each technique expects it
    try:
        ready = prepare(live, {**plan, **found}, device=device, on_oom="raise", world=ALONE).ready
        PROCESS_WIDE.keep()
    finally:
        for module, was_training in modes:
            module.training = was_training
        if any(find_techniques()[name].phase is Phase.OPTIMIZER for name in found) and state:
            # each implementation keeps it in its own place
            optimizer.load_state_dict({**optimizer.state_dict(), "state": packed})
        else:
            optimizer.state.update(state)
        lay_out(optimizer)
    if ready.contexts or ready.transforms:
        model.forward = types.MethodType(_forward(model, ready), model)


def _forward(model: torch.nn.Module, ready: Ready) -> Callable[..., Any]:
    """A model's forward as a session calls it: a function, which a copy of the model binds to itself.

    It has no generators, at which Dynamo would break the graph, and leaves tensors on the devices where the loop has them.
    """
    before = model.forward  # of its class, or of a wrapper on the model
    plain: Callable[..., Any] | None = getattr(before, "__func__", None)
    own = next(model.parameters()).dtype
    device_type = next(model.parameters()).device.type
    is_short = _within(ready.contexts, lambda: torch.is_autocast_enabled(device_type))
    is_short = is_short and not torch.is_autocast_enabled(device_type)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        shorter = tensor.is_floating_point() and tensor.element_size() < own.itemsize
        return tensor.to(own) if shorter else tensor

    @functools.wraps(before if plain is None else plain)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for transform in ready.transforms:
            args, kwargs = transform((args, kwargs))
        inputs = args if plain is None else (self, *args)
        output = _within(ready.contexts, lambda: (plain or before)(*inputs, **kwargs))
        return map_tensors(widened, output) if is_short else output

    setattr(forward, _TUNED, True)
    return forward


def _within(contexts: Sequence[Callable[[], Any]], call: Callable[[], Any]) -> Any:
    """What a function returns within contexts, the first one outermost."""
    if not contexts:
        return call()
    with contexts[0]():
        return _within(contexts[1:], call)


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
    live = LiveModel(model, optimizer, keeps_modes=True)
    criterion = None if loss is None else Criterion(loss)
    data = data_of(loader)
    baseline = {**baseline_of(loader), **fields.pop("baseline", {})}
    made: dict[str, Any] = {
        "build_model": live.build_model,
        "training_step": None if criterion is None else criterion.training_step,
        "loss_weight": criterion.weight if criterion is not None and criterion.ignored is not None else None,
        "configure_optimizers": None if optimizer is None else live.configure_optimizers,
        **data,
        "warnings": (*data["warnings"], *_not_taken_over(loader)),
        "baseline": baseline,
        "global_batch": batch_of_all(int(baseline[BATCH_SIZE]) * int(baseline.get(ACCUMULATION, 1))),
        "name": type(model).__name__,
    }
    return Task(**{**made, **fields})


def _not_taken_over(loader: DataLoader[Any]) -> Sequence[str]:
    """What a session's loader does differently, in a sentence; nothing where that is as it was."""
    streams = isinstance(loader.dataset, IterableDataset)
    lost = []
    if loader.drop_last:
        lost.append("drop_last=True (its last step has the samples that are left)")
    if isinstance(loader.sampler, SequentialSampler):
        lost.append("shuffle=False (its samples come in random order)")
    if loader.worker_init_fn is not None and streams:
        lost.append(
            "worker_init_fn (where that gives each worker its part of the stream, each one reads all of it: divide the stream in the "
            "dataset's __iter__, by torch.utils.data.get_worker_info())"
        )
    elif loader.worker_init_fn is not None:
        lost.append("worker_init_fn")
    if not lost:
        return ()
    return (
        f"a session's loader does not have the DataLoader's {', '.join(lost)}; where that matters, train on your own loader, with the "
        "samples of an optimizer step as its batch_size, by session.step(batch)",
    )


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
    if not isinstance(
        loader.sampler, RandomSampler | SequentialSampler | DistributedSampler | _InfiniteConstantSampler
    ):
        warnings = (
            f"the DataLoader's {type(loader.sampler).__name__} was not used: probes draw samples in random order",
        )
    return {
        "train_dataset": functools.partial(_same, loader.dataset),
        "collate_fn": loader.collate_fn,
        "warnings": warnings,
    }


def baseline_of(loader: DataLoader[Any]) -> dict[str, Choice]:
    """A loader's batch size and options as a partial config."""
    given = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return read(DATALOADER, given)


class Criterion:
    """A loss of the model's output and a target: the batch's last element is the target, the others the model's inputs."""

    calls_model = True  # itself, and no method of it

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self._loss = copy.deepcopy(loss) if isinstance(loss, torch.nn.Module) else loss  # is moved to where targets are
        self.ignored: int | None = getattr(loss, "ignore_index", None)

    def training_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        *inputs, target = _inputs_and_target(batch)
        if isinstance(self._loss, torch.nn.Module):
            self._loss.to(target.device)  # with the weights of classes, say
        return self._loss(model(*inputs), target)

    def weight(self, batch: Any) -> float:
        """How many targets the mean is over; where classes have weights, the sum of the targets' weights."""
        target = _inputs_and_target(batch)[-1]
        counts = target.ne(self.ignored)
        weights = getattr(self._loss, "weight", None)
        if isinstance(weights, torch.Tensor) and weights.dim() == 1 and not target.is_floating_point():
            return float(weights.to(target.device)[target[counts]].sum())
        return float(counts.sum())

    def task_identity(self) -> str:
        """What distinguishes this loss from others in the same script."""
        return f"{self._loss!r} {held_by(self._loss)}"


def _inputs_and_target(batch: Any) -> Sequence[Any]:
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise TaskError(
            f"a batch of the loader is {describe(batch)}, and it is not clear which part of it is the target of `loss`; "
            "expected inputs and a target; else give None as the loss, and training_step=lambda model, batch: ..."
        )
    return batch


def _same(dataset: Any) -> Any:
    return dataset
