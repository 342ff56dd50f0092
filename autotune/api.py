"""The Python API beside `prepare`: the same search, probe and verification that the command line runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune import techniques
from autotune.devices import open_device
from autotune.devices.absent import AbsentGpu
from autotune.devices.cards import card_of
from autotune.devices.targets import target_of
from autotune.errors import ConfigError
from autotune.predict.answer import Prediction, answer
from autotune.predict.cache import FOLDER, cached_traces
from autotune.records.config import Choice, Config
from autotune.records.device import DeviceInfo
from autotune.records.options import SearchOptions
from autotune.records.outcome import Outcome
from autotune.records.result import Result
from autotune.records.settings import ProbeSettings
from autotune.runners.local import ProcessProber
from autotune.space import build_space
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.tuning.events import Listener
from autotune.tuning.run import inspection_failed
from autotune.tuning.run import search as run_search
from autotune.units import parse_bytes, parse_fraction, parse_seconds

VERIFY_TIMEOUT_S = 24 * 3600.0
PROBE_TIMEOUT_S = 600.0
PREDICT_TIMEOUT_S = 120.0


def search(
    task: Task | str | Path,
    *,
    device: str = "auto",
    objective: str = "throughput",
    memory_limit: str | int | None = None,
    headroom: str | float = 0.05,
    global_batch: int | None = None,
    budget: str | float = 300.0,
    trials: int | None = None,
    fix: Mapping[str, Choice] | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    sampler: str = "cost-model",
    seed: int = 0,
    probe_timeout: str | float | None = None,
    study: str | None = None,
    storage: str | None = None,
    listener: Listener | None = None,
) -> Result:
    """Find the config that trains `task` fastest on this machine within its memory.

    Args:
        task: a `Task`, or the path of a `model.py` (`model.py:task` names a `Task` in it).
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        objective: `throughput`, `memory` or `balanced`.
        memory_limit: bytes, or text such as `12GiB` or `80%`; None takes what is free.
        headroom: share of the limit that the answer leaves free, e.g. `5%`.
        global_batch: samples per optimizer step, in place of the task's own.
        budget: seconds, or text such as `2m`, for the whole search.
        trials: at most that many probes before the play-off.
        fix, include, exclude: techniques to pin to a choice, to search although optional, to leave as in the baseline.
        sampler: `cost-model`, or Optuna's `gp`, `tpe` or `random`, or `grid`.
        probe_timeout: seconds or text; None takes a multiple of the baseline's time.
        study, storage: name and file or URL of the study; `studies/<task>.db` by default.
        listener: watches the search.

    Raises:
        AutotuneError: a `TaskError`, `ConfigError`, `DeviceError` or `StudyError` that the user can put right;
            `NothingFeasible` when no config runs within the limits; `Interrupted` after Ctrl-C.
    """
    options = SearchOptions(
        device=device,
        objective=objective,
        memory_limit_bytes=memory_limit_bytes(memory_limit, device),
        headroom=_parsed(parse_fraction, headroom),
        global_batch=global_batch,
        budget_s=_parsed(parse_seconds, budget),
        num_trials=trials,
        fix=dict(fix or {}),
        include=tuple(include),
        exclude=tuple(exclude),
        sampler=sampler,
        seed=seed,
        probe_timeout_s=None if probe_timeout is None else _parsed(parse_seconds, probe_timeout),
        study=study,
        storage=storage,
    )
    return run_search(TaskSource.of(task), options, listener)


def probe(
    task: Task | str | Path,
    config: Mapping[str, Choice],
    *,
    device: str = "auto",
    memory_limit: str | int | None = None,
    steps: int = 0,
    timeout: str | float | None = None,
    global_batch: int | None = None,
    logs: Path = Path("studies"),
) -> Outcome:
    """Run one config once in a process of its own, as a search's probe does.

    Args:
        steps: exactly that many timed optimizer steps; 0 stops when the throughput is known within 2 %.
        timeout: seconds or text; by default ten minutes, a day with `steps`.
        logs: folder for what the user's code prints.

    Raises:
        AutotuneError: as `search` does. What happens in the run itself is in the outcome.
    """
    opened = open_device(device)
    info = opened.info()
    limit = memory_limit_bytes(memory_limit, device) or info.free_bytes
    default_timeout_s = VERIFY_TIMEOUT_S if steps else PROBE_TIMEOUT_S
    settings = ProbeSettings(
        device=info.name,
        memory_limit_bytes=limit,
        num_steps=steps,
        timeout_s=default_timeout_s if timeout is None else _parsed(parse_seconds, timeout),
    )
    source = TaskSource.of(task)
    if global_batch is not None:
        source = source.with_global_batch(global_batch)
    with ProcessProber(source, logs=logs / f"{source.name}.logs") as prober:
        given = prober.global_batch
        complete = techniques.complete(techniques.with_baseline_batch(config, prober.baseline), global_batch=given)
        _require_global_batch(complete, given)
        return prober.run(complete, settings)


def verify(task: Task | str | Path, config: Mapping[str, Choice], *, steps: int, **options: Any) -> Outcome:
    """A long run of one config with real data: `probe` for exactly `steps` optimizer steps."""
    if steps < 1:
        raise ConfigError(f"{steps} steps are not possible; expected at least 1")
    return probe(task, config, steps=steps, **options)


def predict(
    task: Task | str | Path,
    config: Mapping[str, Choice] | None = None,
    *,
    gpu: str | None = None,
    device: str = "auto",
    memory_limit: str | int | None = None,
    headroom: str | float = 0.05,
    global_batch: int | None = None,
    timeout: str | float = PREDICT_TIMEOUT_S,
    logs: Path = Path("studies"),
) -> Prediction:
    """Predict what fits into a memory without training: the largest batch of each combination of techniques, or one config.

    Training steps are traced without computing anything, in a process that sees no GPU. What is predicted was not measured.

    Args:
        config: predict this config alone; what it does not name is off.
        gpu: memory such as `80GiB`, or a card such as `A100 80GB`, which need not be here; None is for `device`.
        device: `auto`, `cpu`, `cuda` or `cuda:1`, where no `gpu` is given.
        memory_limit: bytes, or text such as `12GiB` or `80%`; None takes the card's memory, or what the device has free.
        headroom: share of the limit that is to stay free.
        timeout: seconds or text for the tracing; what is not traced by then is left out.
        logs: folder for what the user's code prints, and for traces, which are kept for the next time.

    Raises:
        AutotuneError: as `search` does; a `TaskError` where the model cannot be traced, with the reason.
    """
    started = time.monotonic()
    share = _parsed(parse_fraction, headroom)
    if not 0 <= share < 1:
        raise ConfigError(f"a headroom of {share:g} is not possible; expected a share from 0% to below 100%")
    timeout_s = _parsed(parse_seconds, timeout)
    info = _target(gpu, device)
    limit = info.free_bytes if memory_limit is None else _bytes(memory_limit, info.total_bytes)
    source = TaskSource.of(task)
    if global_batch is not None:
        source = source.with_global_batch(global_batch)
    with ProcessProber(source, logs=logs / f"{source.name}.logs") as prober:
        given = prober.global_batch
        asked = None
        if config is not None:
            asked = techniques.complete(techniques.with_baseline_batch(config, prober.baseline), global_batch=given)
            _require_global_batch(asked, given)
        absent = None if gpu is None else info
        inspection = prober.inspect(info.name, None, PROBE_TIMEOUT_S, absent=absent)
        if isinstance(inspection, Outcome):
            raise inspection_failed(inspection, limit)
        space, _ = build_space(inspection, fix={}, include=(), exclude=())
        tracing = time.monotonic()
        traces = cached_traces(
            prober,
            [asked] if asked is not None else space.tracing(),
            target_of(info),
            facts=inspection.facts,
            folder=logs / FOLDER,
            timeout_s=timeout_s,
        )
    trace_s = time.monotonic() - tracing
    return answer(
        inspection,
        space,
        traces,
        asked,
        memory_limit_bytes=limit,
        headroom=share,
        timeout_s=timeout_s,
        trace_s=trace_s,
        wall_s=time.monotonic() - started,
    )


def _target(gpu: str | None, device: str) -> DeviceInfo:
    """What is predicted for."""
    if gpu is None:
        return open_device(device).info()
    if device != "auto":
        raise ConfigError(f"--gpu {gpu} and --device {device} contradict each other; leave one of them out")
    card = card_of(gpu)
    return DeviceInfo(
        name=AbsentGpu.name,
        model=card.name,
        total_bytes=card.total_bytes,
        free_bytes=card.total_bytes,
        capability=card.capability,
    )


def memory_limit_bytes(limit: str | int | None, device: str) -> int | None:
    """A memory limit in bytes from bytes, text such as `12GiB`, or a percentage of the device's memory.

    Raises:
        ConfigError: it cannot be read.
    """
    if limit is None or isinstance(limit, int):
        return limit
    total_bytes = open_device(device).info().total_bytes if "%" in limit else None
    return _bytes(limit, total_bytes)


def _bytes(limit: str | int, total_bytes: int | None) -> int:
    try:
        return limit if isinstance(limit, int) else parse_bytes(limit, total_bytes=total_bytes)
    except ValueError as error:
        raise ConfigError(f"the memory limit {error}") from None


def _require_global_batch(config: Config, global_batch: int | None) -> None:
    if global_batch is not None and config.samples_per_step != global_batch:
        raise ConfigError(
            f"batch_size {config.batch_size} x accumulation_steps {config.accumulation_steps} is {config.samples_per_step} "
            f"samples per optimizer step, but the global batch is {global_batch}; leave accumulation_steps out of the config, "
            f"or ask for a global batch of {config.samples_per_step} (--global-batch {config.samples_per_step})"
        )


def _parsed(parse: Any, value: str | float) -> float:
    if not isinstance(value, str):
        return float(value)
    try:
        return float(parse(value))
    except ValueError as error:
        raise ConfigError(str(error)) from None
