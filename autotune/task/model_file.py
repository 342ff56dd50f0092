"""Model files: finding one, naming its task, listing those that this process has run, and what may stand in one.

The parts of a task are validated as far as possible without running them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import TaskError
from autotune.task.usercode import is_user_file

MODULE_PREFIX = "autotune_model_"  # begins the name of each model file's module
_GENERIC_STEMS = frozenset({"model", "train", "main"})
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "build_model": (),
    "make_batch": ("batch_size",),
    "training_step": ("model", "batch"),
    "train_step": ("model", "optimizers", "batch"),
    "configure_optimizers": ("model",),
    "train_dataset": (),
    "collate_fn": ("samples",),
    "checkpoint_blocks": ("model",),
    "loss_weight": ("batch",),
    "eval_step": ("model", "batch"),
    "eval_dataset": (),
    "eval_collate_fn": ("samples",),
}
ONE_OF_SEVERAL = ("variant_name",)  # what build_model takes where the task has VARIANTS
NOTHING_TO_EVALUATE = (
    "the task takes whole optimizer steps of its own, which leave no loss to evaluate with; write eval_step(model, batch) "
    "that returns the mean loss of the batch, or a dict of such means"
)
_WITHOUT_TRAIN_STEP = ("training_step", "loss_weight", "max_grad_norm")


@dataclass(frozen=True)
class Origin:
    """Where a loaded task comes from, and what its fields were when it was loaded: a task changed since no longer matches the file.

    Attributes:
        source: a `TaskSource`: how to load it again.
        loaded: the task's fields when it was loaded.
        warnings: the loader's warnings for the user.
    """

    source: Any
    loaded: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def find_model_file(spec: str | Path) -> tuple[Path, str]:
    """The absolute path and the attribute that `spec` names: PATH or PATH:ATTRIBUTE. A file whose name has a colon comes first.

    Raises:
        TaskError: no such file, or it is not a Python file; the nearest names are offered.
    """
    path, attribute = Path(spec).expanduser(), ""
    if not path.exists() and ":" in str(spec):
        before, _, after = str(spec).rpartition(":")
        if after.isidentifier():
            path, attribute = Path(before).expanduser(), after
    if path.is_dir():
        inside = sorted(entry.name for entry in path.glob("*.py"))
        named = f"; there is {' and '.join(inside[:3])} in it" if inside else ""
        raise TaskError(
            f"{path} is a folder; expected a Python file such as {path / (inside or ['model.py'])[0]}{named}"
        )
    if not path.exists():
        raise TaskError(f"there is no file {path}{_near_files(path)}; `autotune init {path}` writes one to start from")
    if path.suffix != ".py":
        raise TaskError(f"{path} is not a Python file; expected a model file whose name ends in .py{_near_files(path)}")
    return Path(os.path.abspath(path)), attribute


def name_of(path: Path, attribute: str = "") -> str:
    """A task's short name: the file's, or its folder's where the file has a generic one."""
    stem = path.stem if path.stem not in _GENERIC_STEMS else path.parent.name or path.stem
    return f"{stem}-{attribute}" if attribute not in ("", "task") else stem


def loaded_modules() -> list[ModuleType]:
    """The model files that this process has run, as modules."""
    return [module for name, module in sys.modules.copy().items() if name.startswith(MODULE_PREFIX)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean this or that?)`, empty where no name is near."""
    near = difflib.get_close_matches(name, list(names), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    return did_you_mean(path.with_suffix(".py").name, sorted(entry.name for entry in path.parent.glob("*.py")))


def check_fields(given: Mapping[str, Any]) -> None:
    """Check the signatures of a task's functions, and its constants.

    Args:
        given: the fields of a `Task` by name.

    Raises:
        TaskError: the first mistake, with what was expected.
    """
    for name in SIGNATURES:
        function = given[name]
        if function is not None or name == "build_model":
            check_signature(name, function, ONE_OF_SEVERAL if name == "build_model" and given["variants"] else None)
    if given["train_step"] is not None:
        for name in _WITHOUT_TRAIN_STEP:
            if given[name] is not None:
                raise TaskError(
                    f"train_step does the whole optimizer step, so {name} would not be used; do its work inside train_step and "
                    f"leave {name} out, or leave train_step out"
                )
        if given["eval"] is True and given["eval_step"] is None:
            raise TaskError(f"EVAL is True, and {NOTHING_TO_EVALUATE}")
    if given["eval_collate_fn"] is not None and given["eval_dataset"] is None:
        raise TaskError(
            "eval_collate_fn makes batches of eval_dataset's samples, and there is no eval_dataset; write eval_dataset(), or "
            "leave eval_collate_fn out"
        )
    for name, (is_valid, expected) in CONSTANTS.items():
        value = given[name.lower()]
        if value is not None and not is_valid(value):
            seen = f"{name.lower()} ({name} in a model file) is {value!r:.200}"
            raise TaskError(f"{seen}; expected {expected}, or leave it out")


def check_signature(name: str, function: Any, parameters: tuple[str, ...] | None = None) -> None:
    """Check that `function` can be called as the task's function `name` is called, by default with its `SIGNATURES`."""
    parameters = SIGNATURES[name] if parameters is None else parameters
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
        loss_alone = "; one that only returns the loss is training_step(model, batch)" if name == "train_step" else ""
        raise TaskError(
            f"{what}{_without_annotations(signature)}{_where(function)} cannot be called as {expected}: {error}; "
            f"change its parameters to ({', '.join(parameters)}), or give the others default values{loss_alone}"
        ) from None


def _is_config_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and type(choice) in (int, str, bool) for key, choice in value.items()
    )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and len(set(value)) == len(value) and all(type(name) is str and name for name in value)


# name in a model file (in lower case: the field of `Task`) -> a test of its value, and in words what is expected
CONSTANTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "GLOBAL_BATCH": (
        lambda value: type(value) is int and value > 0,
        "a whole number of samples per optimizer step, at least 1: set it to what you train with",
    ),
    "BASELINE": (
        _is_config_dict,
        'a config dict such as {"batch_size": 32, "amp": "bf16"}: name what you run today',
    ),
    "MAX_GRAD_NORM": (_is_positive, "a positive number such as 1.0: gradients are clipped to this norm"),
    "VARIANTS": (_are_names, 'a list of names such as ["small", "base"]: build_model takes one of them'),
    "FREEZE": (
        _are_names,
        'a list of names such as ["encoder", "encoder.layers.0"]: modules or parameters of the model',
    ),
    "EVAL": (
        lambda value: type(value) is bool,
        "True or False; True also searches the batch size for evaluation. Write eval_step(model, batch) for what to compute "
        "and eval_dataset() for the data",
    ),
}


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f" on line {code.co_firstlineno}" if code is not None and is_user_file(code.co_filename) else ""
