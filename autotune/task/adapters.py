"""Adapts LightningModules and Hugging Face models. It recognises them by their base classes and imports neither library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task.describe import describe

_REPLACING_HOOKS = ("optimizer_step", "backward")
_UNUSED_HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "optimizer_zero_grad", "on_train_batch_end",
)  # fmt: skip
WHOLE_STEP = "write the whole step yourself, as train_step(model, optimizers, batch)"


def is_lightning_class(cls: Any) -> bool:
    """Whether `cls` is a subclass of `lightning.LightningModule` (also under its older import name)."""
    return isinstance(cls, type) and any(_is_lightnings_own(base) for base in cls.__mro__)


def is_lightning(model: Any) -> bool:
    """Whether `model` is a LightningModule."""
    return is_lightning_class(type(model))


def overrides(cls: type, method: str) -> bool:
    """Whether a LightningModule subclass has its own `method`."""
    owner = next((base for base in cls.__mro__ if method in vars(base)), None)
    return owner is not None and owner.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")


def adapt(model: torch.nn.Module) -> torch.nn.Module:
    """Prepare a newly built model for training without the library that would usually train it.

    A LightningModule gets its layers (`configure_model`). There is no trainer: its `log` calls do nothing, and
    `clip_gradients` clips.
    A Hugging Face model stops caching keys and values for generation: training does not need them, and recomputing
    an activation would append to them.
    """
    if is_lightning(model):
        if overrides(type(model), "configure_model"):
            model.configure_model()  # type: ignore[operator]
        model.log = model.log_dict = _log_nothing  # type: ignore[assignment]
        model.clip_gradients = _clip_gradients  # type: ignore[assignment]
    switch_off_caches(model)
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
    from torch.nn.parameter import is_lazy

    return any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


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
    """What a LightningModule's `training_step` returns for a batch."""
    if overrides(type(model), "on_after_batch_transfer"):
        batch = model.on_after_batch_transfer(batch, 0)
    takes_index = len(inspect.signature(model.training_step).parameters) > 1
    return model.training_step(batch, 0) if takes_index else model.training_step(batch)


def take_manual_steps(model: Any, optimizers: list[torch.optim.Optimizer], configured: Any) -> None:
    """Give a LightningModule with manual optimization what it asks its trainer for."""
    schedulers = [leaf for leaf in _leaves(configured) if hasattr(leaf, "get_last_lr")]
    frozen: list[torch.Tensor] = []

    def toggle_optimizer(optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for group in (group for other in optimizers for group in other.param_groups):
            others = [p for p in group["params"] if id(p) not in own and p.requires_grad]
            frozen.extend(parameter.requires_grad_(False) for parameter in others)

    def untoggle_optimizer(optimizer: torch.optim.Optimizer) -> None:
        while frozen:
            frozen.pop().requires_grad_(True)

    model.optimizers = lambda use_pl_optimizer=True: optimizers if len(optimizers) > 1 else optimizers[0]
    model.lr_schedulers = lambda: schedulers if len(schedulers) > 1 else next(iter(schedulers), None)
    model.manual_backward = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)
    model.toggle_optimizer, model.untoggle_optimizer = toggle_optimizer, untoggle_optimizer


def hook_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's steps call what a LightningModule does before and after them."""
    cls = type(model)
    if overrides(cls, "on_before_optimizer_step"):
        optimizer.register_step_pre_hook(lambda *_: model.on_before_optimizer_step(optimizer))
    if overrides(cls, "configure_gradient_clipping"):
        optimizer.register_step_pre_hook(lambda *_: model.configure_gradient_clipping(optimizer, None, None))
    if overrides(cls, "on_before_zero_grad"):
        optimizer.register_step_post_hook(lambda *_: model.on_before_zero_grad(optimizer))


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
    return optimizers, sum(hasattr(leaf, "get_last_lr") for leaf in _leaves(result))


def optimizers_in(result: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what `configure_optimizers` returned."""
    return [leaf for leaf in _leaves(result) if isinstance(leaf, torch.optim.Optimizer)]


def sole_optimizer(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The one optimizer of a task whose steps are made by autotune. Raises TaskError for two."""
    if len(optimizers) > 1:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise TaskError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({names}); expected one: put all the "
            f"parameters into the groups of one optimizer, or {WHOLE_STEP}"
        )
    return optimizers[0]


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, Mapping | list | tuple):
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from _leaves(part)
    else:
        yield result


def no_data(build_model: Any, near: str = "") -> TaskError:
    """The error for a task without data of its own or of a LightningModule. `near` offers similar names."""
    inside = f", nor a train_dataloader() in {build_model.__name__}" if is_lightning_class(build_model) else ""
    return TaskError(
        f"there is neither make_batch(batch_size) nor train_dataset(){near}{inside}; write one of them, for example "
        "`def make_batch(batch_size): return torch.randn(batch_size, 16), torch.randint(10, (batch_size,))`"
    )


def may_be_lightning(build_model: Any) -> bool:
    """Whether `build_model` may return a LightningModule. Only calling it would tell for certain."""
    if isinstance(build_model, type):
        return is_lightning_class(build_model)
    return not {"lightning", "pytorch_lightning"}.isdisjoint(sys.modules)


def may_have_data(build_model: Any) -> bool:
    """Whether `build_model` may return a LightningModule with a `train_dataloader()`."""
    is_class = isinstance(build_model, type)
    return may_be_lightning(build_model) and (not is_class or overrides(build_model, "train_dataloader"))


class LightningData:
    """Training set and `collate_fn` of a LightningModule's `train_dataloader()`, for a task without data of its own.

    The loader is built when first needed, since what `build_model` returns is not known before.
    """

    def __init__(self, build_model: Callable[[], Any]) -> None:
        if not may_have_data(build_model):
            raise no_data(build_model)
        self._build_model = build_model
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LightningData, (self._build_model,)

    def train_dataset(self) -> Any:
        """The loader's dataset."""
        return self._load().dataset

    def batch_size(self) -> int | None:
        """Samples of the loader's batches; None where a sampler of its own makes them."""
        return self._load().batch_size

    def collate_fn(self, samples: list[Any]) -> Any:
        """Make a batch of samples as the loader does."""
        return self._load().collate_fn(samples)

    def _load(self) -> torch.utils.data.DataLoader[Any]:
        if self._loader is None:
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
            self._loader = loader
        return self._loader


def _is_lightnings_own(base: type) -> bool:
    return base.__name__ == "LightningModule" and base.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


def _clip_gradients(
    optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if gradient_clip_val and gradient_clip_algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    elif gradient_clip_val:
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


def _log_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
