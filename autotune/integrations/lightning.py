"""Lightning: `tune(module, datamodule, trainer)` says what to give to `Trainer` and to the loader, `AutotuneCallback` sets it.

Lightning is one library under two names, `lightning` and `pytorch_lightning`, whose classes are not each other's. What is given is
tuned with the classes of the name that it was imported by.

```python
found = autotune.integrations.lightning.tune(module, datamodule, trainer, budget="2m")
datamodule.batch_size = found.dataloader["batch_size"]
Trainer(max_epochs=3, **found.trainer).fit(module, datamodule)
```
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DistributedSampler

from autotune.devices import TYPES
from autotune.errors import TaskError
from autotune.export.base import arguments
from autotune.group import launched_world
from autotune.integrations.base import (
    LiveModel,
    batch_of_all,
    listeners_here,
    name_of,
    read,
    require_said,
    search,
    words_of_changes,
)
from autotune.integrations.loops import baseline_of, data_of
from autotune.randomness import keep_randomness
from autotune.records.config import ACCUMULATION, BATCH_SIZE
from autotune.records.result import Result
from autotune.task import Task
from autotune.task.adapters import attach, is_lightning, overrides, sole_loader
from autotune.task.trainer_stand_in import SilentLogger, TrainerStandIn
from autotune.task.usercode import describe
from autotune.techniques import find_techniques
from autotune.techniques.frameworks import BATCH, DATALOADER, LIGHTNING
from autotune.tuning.events import Listener, Listeners

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision

# What Lightning's parts are called, by the name that it is imported by: (what trains, what that is built on).
_NAMES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
if not any(find_spec(name) for name in _NAMES):
    raise ModuleNotFoundError(
        "autotune.integrations.lightning tunes Lightning, which is not installed in this environment; "
        "`pip install lightning` or `pip install pytorch-lightning` adds it",
        name="lightning",
    )
_FRAMEWORKS = (LIGHTNING, DATALOADER)
_READ = ("accumulate_grad_batches", "precision")
_SEEN = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision",
    "log_every_n_steps", "check_val_every_n_epoch", "default_root_dir", "world_size", "num_devices",
)  # fmt: skip
_SHARDED = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
_LIMIT, _OVERFIT, _INTERVAL = "limit_train_batches", "overfit_batches", "val_check_interval"


@dataclass(frozen=True)
class Tuned:
    """The answer in Lightning's words.

    Attributes:
        trainer: arguments of `lightning.Trainer`; `limit_train_batches`, `overfit_batches` and `val_check_interval` are among them where
            the trainer that was given counts micro batches by them.
        dataloader: arguments of the training loader, `torch.utils.data.DataLoader`.
        result: the whole answer.
    """

    trainer: dict[str, Any]
    dataloader: dict[str, Any]
    result: Result


def tune(
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    trainer: Trainer | None = None,
    train_dataloaders: Any = None,
    *,
    listeners: Sequence[Listener] | None = None,
    **options: Any,
) -> Tuned:
    """Find what trains `module` fastest on this machine. The samples per optimizer step are kept, and those of an epoch and between
    validations where the trainer limits them by a number of micro batches.

    Searched is what the arguments of `Trainer` and `DataLoader` can say. Probes run the module's own `training_step` and
    `configure_optimizers` on copies of it; manual optimization is one unit, in which no technique reaches. With `eval=True`,
    `result.evaluation` has the batch size for the loader of `val_dataloader()`: `validation_step` is run to find it.

    Args:
        module: as it stands before `fit`.
        datamodule: makes the training loader; None for the trainer's or the module's own. It is asked on a copy.
        trainer: its precision, accumulation, clipping, device and options of DDP are the baseline; None for those of `Trainer()`.
        train_dataloaders: in place of `datamodule`, one `DataLoader`.
        listeners: watch the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.

    Raises:
        TaskError: this cannot be tuned, with the reason.
        AutotuneError: as `autotune.search` does.
    """
    loader = _loader_of(module, datamodule, trainer, train_dataloaders)
    owner = datamodule or getattr(trainer, "datamodule", None)
    task = _task(module, trainer, loader, _call(owner, trainer, train_dataloaders))
    watched_by = listeners_here(listeners)
    if options.get("eval"):
        made = _made_of(module, owner, "val_dataloader", is_prepared=False)
        task = replace(task, **_validated_on(made))
    result = search(task, _FRAMEWORKS, options, watched_by, device=_device(trainer))
    said, unsaid = arguments(result, {}, _FRAMEWORKS, "neither Trainer nor DataLoader has an argument for it")
    require_said(unsaid)
    said[DATALOADER].pop("shuffle", None)  # as it was; a stream has none
    said[LIGHTNING].pop("strategy", None)  # as it was, and as options of its class, which Trainer does not take
    said[LIGHTNING] |= _counts(trainer, loader, result, watched_by)
    return Tuned(trainer=said[LIGHTNING], dataloader=said[DATALOADER], result=result)


def task_of(
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    trainer: Trainer | None = None,
    train_dataloaders: Any = None,
) -> Task:
    """What Lightning would train, as a task.

    Args:
        module, datamodule, trainer, train_dataloaders: as in `tune`.

    Raises:
        TaskError: it cannot be tuned, with the reason and what to do.
    """
    loader = _loader_of(module, datamodule, trainer, train_dataloaders)
    return _task(module, trainer, loader, _call(datamodule, trainer, train_dataloaders))


def _call(datamodule: LightningDataModule | None, trainer: Trainer | None, train_dataloaders: Any = None) -> str:
    """The call of `task_of`, by the names that it has for what was given."""
    given = {"datamodule": datamodule, "trainer": trainer, "train_dataloaders": train_dataloaders}
    named = [f"{name}={name}" for name, value in given.items() if value is not None]
    return f"{__name__}.task_of({', '.join(['module', *named])})"


def _task(module: LightningModule, trainer: Trainer | None, loader: Any, made_by: str) -> Task:
    given = {"precision": "32-true"} if trainer is None else _given(trainer)
    data = data_of(loader)
    baseline = {**read(LIGHTNING, given), **baseline_of(loader)}
    return Task(
        build_model=LiveModule(module, _stand_in(trainer, loader)).build_model,
        **data,
        baseline=baseline,
        global_batch=batch_of_all(int(baseline[BATCH_SIZE]) * int(baseline.get(ACCUMULATION, 1))),
        max_grad_norm=_clipping(module, trainer),
        name=type(module).__name__,
        made_by=made_by,
    )


class LiveModule(LiveModel):
    """Copies of a LightningModule, with a stand-in in place of the trainer that it may be attached to."""

    def __init__(self, module: LightningModule, trainer: TrainerStandIn) -> None:
        super().__init__(_alone(module))
        self._trainer = trainer

    def build_model(self) -> torch.nn.Module:
        """A copy that is set up for `fit`."""
        model = super().build_model()
        attach(model, replace(self._trainer))
        if overrides(type(model), "setup"):
            model.setup("fit")  # type: ignore[operator]
        return model

    def task_identity(self) -> str:
        """As of any model, with the hyperparameters from which the module makes its optimizer."""
        hparams: Any = self.model.hparams
        return f"{super().task_identity()} {dict(hparams)}"


class AutotuneCallback:
    """Tunes what `fit` is about to train, where `BatchSizeFinder` finds a batch size: `Trainer(callbacks=[AutotuneCallback()])`.

    It sets the trainer's accumulation and precision and its `limit_train_batches` and `val_check_interval` where these count micro
    batches, and attributes of the module, its `hparams` or the datamodule: the batch size, and each option of the loader that has an
    attribute of its name there. `train_dataloader()` has to read the batch size itself, since a datamodule's `setup()` has been called
    by then.

    Attributes:
        result: the whole answer, once `fit` has begun; None before. With `eval=True`, `result.evaluation` has the batch size
            for the validation loader.

    Args:
        batch_arg_name: the attribute from which the training loader takes its batch size, as in `BatchSizeFinder`.
        listeners: as in `tune`.
        **options: as in `tune`.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """A callback of Lightning's, by each name that it has been imported by."""
        return object.__new__(_as_callback(cls))

    def __reduce__(self) -> Any:
        """Copied and pickled as the class that the user named."""
        named = next(cls for cls in type(self).__mro__ if cls.__dict__.get("_is_named", True))
        return named.__new__, (named,), vars(self)

    def __init__(
        self, batch_arg_name: str = "batch_size", *, listeners: Sequence[Listener] | None = None, **options: Any
    ) -> None:
        self._name, self._listeners, self._options = batch_arg_name, listeners, options
        self.result: Result | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Search and put the answer in, before anything of the trainer depends on it."""
        if stage != "fit":
            return
        self.result = None  # that of an earlier fit says nothing of this one
        if not trainer.fit_loop._data_source.is_module():
            raise TaskError(
                "AutotuneCallback cannot change a loader that was given to fit(); give a datamodule, or give the loader "
                "to autotune.integrations.lightning.tune(module, trainer=trainer, train_dataloaders=loader)"
            )
        parsing = _part(pl_module, "utilities.parsing")
        if not parsing.lightning_hasattr(pl_module, self._name):
            raise TaskError(
                f"neither the module, its hparams nor the datamodule has an attribute {self._name}; make the loader from "
                "one, or name it with AutotuneCallback(batch_arg_name=...)"
            )
        options = dict(self._options)
        options["exclude"] = (*options.get("exclude", ()), *_not_reached(pl_module))
        loader = _loader_of(pl_module, None, trainer, is_prepared=True)
        task = _task(pl_module, trainer, loader, _call(getattr(trainer, "datamodule", None), trainer))
        _require_read(pl_module, trainer, self._name, loader.batch_size)
        watched_by = listeners_here(self._listeners)
        if options.get("eval"):
            task = replace(task, **_validated_on(_validation_loader(trainer, pl_module)))
        self.result = search(task, _FRAMEWORKS, options, watched_by, device=_device(trainer))
        said = words_of_changes(task, self.result, _FRAMEWORKS)
        for name, value in _counts(trainer, loader, self.result, watched_by).items():
            setattr(trainer, _LIMIT if name == _OVERFIT else name, value)
        for name, value in said[DATALOADER].items():
            attribute = self._name if name == BATCH[BATCH_SIZE][DATALOADER].name else name
            if parsing.lightning_hasattr(pl_module, attribute):
                parsing.lightning_setattr(pl_module, attribute, value)
        for name, value in said[LIGHTNING].items():
            if name == "precision":
                trainer.strategy.precision_plugin = _precision(value, trainer)
            elif name == "benchmark":
                torch.backends.cudnn.benchmark = value
            else:
                setattr(trainer, name, value)


def _given(trainer: Trainer) -> dict[str, Any]:
    """The trainer's arguments as they take effect, options of DDP included."""
    strategy = trainer.strategy
    layer_sync = type(getattr(strategy, "_layer_sync", None)).__name__
    of_spread = {"strategy": getattr(strategy, "_ddp_kwargs", {}), "layer_sync": layer_sync}
    return {**{name: getattr(trainer, name) for name in _READ}, **of_spread}


