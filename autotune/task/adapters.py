"""Adapts LightningModules and Hugging Face models. It recognises them by their base classes and imports neither library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import TaskError
from autotune.task.describe import describe

if TYPE_CHECKING:
    import torch


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

    A LightningModule gets its layers (`configure_model`), and its `log` calls do nothing, since there is no trainer.
    A Hugging Face model stops caching keys and values for generation: training does not need them, and recomputing
    an activation would append to them.
    """
    if is_lightning(model):
        if overrides(type(model), "configure_model"):
            model.configure_model()  # type: ignore[operator]
        model.log = model.log_dict = _log_nothing  # type: ignore[assignment]
    for module in model.modules():
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            config: Any = module.config
            if getattr(config, "use_cache", False):
                config.use_cache = False
    return model


def shifts_labels(model: torch.nn.Module) -> bool:
    """Whether `model` is a Hugging Face causal language model, which predicts label t + 1 at t."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return False
    return type(model).__name__.endswith(("CausalLM", "LMHeadModel"))


def lightning_loss(model: Any, batch: Any) -> Any:
    """The loss that a LightningModule's `training_step` returns for a batch, taken out of a dict if needed."""
    step = model.training_step
    takes_index = len(inspect.signature(step).parameters) > 1
    result = step(batch, 0) if takes_index else step(batch)
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise TaskError(
                f"training_step of {type(model).__name__} returned {describe(result)}; add the key 'loss' to it"
            )
        return result["loss"]
    return result


def check_lightning(model: Any) -> None:
    """Raise TaskError for a LightningModule with manual optimization: its steps cannot be split."""
    if not model.automatic_optimization:
        raise TaskError(
            f"{type(model).__name__} has automatic_optimization = False, so its training_step takes the optimizer's "
            "steps itself; autotune needs a training_step that returns the loss of one optimizer: write build_model "
            "and training_step for it"
        )


def sole_optimizer(result: Any) -> tuple[torch.optim.Optimizer, int]:
    """The one optimizer in what `configure_optimizers` returned, in any form that Lightning takes.

    Returns:
        The optimizer, and the number of learning-rate schedulers returned with it.

    Raises:
        TaskError: two optimizers, or none.
    """
    import torch

    optimizers, num_schedulers = _flatten_optimizers(result)
    if len(optimizers) > 1:
        names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise TaskError(
            f"configure_optimizers returned {len(optimizers)} optimizers ({names}); expected one: put all the "
            "parameters into the groups of one optimizer, or tune the networks as separate tasks"
        )
    if not optimizers or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise TaskError(
            f"configure_optimizers returned {describe(result)}; expected a torch.optim.Optimizer, for example `return "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)`"
        )
    return optimizers[0], num_schedulers


def _flatten_optimizers(result: Any) -> tuple[list[Any], int]:
    if isinstance(result, Mapping):
        return [result["optimizer"]] if "optimizer" in result else [], int("lr_scheduler" in result)
    if not isinstance(result, list | tuple):
        is_scheduler = hasattr(result, "get_last_lr")
        return [] if result is None or is_scheduler else [result], int(is_scheduler)
    if len(result) == 2 and isinstance(result[0], list | tuple):  # ([optimizers], [schedulers])
        optimizers, schedulers = result
        return list(optimizers), len(schedulers) if isinstance(schedulers, list | tuple) else 1
    parts = [_flatten_optimizers(item) for item in result]
    return [optimizer for optimizers, _ in parts for optimizer in optimizers], sum(count for _, count in parts)


def no_data(build_model: Any, near: str = "") -> TaskError:
    """The error for a task without data of its own or of a LightningModule. `near` offers similar names."""
    inside = f", nor a train_dataloader() in {build_model.__name__}" if is_lightning_class(build_model) else ""
    return TaskError(
        f"there is neither make_batch(batch_size) nor train_dataset(){near}{inside}; write one of them, for example "
        "`def make_batch(batch_size): return torch.randn(batch_size, 16), torch.randint(10, (batch_size,))`"
    )


def may_have_data(build_model: Any) -> bool:
    """Whether `build_model` may return a LightningModule with a `train_dataloader()`. Only calling it would tell for certain."""
    if isinstance(build_model, type):
        return is_lightning_class(build_model) and overrides(build_model, "train_dataloader")
    return not {"lightning", "pytorch_lightning"}.isdisjoint(sys.modules)


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

    def collate_fn(self, samples: list[Any]) -> Any:
        """Make a batch of samples as the loader does."""
        return self._load().collate_fn(samples)

    def _load(self) -> torch.utils.data.DataLoader[Any]:
        import torch

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


def _log_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
