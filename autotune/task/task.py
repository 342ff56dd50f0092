"""`Task`: the user's model, data, loss and optimizer behind one small interface."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.errors import TaskError
from autotune.records.config import Choice
from autotune.task import adapters, losses, samples, validation
from autotune.task.describe import describe

if TYPE_CHECKING:
    import torch

    from autotune.task.source import Origin


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What the user trains. `load_task` makes it from `model.py`, or it is built directly.

    Attributes:
        build_model: returns the model, on the CPU, freshly initialised.
        make_batch: returns a micro batch with the given number of samples, on the CPU, of the largest shape that training
            will meet.
        training_step: returns the scalar mean loss of a batch; None for the default losses.
        configure_optimizers: returns the optimizer for a model; None for AdamW.
        train_dataset: returns the training set, instead of or beside `make_batch`.
        collate_fn: makes a micro batch from a list of samples; None for torch's default.
        checkpoint_blocks: returns the modules that activation checkpointing may recompute; None to find them.
        loss_weight: returns the number of terms that the mean loss of a micro batch averages over (tokens, say), so that
            accumulation weights it correctly; None for the number of samples.
        global_batch: samples per optimizer step; None leaves it open.
        baseline: what the user runs today, as a partial config dict; None for plain fp32.
        max_grad_norm: gradients are clipped to this norm before each optimizer step; None for no clipping.
        name: short name, used for the study.
        origin: where `load_task` found it; not for users to set.

    Raises:
        TaskError: a function cannot be called with the arguments above, a constant is not valid, or there is no data.
    """

    build_model: Callable[[], torch.nn.Module]
    make_batch: Callable[[int], Any] | None = None
    training_step: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    configure_optimizers: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None
    train_dataset: Callable[[], Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    checkpoint_blocks: Callable[[torch.nn.Module], Sequence[torch.nn.Module]] | None = None
    loss_weight: Callable[[Any], float] | None = None
    global_batch: int | None = None
    baseline: Mapping[str, Choice] | None = None
    max_grad_norm: float | None = None
    name: str = "task"
    origin: Origin | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        validation.check_fields(self)
        if self.make_batch is None and self.train_dataset is None:
            data = adapters.LightningData(self.build_model)
            object.__setattr__(self, "train_dataset", data.train_dataset)
            if self.collate_fn is None:
                object.__setattr__(self, "collate_fn", data.collate_fn)

    def model(self) -> torch.nn.Module:
        """Build the model, on the CPU, in training mode.

        Raises:
            TaskError: the result is not a module, has nothing to train, or is not a new model.
        """
        import torch

        model = self.build_model()
        if not isinstance(model, torch.nn.Module):
            hint = "is `return model` missing?" if model is None else "return the module itself"
            raise TaskError(f"build_model returned {describe(model)}; expected a torch.nn.Module: {hint}")
        known = _KNOWN.setdefault(self, _Known())
        if known.last_model is not None and known.last_model() is model:
            raise TaskError(
                f"build_model returned the same {type(model).__name__} twice; expected a new one each time: create the "
                "model inside build_model, so that no run starts from the parameters of another"
            )
        known.last_model = weakref.ref(model)
        adapters.adapt(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            frozen = any(True for _ in model.parameters())
            seen = "no parameter that requires a gradient" if frozen else "no parameters"
            hint = "set requires_grad on what is to be trained" if frozen else "assign its layers to its attributes"
            raise TaskError(
                f"build_model returned a {type(model).__name__} with {seen}; expected something to train: {hint}"
            )
        known.lightning, known.shifts_labels = adapters.is_lightning(model), adapters.shifts_labels(model)
        return model.train()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer for `model`, or AdamW over what requires a gradient.

        Raises:
            TaskError: there are two optimizers or none, or the optimizer has none of the model's parameters.
        """
        return self.optimizer_and_schedulers(model)[0]

    def optimizer_and_schedulers(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, int]:
        """Like `optimizer`, with the number of learning-rate schedulers returned with it, which are not used."""
        import torch

        if self.configure_optimizers is not None:
            result: Any = self.configure_optimizers(model)
        elif adapters.is_lightning(model) and adapters.overrides(type(model), "configure_optimizers"):
            result = model.configure_optimizers()  # type: ignore[operator]
        else:
            result = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        optimizer, num_schedulers = adapters.sole_optimizer(result)
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise TaskError(
                f"configure_optimizers returned {type(optimizer).__name__} without any parameter of the model it was "
                "given; expected one over `model.parameters()` of its argument, not over those of another model"
            )
        return optimizer, num_schedulers

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Scalar mean loss of a micro batch that is on the model's device.

        Raises TaskError when it is not a scalar, has no gradient, or no default loss fits.
        """
        import torch

        if self.training_step is not None:
            source, loss = "training_step", self.training_step(model, batch)
        elif adapters.is_lightning(model):
            adapters.check_lightning(model)
            source, loss = f"training_step of {type(model).__name__}", adapters.lightning_loss(model, batch)
        else:
            source, loss = f"the model's own loss ({type(model).__name__})", losses.default_loss(model, batch)
        if not isinstance(loss, torch.Tensor):
            hint = "is `return loss` missing?" if loss is None else "return the loss itself, not its value or a pair"
            raise TaskError(f"{source} returned {describe(loss)}; expected the loss as a scalar tensor: {hint}")
        if loss.dim() != 0:
            hint = "`.squeeze()`" if loss.numel() == 1 else "`.mean()`"
            raise TaskError(
                f"{source} returned {describe(loss)}; expected a scalar, of shape (), the mean over the batch: add "
                f"{hint}"
            )
        if not loss.requires_grad and torch.is_grad_enabled():
            raise TaskError(
                f"{source} returned {describe(loss)} that has no gradient; expected one that depends on the model's "
                "parameters: look for `.item()`, `.detach()`, `torch.no_grad()`, or a loss made anew with "
                "`torch.tensor(...)`"
            )
        return loss

    def weight(self, batch: Any) -> float:
        """How many terms `loss` averages over in this micro batch.

        `loss_weight` says so. Without it, the default losses count the targets that are not ignored (a causal language
        model shifts its labels, so the first of a sequence does not count). Otherwise it is the number of samples.
        """
        from autotune.task.batches import num_samples

        if self.loss_weight is not None:
            return float(self.loss_weight(batch))
        if self.training_step is None:
            known = self._known()
            if not known.lightning:
                terms = losses.default_weight(batch, shifts_labels=known.shifts_labels)
                if terms is not None:
                    return terms
        return float(num_samples(batch))

    def batch(self, batch_size: int) -> Any:
        """A micro batch of exactly `batch_size` samples, of the largest shape, on the CPU. Raises TaskError."""
        from autotune.task.batches import num_samples

        if self.make_batch is not None:
            name, batch = "make_batch", self.make_batch(batch_size)
        else:
            name, batch = "collate_fn", self._collate(batch_size)
        try:
            samples_made = num_samples(batch)
        except ValueError:
            raise TaskError(
                f"{name} returned {describe(batch)}; expected a tensor, or a tuple, list, dict or dataclass of tensors "
                "whose first dimension is the samples: return one of these"
            ) from None
        if samples_made != batch_size:
            if name == "make_batch":
                raise TaskError(
                    f"make_batch ignores its size: {batch_size} samples were asked for, but the first tensor of what "
                    f"it returned has {samples_made} ({describe(batch)}); make the first dimension of every tensor its "
                    "argument, batch_size"
                )
            raise TaskError(
                f"collating {batch_size} samples of train_dataset gave {samples_made} ({describe(batch)}); expected "
                "the samples in the first dimension of every tensor: change collate_fn(samples)"
            )
        return batch

    def dataset(self) -> Any | None:
        """The training set, built once per process; None when the task has only `make_batch`."""
        if self.train_dataset is None:
            return None
        known = _KNOWN.setdefault(self, _Known())
        if known.dataset is None:
            known.dataset = samples.check_dataset(self.train_dataset())
        return known.dataset

    def widest(self) -> tuple[int, ...]:
        """Positions of sampled members of the training set, the widest first; empty without a training set.

        Sampling happens once per process and can take 2 s; `use_widest` passes on what another process found.
        """
        dataset = self.dataset()
        if dataset is None:
            return ()
        known = _KNOWN.setdefault(self, _Known())
        if not known.widest:
            known.widest = samples.widest_first(dataset)
        return known.widest

    def use_widest(self, positions: Sequence[int]) -> None:
        """Use `positions` as the result of `widest`."""
        _KNOWN.setdefault(self, _Known()).widest = tuple(positions)

    def _collate(self, batch_size: int) -> Any:
        from torch.utils.data import default_collate

        widest = samples.widest_samples(self.dataset(), self.widest(), batch_size)
        return (self.collate_fn or default_collate)(widest)

    def _known(self) -> _Known:
        known = _KNOWN.setdefault(self, _Known())
        if known.last_model is None:
            self.model()
        return known


@dataclass
class _Known:
    """Facts about a task, cached in this process."""

    last_model: weakref.ref[Any] | None = None
    lightning: bool = False
    shifts_labels: bool = False
    dataset: Any = None
    widest: tuple[int, ...] = ()


_KNOWN: weakref.WeakKeyDictionary[Task, _Known] = weakref.WeakKeyDictionary()
