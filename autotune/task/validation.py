"""Validates the parts of a task as far as possible without running them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import TaskError
from autotune.task.usercode import is_user_file

if TYPE_CHECKING:
    from autotune.task.task import Task

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "build_model": (),
    "make_batch": ("batch_size",),
    "training_step": ("model", "batch"),
    "configure_optimizers": ("model",),
    "train_dataset": (),
    "collate_fn": ("samples",),
    "checkpoint_blocks": ("model",),
    "loss_weight": ("batch",),
}
CONSTANTS = ("global_batch", "baseline", "max_grad_norm")  # in capitals in a model file


def check_fields(task: Task) -> None:
    """Check the signatures of a task's functions, and its constants.

    Raises:
        TaskError: the first mistake, with what was expected.
    """
    for name in SIGNATURES:
        function = getattr(task, name)
        if function is not None or name == "build_model":
            check_signature(name, function)
    _check_global_batch(task.global_batch)
    _check_baseline(task.baseline)
    _check_max_grad_norm(task.max_grad_norm)


def check_signature(name: str, function: Any) -> None:
    """Check that `function` can be called as the task's function `name` is called."""
    parameters = SIGNATURES[name]
    expected = f"{name}({', '.join(parameters)})"
    if not callable(function):
        raise TaskError(f"{name} is {function!r:.80}; expected a function {expected}: write `def {expected}: ...`")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not say
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        what = f"the class {function.__name__}" if isinstance(function, type) else name
        raise TaskError(
            f"{what}{_without_annotations(signature)}{_where(function)} cannot be called as {expected}: {error}; "
            f"change its parameters to ({', '.join(parameters)}), or give the others default values"
        ) from None


def _check_global_batch(value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise TaskError(
            f"global_batch (GLOBAL_BATCH in a model file) is {value!r}; expected a whole number of samples per "
            "optimizer step, at least 1: set it to what you train with, or leave it out"
        )


def _check_baseline(value: Any) -> None:
    if value is None:
        return
    expected = (
        'expected a config dict such as {"batch_size": 32, "amp": "bf16"}: name what you run today, or leave it out'
    )
    if not isinstance(value, Mapping):
        raise TaskError(f"baseline (BASELINE in a model file) is {value!r:.200}; {expected}")
    for key, choice in value.items():
        if not isinstance(key, str) or type(choice) not in (int, str, bool):
            raise TaskError(f"baseline (BASELINE in a model file) holds {key!r}: {choice!r:.80}; {expected}")


def _check_max_grad_norm(value: Any) -> None:
    if value is None:
        return
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise TaskError(
            f"max_grad_norm (MAX_GRAD_NORM in a model file) is {value!r}; expected a positive number such as 1.0: "
            "gradients are clipped to this norm; leave it out for no clipping"
        )


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f" on line {code.co_firstlineno}" if code is not None and is_user_file(code.co_filename) else ""
