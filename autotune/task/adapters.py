"""Adapts LightningModules and Hugging Face models. It recognises them by their base classes and imports neither library.

A LightningModule validates itself without a trainer, too: by what it logs for each batch, and at the end.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task.trainer_stand_in import TrainerStandIn
from autotune.task.usercode import describe

_LIGHTNING = ("lightning", "pytorch_lightning")  # one library under two names
_REPLACING_HOOKS = ("optimizer_step", "backward")
_UNUSED_HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "optimizer_zero_grad", "on_train_batch_end",
)  # fmt: skip
_KEEPS_MODES = "_autotune_keeps_modes"  # an attribute of a model, so that copies have it, too
WHOLE_STEP = "write the whole step yourself, as train_step(model, optimizers, batch)"


def is_lightning_class(cls: Any) -> bool:
    """Whether `cls` is a subclass of `lightning.LightningModule` (also under its older import name)."""
    return isinstance(cls, type) and any(
        base.__name__ == "LightningModule" and _is_lightnings_own(base) for base in cls.__mro__
    )


def is_lightning(model: Any) -> bool:
    """Whether `model` is a LightningModule."""
    return is_lightning_class(type(model))


def overrides(cls: type, method: str) -> bool:
    """Whether a LightningModule subclass has its own `method`."""
    owner = next((base for base in cls.__mro__ if method in vars(base)), None)
    return owner is not None and not _is_lightnings_own(owner)


def _is_lightnings_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIGHTNING


def adapt(model: torch.nn.Module) -> torch.nn.Module:
    """Prepare a newly built model for training without the library that would usually train it.

    A LightningModule makes its layers (`configure_model`), and gets a stand-in where its trainer would be.
    A Hugging Face model stops caching keys and values for generation: training does not need them, and recomputing
    an activation would append to them.
    """
    if is_lightning(model):
        if not isinstance(model._trainer, TrainerStandIn):
            attach(model, TrainerStandIn())
        if overrides(type(model), "configure_model"):
            model.configure_model()  # type: ignore[operator]
    switch_off_caches(model)
    return model


def attach(model: torch.nn.Module, trainer: TrainerStandIn) -> None:
    """Let a LightningModule, and the LightningModules in it, find a trainer."""
    for module in filter(is_lightning, model.modules()):
        trainer.attach(module)


def keep_modes(model: torch.nn.Module) -> torch.nn.Module:
    """Let `switch_to_training` leave a model that is in training mode as it is: a loop trains it in the modes that it has."""
    setattr(model, _KEEPS_MODES, True)
    return model


def switch_to_training(model: torch.nn.Module) -> torch.nn.Module:
    """Put a newly built model into training mode as what trains it does.

    Lightning leaves submodules in evaluation mode there. Other loops call `model.train()`. Of a live model they may have switched parts
    back; but `from_pretrained` leaves any Hugging Face model in evaluation mode, and what has a `train` of its own decides by itself.
    """
    keeps = is_lightning(model) or getattr(model, _KEEPS_MODES, False)
    if not (keeps and model.training):
        return model.train()
    if not is_lightning(model):
        for module in model.modules():
            if is_pretrained(module) or type(module).train is not torch.nn.Module.train:
                module.train()
    return model


def switch_off_caches(model: torch.nn.Module) -> None:
    """Let the Hugging Face models in a model, itself included, keep no keys and values for generation."""
    for module in model.modules():
        if is_pretrained(module):
            config: Any = module.config
            if getattr(config, "use_cache", False):
                config.use_cache = False


def is_pretrained(module: Any) -> bool:
    """Whether a module is a Hugging Face model."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def is_lazy(module: torch.nn.Module) -> bool:
    """Whether a module will know the shapes of its parameters or buffers only once a batch has passed through it."""
    return any(
        torch.nn.parameter.is_lazy(tensor)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


def shifts_labels(model: torch.nn.Module) -> bool:
    """Whether `model` is a Hugging Face causal language model, which predicts label t + 1 at t."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return False
    return type(model).__name__.endswith(("CausalLM", "LMHeadModel"))


def lightning_loss(model: Any, batch: Any) -> Any:
    """The loss that a LightningModule's `training_step` returns for a batch, taken out of a dict if needed.

    Raises:
        TaskError: there is none, or the module replaces a part of the step.
    """
    for hook in _REPLACING_HOOKS:
        if overrides(type(model), hook):
            raise TaskError(
                f"{type(model).__name__} has a {hook} of its own, which autotune does not call; {WHOLE_STEP}"
            )
    result = lightning_step(model, batch)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise TaskError(
                f"training_step of {type(model).__name__} returned {describe(result)}; add the key 'loss' to it"
            )
        return result["loss"]
    return result


def lightning_step(model: Any, batch: Any) -> Any:
    """What the `training_step` of a LightningModule returns for its next batch."""
    result = lightning_hook(model, "training_step", batch, model._trainer.num_batches)
    model._trainer.num_batches += 1
    return result


def lightning_hook(model: Any, name: str, batch: Any, index: int) -> Any:
    """What a LightningModule's step of that name returns for the batch with that number."""
    if overrides(type(model), "on_after_batch_transfer"):
        batch = model.on_after_batch_transfer(batch, 0)
    step = getattr(model, name)
    return step(batch, index) if len(inspect.signature(step).parameters) > 1 else step(batch)


def begin_counting(model: Any, accumulation_steps: int) -> None:
    """Let a LightningModule count batches, and optimizer steps of so many, from here: passes that were tried before are none."""
    if trainer := _stand_in_of(model):
        trainer.accumulate_grad_batches = accumulation_steps
        trainer.num_batches = trainer.global_step = 0


def count_step(model: Any) -> None:
    """Let a LightningModule count an optimizer step that was taken."""
    if trainer := _stand_in_of(model):
        trainer.global_step += 1


def counted_batches(model: Any) -> int:
    """How many batches a LightningModule has counted; 0 of another model."""
    trainer = _stand_in_of(model)
    return trainer.num_batches if trainer else 0


def count_on_from(model: Any, num_batches: int) -> None:
    """Let a LightningModule count batches on from `num_batches`."""
    if trainer := _stand_in_of(model):
        trainer.num_batches = num_batches


@contextlib.contextmanager
def numbered(model: Any, numbers: Sequence[int]) -> Iterator[Callable[[int], None]]:
    """Let a LightningModule count a step's batches by `numbers`, one for each pass inside; without any, it counts the passes.

    Yields what is to be told the position of the pass that comes.
    """
    first = counted_batches(model) if numbers else 0

    def begin(position: int) -> None:
        if numbers:
            count_on_from(model, first + numbers[position])

    yield begin
    if numbers:
        count_on_from(model, first + numbers[-1] + 1)


@contextlib.contextmanager
def uncounted(model: Any) -> Iterator[None]:
    """Let a LightningModule not count the batches of the forward passes inside."""
    before = counted_batches(model)
    try:
        yield
    finally:
        count_on_from(model, before)


def _stand_in_of(model: Any) -> TrainerStandIn | None:
    """What stands in for the trainer of a LightningModule; None of another model."""
    return model._trainer if is_lightning(model) and isinstance(model._trainer, TrainerStandIn) else None


def take_manual_steps(model: Any) -> None:
    """Give a LightningModule with manual optimization what it needs to take its steps."""
    optimizers = model._trainer.optimizers
    frozen: list[torch.Tensor] = []

    def toggle_optimizer(optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for group in (group for other in optimizers for group in other.param_groups):
            others = [p for p in group["params"] if id(p) not in own and p.requires_grad]
            frozen.extend(parameter.requires_grad_(False) for parameter in others)

    def untoggle_optimizer(optimizer: torch.optim.Optimizer) -> None:
        while frozen:
            frozen.pop().requires_grad_(True)

    model.manual_backward = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)
    model.toggle_optimizer, model.untoggle_optimizer = toggle_optimizer, untoggle_optimizer


def give_optimizers(model: Any, result: Any) -> None:
    """Let a LightningModule find the optimizers and schedulers that its `configure_optimizers` returned."""
    model._trainer.optimizers = optimizers_in(result)
    model._trainer.lr_schedulers = [leaf for leaf in leaves(result) if hasattr(leaf, "get_last_lr")]


def exchange_optimizer(model: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let a LightningModule find another optimizer in place of one of its own; of other models nothing changes."""
    if is_lightning(model):
        model._trainer.optimizers = [new if optimizer is old else optimizer for optimizer in model._trainer.optimizers]


def hook_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's steps call what a LightningModule does before and after them, with whatever optimizer has the hooks."""
    cls, trainer = type(model), model._trainer
    clipping = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    if overrides(cls, "on_before_optimizer_step"):
        optimizer.register_step_pre_hook(lambda stepping, *_: model.on_before_optimizer_step(stepping))
    if overrides(cls, "configure_gradient_clipping"):
        optimizer.register_step_pre_hook(lambda stepping, *_: model.configure_gradient_clipping(stepping, *clipping))
    if overrides(cls, "on_before_zero_grad"):
        optimizer.register_step_post_hook(lambda stepping, *_: model.on_before_zero_grad(stepping))


def hooks_left_out(model: torch.nn.Module) -> list[str]:
    """A LightningModule's own hooks that training without a trainer does not call."""
    return [hook for hook in _UNUSED_HOOKS if is_lightning(model) and overrides(type(model), hook)]


def optimizers_of(result: Any) -> tuple[list[torch.optim.Optimizer], int]:
    """The optimizers in what `configure_optimizers` returned, in any form that Lightning takes or by names.

    Returns:
        The optimizers, at least one, and the number of learning-rate schedulers returned with them.

    Raises:
        TaskError: there is none.
    """
    optimizers = optimizers_in(result)
    if not optimizers:
        raise TaskError(
            f"configure_optimizers returned {describe(result)}; expected a torch.optim.Optimizer, for example `return "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)`"
        )
    return optimizers, sum(hasattr(leaf, "get_last_lr") for leaf in leaves(result))


def optimizers_in(result: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` returned."""
    return [leaf for leaf in leaves(result) if isinstance(leaf, torch.optim.Optimizer)]


def sole_optimizer(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The one optimizer of a task whose steps are made by autotune. Raises TaskError for two."""
    if len(optimizers) > 1:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise TaskError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({names}); expected one: put all the "
            f"parameters into the groups of one optimizer, or {WHOLE_STEP}"
        )
    return optimizers[0]


def leaves(made: Any) -> Iterator[Any]:
    """The values in nested mappings, lists and tuples; a value that is none of these, itself."""
    if isinstance(made, Mapping | list | tuple):
        for part in made.values() if isinstance(made, Mapping) else made:
            yield from leaves(part)
    else:
        yield made


def no_data(build_model: Any, near: str = "") -> TaskError:
    """The error for a task that has no data, nor a LightningModule that has. `near` offers similar names."""
    inside = f", nor a train_dataloader() in {build_model.__name__}" if is_lightning_class(build_model) else ""
    return TaskError(
        f"there is neither make_batch(batch_size) nor train_dataset(){near}{inside}; write one of them, for example "
        "`def make_batch(batch_size): return torch.randn(batch_size, 16), torch.randint(10, (batch_size,))`"
    )


def may_be_lightning(build_model: Any) -> bool:
    """Whether `build_model` may return a LightningModule. Only calling it would tell for certain."""
    if isinstance(build_model, type):
        return is_lightning_class(build_model)
    return any(name in sys.modules for name in _LIGHTNING)


def may_have_data(build_model: Any) -> bool:
    """Whether `build_model` may return a LightningModule with a `train_dataloader()`."""
    is_class = isinstance(build_model, type)
    return may_be_lightning(build_model) and (not is_class or overrides(build_model, "train_dataloader"))


def sole_loader(made: Any) -> torch.utils.data.DataLoader[Any] | None:
    """The one DataLoader in what `val_dataloader` returned, which may be in a list; None where there are several, or something else."""
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
    return made if isinstance(made, torch.utils.data.DataLoader) else None


class LightningData:
    """What a LightningModule's `train_dataloader()` and `val_dataloader()` give, for a task without data of its own.

    The loaders are built when first needed, since what `build_model` returns is not known before.
    """

    def __init__(self, build_model: Callable[[], Any]) -> None:
        if not may_have_data(build_model):
            raise no_data(build_model)
        self._build_model = build_model
        self._made: tuple[Any, torch.utils.data.DataLoader[Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LightningData, (self._build_model,)

    def of_models(self, build_model: Callable[[], Any]) -> LightningData:
        """The same data for modules that `build_model` builds; what is loaded already stays."""
        other = LightningData(build_model)
        other._made = self._made
        return other

    def train_dataset(self) -> Any:
        """The training loader's dataset."""
        return self._load()[1].dataset

    def batch_size(self) -> int | None:
        """Samples of the training loader's batches; None where a batch sampler of the loader makes them."""
        return self._load()[1].batch_size

    def collate_fn(self, samples: list[Any]) -> Any:
        """Make a batch of samples as the training loader does."""
        return self._load()[1].collate_fn(samples)

    def validates(self) -> bool:
        """Whether there is a loader to validate on, and no more than one."""
        return self._val_loader is not None

    def eval_dataset(self) -> Any:
        """The dataset of the loader to validate on."""
        return self._validating().dataset

    def eval_collate_fn(self, samples: list[Any]) -> Any:
        """Make a batch of samples as the loader to validate on does."""
        return self._validating().collate_fn(samples)

    def _validating(self) -> torch.utils.data.DataLoader[Any]:
        assert self._val_loader is not None, "asked before"
        return self._val_loader

    @cached_property
    def _val_loader(self) -> torch.utils.data.DataLoader[Any] | None:
        module, _ = self._load()
        if not (overrides(type(module), "val_dataloader") and overrides(type(module), "validation_step")):
            return None
        return sole_loader(module.val_dataloader())

    def _load(self) -> tuple[Any, torch.utils.data.DataLoader[Any]]:
        if self._made is None:
            module = self._build_model()
            if not may_have_data(type(module)):
                raise no_data(type(module))
            module.prepare_data()
            module.setup("fit")
            loader = module.train_dataloader()
            if not isinstance(loader, torch.utils.data.DataLoader):
                raise TaskError(
                    f"train_dataloader of {type(module).__name__} returned {describe(loader)}; expected one "
                    "torch.utils.data.DataLoader; else write train_dataset() and collate_fn(samples) beside it"
                )
            self._made = module, loader
        return self._made


class Validation:
    """The validations of a LightningModule, one after the other, each from `begin` to `at_the_end`.

    A value that `self.log` is to reduce to something other than a mean over the set (`on_epoch=False`, `reduce_fx`) is left out.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._metrics: dict[str, Any] = {}  # torchmetrics by the names under which they were logged
        self._says_something = False
        self._num_batches = 0  # since `begin`

    @staticmethod
    def is_of(model: Any) -> bool:
        """Whether a model is a LightningModule that says how it is validated."""
        return is_lightning(model) and overrides(type(model), "validation_step")

    def begin(self) -> None:
        """Forget what was logged, and call the module's hook."""
        for metric in self._metrics.values():
            metric.reset()
        self._metrics = {}
        self._num_batches = 0
        self._call("on_validation_epoch_start")

    def of_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        """The means that `validation_step` logs; where it logs nothing, the loss that it returns, as `loss`."""
        with self._logged() as logged:
            returned = lightning_hook(self._model, "validation_step", batch, self._num_batches)
        self._num_batches += 1
        if not logged:
            logged = {"loss": returned.get("loss") if isinstance(returned, Mapping) else returned}
        self._metrics |= _metrics(logged)
        found = _scalars(logged)
        self._says_something |= bool(found)
        return found

    def at_the_end(self) -> dict[str, float]:
        """The metrics that were logged, and what is logged after the last batch. Raises TaskError if nothing was ever logged."""
        with self._logged() as logged:
            self._call("on_validation_epoch_end")
        self._metrics |= _metrics(logged)
        computed = {name: metric.compute() for name, metric in self._metrics.items()}
        found = _scalars({**logged, **computed})
        if not found and not self._says_something:
            raise TaskError(
                f"validation_step of {type(self._model).__name__} neither logged a mean nor returned a loss; "
                "call self.log(name, value) in it, with the mean over the batch"
            )
        return {name: float(value) for name, value in found.items()}

    def _call(self, hook: str) -> None:
        if overrides(type(self._model), hook):
            getattr(self._model, hook)()

    @contextmanager
    def _logged(self) -> Iterator[dict[str, Any]]:
        """What the module logs inside the block, by name."""
        model, logged = self._model, dict[str, Any]()

        def log(
            name: str, value: Any, *_: Any, on_epoch: bool | None = None, reduce_fx: Any = "mean", **__: Any
        ) -> None:
            if on_epoch is not False and reduce_fx in ("mean", torch.mean):
                logged[name] = value

        def log_dict(values: Mapping[str, Any], *_: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, **options)

        before = model.log, model.log_dict
        model.log, model.log_dict = log, log_dict
        try:
            yield logged
        finally:
            model.log, model.log_dict = before


def _metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if hasattr(value, "compute") and hasattr(value, "reset")}


def _scalars(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        str(name): torch.as_tensor(value).detach().reshape(())
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
