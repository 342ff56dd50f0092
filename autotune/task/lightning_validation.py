"""A LightningModule's own validation without a trainer: what it logs of each batch, and what it knows at the end alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task.adapters import is_lightning, lightning_hook, overrides


class Validation:
    """One validation after the other of a LightningModule, each between `begin` and `end`.

    What `self.log` is told to reduce otherwise than to a mean over the set (`on_epoch=False`, `reduce_fx`) is left out.
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
        """What was logged as a metric, and what the module logs after the last batch. Raises TaskError if nothing ever was."""
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
