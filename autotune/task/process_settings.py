"""What a script has set in torch for its whole process. A model file says it again wherever it is imported; of a task built in Python
it has to travel with the task.

How many threads torch has belongs to a machine, so it goes by the environment of the processes there (`runners/connection.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from autotune.lazy import torch

_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_OPERATORS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def read_settings() -> dict[str, Any]:
    """Each setting with its value in this process, ready for JSON.

    One is left out where torch refuses to tell it: after a backend's `fp32_precision` was set, the older getters raise RuntimeError.
    """
    found = dict[str, Any]()
    for name, (read, _) in _settings().items():
        with contextlib.suppress(RuntimeError):
            found[name] = read()
    return found


_BY_SCRIPT = object()
# by a session: the value before, None where torch did not tell it, and the one since then, or that the script has set it again
_switched: dict[str, tuple[Any, Any]] = {}


@contextlib.contextmanager
def switching() -> Iterator[None]:
    """Around what a session switches: the settings are its own until `end_switches`, unless the script sets them again."""
    before = read_settings()
    try:
        yield
    finally:
        for name, value in read_settings().items():
            if value != before.get(name):
                own, _ = _switched.get(name, (before.get(name), None))
                _switched[name] = own, value


@contextlib.contextmanager
def as_script_has_them() -> Iterator[None]:
    """Around code of the script's while a session goes on: inside, settings are those that the script has set. What it sets there is
    its own from then on; the rest is the session's again. Where the code raises, all of it is.
    """
    switched, own = read_settings(), own_settings()
    apply_settings(own)
    try:
        yield
    except BaseException:
        apply_settings(switched)
        raise
    said = read_settings()
    sets = {name: value for name, value in said.items() if value != own.get(name)}
    apply_settings({**{name: switched[name] for name in _switched if name in switched}, **sets})
    for name in _switched.keys() & sets.keys():  # also where it is the value that the session had switched on
        _switched[name] = _switched[name][0], _BY_SCRIPT


def own_settings() -> dict[str, Any]:
    """As `read_settings`, with the values that the script itself has set where a session has switched them."""
    found = read_settings()
    own = {name: before for name, (before, since) in _switched.items() if found.get(name) == since}
    return {name: value for name, value in {**found, **own}.items() if value is not None}


def end_switches() -> dict[str, Any]:
    """Take all settings for the script's own from here on. Returns those that it has set since a session switched them."""
    found = read_settings()
    again = {name: found[name] for name, (_, since) in _switched.items() if found.get(name, since) != since}
    _switched.clear()
    return again


def apply_settings(asked: Mapping[str, Any]) -> None:
    """Set in this process what differs from it, one after the other: to set one may set others."""
    for name, (_, write) in _settings().items():
        if name in asked and read_settings().get(name) != asked[name]:
            write(asked[name])


def _settings() -> dict[str, _Setting]:
    cuda = torch.backends.cuda
    settings: dict[str, _Setting] = {
        "default_dtype": (
            lambda: str(torch.get_default_dtype()).removeprefix("torch."),
            lambda name: torch.set_default_dtype(getattr(torch, name)),
        ),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "flash_attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "memory_efficient_attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "plain_attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cudnn_attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    }
    attributes = [f"cudnn.{name}" for name in ("allow_tf32", "benchmark", "deterministic")]
    attributes += [f"cuda.matmul.{name}" for name in _REDUCTIONS if hasattr(cuda.matmul, name)]
    if hasattr(cuda.matmul, "fp32_precision"):  # torch 2.9 and later
        attributes += [f"{operator}.fp32_precision" for operator in _OPERATORS]
    return settings | {path: _attribute(path) for path in attributes}


def _attribute(path: str) -> _Setting:
    """An attribute of `torch.backends`."""
    owner, name = path.rsplit(".", 1)
    read, write = partial(attrgetter(path), torch.backends), partial(setattr, attrgetter(owner)(torch.backends), name)

    def set_or_inherit(value: str) -> None:
        """An operator whose precision is that of all goes on to follow it: `TrainingArguments(tf32=False)` sets only the latter."""
        write("none")
        if read() != value:
            write(value)

    return read, set_or_inherit if name == "fp32_precision" else write