def _loader_of(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    trainer: Trainer | None,
    given: Any = None,
    *,
    is_prepared: bool = False,
) -> Any:
    """The training loader: the one that was given, or what a copy of the datamodule or the module makes.

    Args:
        is_prepared: `fit` has begun, which has called `prepare_data()` already.

    Raises:
        TaskError: these cannot be tuned, with the reason and what to do.
    """
    _refuse(module, datamodule, trainer)
    if given is not None:
        return given
    owner = datamodule or getattr(trainer, "datamodule", None)
    if owner is None and not overrides(type(module), "train_dataloader"):
        raise TaskError(
            f"{type(module).__name__} has no train_dataloader(); give tune() a datamodule, or a loader as train_dataloaders"
        )
    return _made_of(module, owner, "train_dataloader", is_prepared=is_prepared)


def _validation_loader(trainer: Trainer, module: LightningModule) -> Any:
    """What a trainer validates on in the `fit` that begins: what `fit` was given, or else what the hook makes."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    if not source.is_module():
        return source.instance
    return _made_of(module, trainer.datamodule, "val_dataloader", is_prepared=True)


def _validated_on(made: Any) -> dict[str, Any]:
    """The fields of a task for what is validated on; none where that is not one loader's."""
    loader = sole_loader(made)
    if loader is None:
        return {}
    return {"eval_dataset": data_of(loader)["train_dataset"], "eval_collate_fn": loader.collate_fn}


