"""The default losses for a task without `training_step`, and how many terms each averages over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.records.inspection import LossKind
from autotune.task.usercode import describe

IGNORED_LABEL = -100  # what torch's cross entropy and Hugging Face models leave out of the mean


def default_loss(model: torch.nn.Module, batch: Any) -> Any:
    """The loss of a dict batch, from the model itself, or of a pair `(x, y)`.

    - A dict is called as `model(**batch)`; the output's `.loss`, or its item `loss`, is the loss.
    - A pair with integer `y` gives cross entropy: logits (N, C) with y (N,); (N, T, C) with y (N, T); or, as torch has
      it, (N, C, ...) with y (N, ...).
    - A pair with floating `y` gives mean squared error between tensors of one shape, singleton dimensions aside.

    Raises:
        TaskError: none of these fits. It describes the batch and shows the `training_step` to write.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            without = (
                "without a loss (are the labels in the batch?)" if hasattr(output, "loss") else "which has no loss"
            )
            raise _no_default(batch, f"model(**batch) returned {describe(output)}, {without}", output)
        return loss
    if _is_pair(batch):
        x, y = batch
        output = model(x)
        if not isinstance(output, torch.Tensor):
            raise _no_default(batch, f"model(x) returned {describe(output)} where a tensor was expected", output)
        return _mean_squared_error(output, y, batch) if y.is_floating_point() else _cross_entropy(output, y, batch)
    raise _no_default(batch, "a dict for model(**batch) or a pair (x, y) of model input and target was expected", None)


def default_kind(batch: Any) -> LossKind:
    """Which loss `default_loss` takes for a batch."""
    if not _is_pair(batch):
        return LossKind.MODEL
    return LossKind.MEAN_SQUARED_ERROR if batch[1].is_floating_point() else LossKind.CROSS_ENTROPY


def reported(returned: Any) -> torch.Tensor:
    """The sum of the losses that a `train_step` returned, in any structure; zero for none."""
    from autotune.task.batches import contents

    if isinstance(returned, torch.Tensor):
        return returned.detach().float().mean()
    if isinstance(returned, int | float):
        return torch.tensor(float(returned))
    parts = [reported(part) for part in contents(returned).values()]
    return sum(parts, torch.zeros((), device=parts[0].device if parts else None))


def default_weight(batch: Any, *, shifts_labels: bool) -> float | None:
    """Number of terms that `default_loss` averages over; None if it is the number of samples.

    Args:
        batch: a micro batch, on any device.
        shifts_labels: the model is a causal language model that predicts label t + 1 at t and so never label 0.
    """
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor) or not _is_integer(labels) or labels.dim() < 2:
            return None
        return float((labels[..., 1:] if shifts_labels else labels).ne(IGNORED_LABEL).sum())
    if not _is_pair(batch):
        return None
    y = batch[1]
    return float(y.numel() if y.is_floating_point() else y.ne(IGNORED_LABEL).sum())


def shares_of(weights: list[float]) -> list[float]:
    """Each micro batch's weight in the mean over all; equal weights if none has a term."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else [1 / len(weights)] * len(weights)


class WithTerms:
    """In a process of several, puts a micro batch that has terms in the place of one that has none.

    The mean over nothing is NaN, and zero times that as well. The other one is of the step, or of an earlier step. Where there was
    none, and where no process has terms, the micro batches stay.
    """

    def __init__(self) -> None:
        self._known: Any = None  # the first micro batch that had any

    def __call__(self, micro_batches: list[Any], terms: list[float], of_all: torch.Tensor) -> list[Any]:
        """The micro batches of a step to train on.

        Args:
            terms: of each.
            of_all: the terms of all processes.
        """
        some = next((micro for micro, number in zip(micro_batches, terms, strict=True) if number > 0), self._known)
        if self._known is None:
            self._known = some
        if min(terms) > 0 or some is None or not of_all > 0:
            return micro_batches
        return [micro if number > 0 else some for micro, number in zip(micro_batches, terms, strict=True)]


def _cross_entropy(logits: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
    scores = logits.dim() == y.dim() + 1 and y.dim() > 0
    class_last = scores and logits.shape[:-1] == y.shape and logits.shape[-1] > 1
    class_second = scores and (logits.shape[0], *logits.shape[2:]) == tuple(y.shape) and logits.shape[1] > 1
    mistake = ""
    if y.dtype is torch.bool or not (class_last or class_second):
        mistake = ", and cross entropy needs a score for each of two or more classes"
    elif class_last and class_second and y.dim() > 1:
        mistake = ": either of two dimensions can be that of the classes"
    if mistake:
        seen = f"the model returned {describe(logits)} for integer targets of shape {tuple(y.shape)}"
        raise _no_default(batch, seen + mistake, logits)
    if class_last:
        logits, y = logits.reshape(-1, logits.shape[-1]), y.reshape(-1)
    return torch.nn.functional.cross_entropy(logits, y.long(), ignore_index=IGNORED_LABEL)


def _mean_squared_error(output: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
    if output.shape != y.shape:
        # (N, 1) against (N,) would broadcast to (N, N) without a word
        if [size for size in output.shape if size != 1] != [size for size in y.shape if size != 1]:
            seen = f"the model returned {describe(output)} for floating targets of shape {tuple(y.shape)}"
            raise _no_default(batch, f"{seen}, and mean squared error needs equal shapes", output)
        output = output.reshape(y.shape)
    return torch.nn.functional.mse_loss(output, y)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], torch.Tensor)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _no_default(batch: Any, why: str, output: Any) -> TaskError:
    return TaskError(
        f"no default loss fits: the batch is {describe(batch)}, and {why}. Write the loss into your model file, for "
        f"example:\n\n{_example(batch, output)}"
    )


def _example(batch: Any, output: Any) -> str:
    """A `training_step` to start from, with the batch's own names and the model's output."""
    target, unpack, call = "target", "", "batch"
    if isinstance(batch, Mapping):
        known = (name for name in ("labels", "label", "targets", "target", "y") if name in batch)
        target, call = next((f'batch["{name}"]' for name in known), target), "**batch"
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        names = ["x"] if len(batch) == 2 else [f"x{i}" for i in range(1, len(batch))]
        target, unpack, call = "y", f"    {', '.join((*names, 'y'))} = batch\n", ", ".join(names)
    logits = "output.logits" if hasattr(output, "logits") else "output"
    last = batch[-1] if target == "y" else None
    if not (isinstance(last, torch.Tensor) and _is_integer(last)):
        loss = f"mse_loss({logits}, {target})  # whatever your loss is, as a mean over the batch"
    elif isinstance(output, torch.Tensor) and output.numel() == last.numel():
        loss = "binary_cross_entropy_with_logits(output.flatten(), y.float().flatten())"
    else:
        loss = f"cross_entropy({logits}.flatten(0, -2), y.flatten())  # classes in the last dimension"
    head = f"def training_step(model, batch):\n{unpack}    output = model({call})\n"
    return f"{head}    return torch.nn.functional.{loss}"
