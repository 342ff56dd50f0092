"""What Python runs at the start of every process of a command that is probed: a copy of this file, as `sitecustomize.py`.

It must not disturb what it is no part of: it imports the standard library alone until an optimizer takes a step, or an
exception ends the process.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType, TracebackType
from typing import Any

SETTINGS = "AUTOTUNE_PROBE_SETTINGS"  # variable of the environment: the file with what `launch.py` says of the probe


class _AfterTorch:
    """A finder that lets torch be found as ever, and hears when it has been imported.

    It stays until then: many a package asks whether torch is there before anything imports it.
    """

    _is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                _hook()

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def _hook() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with open("/proc/self/status", errors="replace") as status:
        held = next((line.split()[1] for line in status if line.startswith("VmData:")), "0")
    _probe["outside_bytes"] = 1024 * int(held)

    def stepped(optimizer: Any, arguments: Any, options: Any) -> None:
        _watch().stepped(optimizer)

    _watch_class()  # now: when memory has run out, an import may fail
    register_optimizer_step_post_hook(stepped)
    limit_bytes = _probe["settings"]["memory_limit_bytes"]
    if _probe["device"] != "cpu" and limit_bytes is not None:
        torch.cuda._lazy_call(lambda: _limit_gpu(limit_bytes))


def _limit_gpu(limit_bytes: int) -> None:
    """Before the first allocation; the watch subtracts what lies outside the allocator once there is a step.

    On the card alone that this process will train on: another would get a context.
    """
    import torch

    index = int(os.environ.get("LOCAL_RANK") or 0)
    if index >= torch.cuda.device_count():  # the launcher shows each process its own card only
        index = 0
    with torch.cuda.device(index):  # the current one is restored
        total_bytes = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), index)


def _watch() -> Any:
    """This process's own: a fork has another."""
    if _watches.get(os.getpid()) is None:
        _watches.clear()
        _watches[os.getpid()] = _watch_class()(_probe)
    return _watches[os.getpid()]


def _watch_class() -> Any:
    """From the folder of the autotune that searches, if this process does not find it by itself."""
    added = [] if _probe["package"] in sys.path else [_probe["package"]]
    sys.path.extend(added)
    try:
        from autotune.runners.watch import Watch
    except ImportError as error:
        raise ImportError(
            f"{sys.executable}, which runs the command, lacks what autotune needs ({error}): install autotune-torch there"
        ) from error
    finally:
        for folder in added:
            sys.path.remove(folder)
    return Watch


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _told(kind, error, trace)
    if not issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(Exception):
            _watch().failed(error)


def _chain() -> None:
    """Run the `sitecustomize` that this one hides, and hide no longer in `sys.path`."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if SETTINGS in os.environ:
    with open(os.environ[SETTINGS]) as _file:
        _probe: dict[str, Any] = json.load(_file)
    _watches: dict[int, Any] = {}
    _told = sys.excepthook
    sys.excepthook = _excepthook
    sys.meta_path.insert(0, _AfterTorch())
    _chain()