def _made_of(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    hook: str,
    *,
    is_prepared: bool,
    is_set_up: bool = False,
) -> Any:
    """What a hook returns of a copy of the datamodule, or else of the module, set up for `fit`; None where neither has it.

    Args:
        is_prepared: its `prepare_data()` was called already.
        is_set_up: and so was its `setup()`.
    """
    owner: Any = module if datamodule is None else datamodule
    if not (overrides(type(owner), hook) or hook in vars(owner)):  # `from_datasets` sets it on the object
        return None
    with keep_randomness():
        maker = copy.deepcopy(_alone(owner))
        if not is_prepared:
            maker.prepare_data()
        if not is_set_up:
            maker.setup("fit")
        return getattr(maker, hook)()


def _require_read(module: LightningModule, trainer: Trainer, name: str, size: int) -> None:
    """Raise TaskError where the training loader that `fit` will ask for has another batch size than the attribute `name` says by then.

    Args:
        size: today's batch size of that loader. The attribute has another one for a moment.
    """
    data = trainer.datamodule  # set up by now, and the module is not
    with _set_to(module, name, other := 2 * size):
        made = _made_of(module, data, "train_dataloader", is_prepared=True, is_set_up=data is not None)
    if made.batch_size != other:
        raise TaskError(
            f"with {name} set to {other}, to try it, the training loader still has batch_size={made.batch_size}: an optimizer step "
            f"of the answer would take other samples. Make the loader from {name} in train_dataloader(), not in setup(), or name the "
            "attribute that it is made from with AutotuneCallback(batch_arg_name=...)"
        )


@contextmanager
def _set_to(module: LightningModule, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute has another value in the module, its hparams and the datamodule, wherever it is."""
    parsing = _part(module, "utilities.parsing")
    holders = parsing._lightning_get_all_attr_holders(module, name)
    before = [holder[name] if isinstance(holder, dict) else getattr(holder, name) for holder in holders]
    try:
        parsing.lightning_setattr(module, name, value)
        yield
    finally:
        for holder, own in zip(holders, before, strict=True):
            if isinstance(holder, dict):
                holder[name] = own
            else:
                setattr(holder, name, own)


def _stand_in(trainer: Trainer | None, loader: Any) -> TrainerStandIn:
    """What the module is to find in place of `trainer` when it trains on the batches of `loader`."""
    if trainer is None:
        return TrainerStandIn()
    seen = {name: getattr(trainer, name) for name in _SEEN}
    if trainer.max_epochs is None:  # as `fit` takes it
        seen["max_epochs"] = -1 if trainer.max_steps != -1 else TrainerStandIn.max_epochs
    seen["num_training_batches"] = _num_batches(trainer, loader)
    its = _part(trainer).Trainer
    steps = its.estimated_stepping_batches.fget(SimpleNamespace(**seen, train_dataloader=loader))
    return TrainerStandIn(**seen, estimated_stepping_batches=steps, loggers=[SilentLogger() for _ in trainer.loggers])


def _num_batches(trainer: Trainer, loader: Any) -> float:
    """Micro batches of an epoch of one process; infinite where that is not known."""
    length = _part(trainer, "utilities.data", built_on=True).sized_len(loader)
    if length is not None and not isinstance(loader.sampler, DistributedSampler):  # each process will have its share
        length = -(-length // trainer.world_size)
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return math.inf if length is None else int(length * limit)


def _counts(trainer: Trainer | None, loader: Any, result: Result, listeners: Sequence[Listener]) -> dict[str, float]:
    """The trainer's arguments that are numbers of micro batches, for those of the answer. What rounding changes is warned of.

    The limit of an epoch is rounded up: an epoch then takes as many optimizer steps as before, for which a learning-rate schedule may have
    been made. The interval between validations is rounded down, since Lightning refuses one that is longer than an epoch. Shares of
    an epoch stay as they are.
    """
    if trainer is None:
        return {}
    today, size = int(loader.batch_size), int(result.config[BATCH_SIZE])
    found, told = dict[str, float](), list[str]()
    limit, interval = trainer.limit_train_batches, getattr(trainer, _INTERVAL, None)  # none where it is a time
    if isinstance(limit, int):
        name = _OVERFIT if trainer.overfit_batches else _LIMIT
        found[name] = -(-limit * today // size)
        if found[name] * size != limit * today:
            told.append(
                f"{name}={limit} micro batches of {today} samples become {found[name]} of {size}: an epoch has as many optimizer steps as "
                "before, and the last of them more samples"
            )
    if isinstance(interval, int):
        at_the_end = trainer.check_val_every_n_epoch is not None and interval == _num_batches(trainer, loader)
        found[_INTERVAL] = 1.0 if at_the_end else max(1, interval * today // size)
        if not at_the_end and found[_INTERVAL] * size != interval * today:
            told.append(
                f"{_INTERVAL}={interval} micro batches of {today} samples becomes {found[_INTERVAL]} of {size}: the trainer validates "
                f"after every {found[_INTERVAL] * size} samples instead of {interval * today}"
            )
    for text in told:
        Listeners(listeners).warn(text)
    return found


def _alone(owner: Any) -> Any:
    """A shallow copy that refers to no trainer."""
    alone = copy.copy(owner)
    for name in ("trainer", "_trainer", "_fabric"):
        if name in vars(alone):
            vars(alone)[name] = None
    return alone


def _refuse(module: LightningModule, datamodule: LightningDataModule | None, trainer: Trainer | None) -> None:
    if not is_lightning(module):
        raise TaskError(f"tune() was given {describe(module)}; expected a LightningModule")
    for what, other in (("datamodule", datamodule), ("Trainer", trainer)):
        if _name_of(other) not in ("", _name_of(module)):
            raise TaskError(
                f"the module is of {_name_of(module)}, the {what} of {_name_of(other)}, which do not work together; "
                "import both from one of them"
            )
    if trainer is None:
        return
    sharded = type(trainer.strategy).__name__
    if sharded in _SHARDED:
        raise TaskError(
            f"the Trainer shards the model by {sharded}; give tune() a Trainer(strategy='ddp'), and what comes back to yours"
        )
    if trainer.world_size != (size := launched_world().size):
        raise TaskError(
            f"the Trainer uses {trainer.world_size} devices, and {size} {'process runs' if size == 1 else 'processes run'} so far; "
            "use AutotuneCallback, which searches when fit() has started them, or start the script with torchrun"
        )
    if read(LIGHTNING, {"precision": trainer.precision}) == {}:
        raise TaskError(
            f"the Trainer's precision is {trainer.precision!r}; expected '32-true', 'bf16-mixed' or '16-mixed'"
        )
    scheduler = _part(trainer, "callbacks").GradientAccumulationScheduler
    plans = [one.scheduling for one in trainer.callbacks if isinstance(one, scheduler) and one.scheduling != {0: 1}]
    if plans:
        raise TaskError(
            f"the Trainer's GradientAccumulationScheduler sets the accumulation steps by epoch ({plans[0]}), and a config has one number "
            "for all of training; leave it out, and give Trainer(accumulate_grad_batches=...)"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise TaskError(
            "the Trainer clips gradients by value, which only a module's own code can do here: call self.clip_gradients("
            "optimizer, value, 'value') in its configure_gradient_clipping"
        )


def _clipping(module: LightningModule, trainer: Trainer | None) -> float | None:
    if trainer is None or not module.automatic_optimization or overrides(type(module), "configure_gradient_clipping"):
        return None
    return trainer.gradient_clip_val or None


def _device(trainer: Trainer | None) -> str:
    if trainer is None:
        return "auto"
    device = trainer.strategy.root_device
    if device.type not in TYPES:
        raise TaskError(f"the Trainer's device is {device}; expected a CPU or an NVIDIA GPU: accelerator='cpu', say")
    return name_of(device)


def _not_reached(module: LightningModule) -> Iterable[str]:
    """Techniques of the loader for which there is no attribute to set."""
    lightning_hasattr = _part(module, "utilities.parsing").lightning_hasattr
    for name, technique in find_techniques().items():
        words = technique.frameworks.get(DATALOADER)
        if words is not None and not any(
            lightning_hasattr(module, argument) for argument in technique.write(DATALOADER, technique.off) or {}
        ):
            yield name


def _precision(value: str, trainer: Trainer) -> Precision:
    plugins = _part(trainer, "plugins.precision")
    device = trainer.strategy.root_device.type
    return plugins.Precision() if value == "32-true" else plugins.MixedPrecision(value, device)


def _name_of(owner: Any) -> str:
    """The name by which the Lightning was imported of which a module, a datamodule or a trainer is; empty for another object."""
    roots = (base.__module__.partition(".")[0] for base in type(owner).__mro__)
    return next((root for root in roots if root in _NAMES), "")


def _part(owner: Any, path: str = "", *, built_on: bool = False) -> Any:
    """A module of the Lightning of which `owner` is: of what trains, or of what that is built on."""
    return import_module(".".join(filter(None, (_NAMES[_name_of(owner)][built_on], path))))


def _as_callback(cls: type) -> type:
    """A subclass of `cls` that is a callback by every name that Lightning has been imported by, or else by one that is installed."""
    imported = [trains for trains, _ in _NAMES.values() if trains in sys.modules]
    return _callback_class(cls, tuple(imported or [_NAMES[name][0] for name in _NAMES if find_spec(name)][:1]))


@functools.cache
def _callback_class(cls: type, trains: tuple[str, ...]) -> type:
    bases = tuple(import_module(name).Callback for name in trains)
    said = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_is_named": False}
    return type(cls.__name__, (cls, *bases), said)
