"""The Python API beside `prepare`: the same search, probe and verification that the command line runs."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.devices import capabilities_of, name_devices, open_device
from autotune.devices.calibration import holds_for
from autotune.devices.cuda import CudaDevice
from autotune.devices.targets import card_of, target_of
from autotune.errors import AutotuneError, ConfigError, StudyError
from autotune.prediction.traces import Traces
from autotune.records.capacity import MemoryPrediction
from autotune.records.config import Choice, Config, ProbeSettings, World
from autotune.records.device import NOT_MEASURED, DeviceInfo
from autotune.records.explanation import Explanation
from autotune.records.inspection import Inspection
from autotune.records.options import (
    ONE_DEVICE,
    ONE_SLOT,
    CommandOptions,
    ExplainOptions,
    PredictOptions,
    ProbeOptions,
    SearchOptions,
    SweepOptions,
    VerifyOptions,
    takes,
)
from autotune.records.outcome import Outcome
from autotune.records.recheck import Recheck
from autotune.records.result import Result
from autotune.records.scaling import OnDevices, Scaling
from autotune.records.study import Fingerprint
from autotune.report.live import listeners_of
from autotune.runners.command import Command, CommandRunner
from autotune.runners.elsewhere import runner_elsewhere
from autotune.runners.jobs import InspectJob, JobFailed
from autotune.runners.local import LocalRunner
from autotune.runners.portable import PortableRunner
from autotune.runners.runner import Runner
from autotune.runners.table import Table
from autotune.space import build_space
from autotune.study.caches import RecheckCache, TraceCache
from autotune.study.facts import keep_recheck
from autotune.study.place import place_of
from autotune.study.reading import Study
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import Techniques, find_techniques
from autotune.tuning import sweep as sweeping
from autotune.tuning.communicators import know_communicators
from autotune.tuning.dissect import dissect
from autotune.tuning.entrant import samples_per_s
from autotune.tuning.events import Listener, Listeners
from autotune.tuning.inspecting import calibrate_device, inspect
from autotune.tuning.later import recheck_answer
from autotune.tuning.predict import predict_fit
from autotune.tuning.recommend import Interrupted, NothingFeasible
from autotune.tuning.search import search as run_search
from autotune.tuning.trace_ahead import Tracing
from autotune.tuning.where_kept import fingerprint
from autotune.units import format_bytes, format_seconds

LOGS = Path("studies")
Asked = TypeVar("Asked", PredictOptions, ExplainOptions)


@takes(SearchOptions)
def search(
    task: Task | str | Path,
    *,
    runner: Runner | str | None = None,
    listeners: Sequence[Listener] | None = None,
    began_s: float | None = None,
    **options: Any,
) -> Result:
    """Find the config that trains `task` fastest on this machine within its memory.

    Args:
        task: a `Task`, or the path of a `model.py` (`model.py:task` names a `Task` in it).
        runner: runs the probes, or names what does, as `--runner` takes it; by default processes on this machine.
        listeners: watch the search; `autotune.trackers` has some. By default its progress is shown on stderr: a live table on a
            terminal, a line for each probe elsewhere. An empty list shows nothing.
        began_s: what `time.monotonic()` read when the user began to wait, from when the budget counts; by default now.
        **options

    Raises:
        AutotuneError: a `TaskError`, `ConfigError`, `DeviceError` or `StudyError` that the user can put right;
            `NothingFeasible` when no config runs within the limits; `Interrupted` after Ctrl-C.
    """
    source = TaskSource.of(task)
    if isinstance(runner, str):
        runner, options = _open_elsewhere(runner, source, options)
    total_bytes = _total_bytes if runner is None else lambda device: runner.slots()[0].device.total_bytes
    asked = SearchOptions.of(options, total_bytes=total_bytes)
    return run_search(source, asked, runner=runner, listener=Listeners(listeners_of(listeners)), began_s=began_s)


@takes(SearchOptions)
def search_on_each(
    task: Task | str | Path,
    sizes: Sequence[int],
    *,
    listeners: Sequence[Listener] | None = None,
    began_s: float | None = None,
    **options: Any,
) -> Scaling:
    """Search several numbers of devices, one after the other, and compare what they train: is the second one worth it?

    Each has a study of its own and an equal share of the budget.

    Args:
        task, listeners, began_s: as in `search`.
        sizes: numbers of devices; processes on a CPU.
        **options

    Raises:
        AutotuneError: as `search` does for one of them, as long as nothing was found of another. `Interrupted` has what was found of
            the others.
    """
    numbers = ",".join(map(str, sizes))
    if len({*sizes}) < len(sizes) or min(sizes, default=0) < 1:
        raise ConfigError(
            f"--devices {numbers}: expected different numbers of devices, from 1 on; those themselves are cuda:{numbers}"
        )
    asked = SearchOptions.of(options, total_bytes=_total_bytes)
    if asked.slots != ONE_SLOT:
        raise ConfigError(
            f"slots {asked.slots} cannot be chosen: each slot is one device, and --devices {numbers} trains with several; leave one of "
            "them out"
        )
    on_cpu = not open_device(asked.device).capabilities.own_processors
    devices = {size: f"cpu:{size}" if on_cpu and size > 1 else str(size) for size in sizes}
    for named in devices.values():
        name_devices(named, asked.device)  # refuses what does not exist before anything takes minutes
    found: list[OnDevices] = []
    failed: dict[int, str] = {}
    for size in sizes:
        own = replace(
            asked,
            devices=devices[size],
            budget_s=None if asked.budget_s is None else asked.budget_s / len(sizes),
            study=f"{asked.study} on {size}" if asked.study and size > 1 else asked.study,
        )
        listener = Listeners(listeners_of(listeners))
        try:
            result = run_search(TaskSource.of(task), own, listener=listener, began_s=began_s, beside_one_device=False)
            found.append(OnDevices.of(result))
        except Interrupted as error:
            found += [] if error.result is None else [OnDevices.of(error.result)]
            error.scaling = Scaling.of(found, failed) if found else None
            raise
        except KeyboardInterrupt:  # while a search opens
            if not found:
                raise
            interrupted = Interrupted(None)
            interrupted.scaling = Scaling.of(found, failed)
            raise interrupted from None
        except AutotuneError as error:
            if not found and not isinstance(error, NothingFeasible):  # what fits on no single device may fit on several
                raise
            failed[size] = str(error)
        began_s = None  # only the first began when the user did: each other one begins when the one before has ended
    if not found:
        raise NothingFeasible("; ".join(f"{size} of them: {why}" for size, why in failed.items()))
    return Scaling.of(found, failed)


@takes(CommandOptions)
def search_command(
    command: str, *, listeners: Sequence[Listener] | None = None, began_s: float | None = None, **options: Any
) -> Result:
    """Find how a training script runs fastest, by its own arguments: each probe runs `command` for a few optimizer steps.

    The script is not changed, and its gradients are not seen. It runs in the current folder, with trackers and the Hugging Face hub
    switched off (`HF_HUB_OFFLINE=0` switches the hub on) and `AUTOTUNE_PROBE=1` set. Steps are those of `torch.optim` in a Python
    that has autotune installed. Processes that train together, as those of `torchrun`, are counted together; the memory
    limit is each one's own. On a CPU a failed allocation that the script catches and does not print is not seen: if the script
    then halves its batch, the speed is overstated.

    A study is continued while the command, the files that it names and the user's modules that the script has imported by its first
    optimizer step are as they were. Data, and configs that the script finds by itself, as Hydra does, are not looked at: after an edit
    of these, name another `study`.

    Args:
        command: a command line for a shell, with `{batch_size}`, `{accumulation_steps}`, `{devices}` for the number of
            `devices`, one `{NAME}` for each of `choices`, and `{output_dir}` for a folder to write to.
        listeners, began_s: as in `search`.
        **options

    Raises:
        AutotuneError: as `search` does.
    """
    asked = CommandOptions.of(options, total_bytes=_total_bytes)
    if asked.slots != ONE_SLOT:
        raise ConfigError(
            f"slots {asked.slots}: a command chooses its devices itself, so its runs are not held apart; leave --slots out, or search "
            "a MODEL"
        )
    template = Command(command, asked.choices)
    runner = CommandRunner(
        template,
        logs=place_of(asked.storage, asked.study, template.name).logs,
        device=asked.device,
        devices=asked.devices,
        global_batch=asked.global_batch,
        baseline=asked.baseline,
    )
    plain = replace(asked, device="auto", devices=ONE_DEVICE, global_batch=None)
    return run_search(None, plain, runner=runner, listener=Listeners(listeners_of(listeners)), began_s=began_s)


@takes(ProbeOptions)
def probe(
    task: Task | str | Path,
    config: Mapping[str, Choice],
    *,
    logs: Path = LOGS,
    on_warning: Callable[[str], None] = lambda warning: None,
    **options: Any,
) -> Outcome:
    """Run one config once in a process of its own, as a search's probe does, until its throughput is known within 2 %.

    Args:
        task: as in `search`.
        config: a config dict; what it does not name is off.
        logs: folder for what the user's code prints.
        on_warning: called with what the user should know about how the task was read.
        **options

    Raises:
        AutotuneError: as `search` does; a `ConfigError` for a technique that does not apply. What happens in the run
            itself is in the outcome.
    """
    return _run_each(task, [config], ProbeOptions.of(options, total_bytes=_total_bytes), 0, logs, on_warning)[0][0]


@takes(VerifyOptions)
def verify(
    task: Task | str | Path,
    config: Mapping[str, Choice],
    *,
    logs: Path = LOGS,
    on_warning: Callable[[str], None] = lambda warning: None,
    **options: Any,
) -> Outcome:
    """Run one config with real data for exactly `steps` optimizer steps, else as `probe` does.

    Args:
        task, config, logs, on_warning: as in `probe`.
        **options

    Raises:
        AutotuneError: as `probe` does.
    """
    asked = VerifyOptions.of(options, total_bytes=_total_bytes)
    return _run_each(task, [config], asked, asked.num_steps, logs, on_warning)[0][0]


@takes(VerifyOptions)
def verify_answer(
    task: Task | str | Path,
    study: Study,
    *,
    logs: Path = LOGS,
    on_warning: Callable[[str], None] = lambda warning: None,
    on_progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Outcome, Recheck | None, str]:
    """Run a study's answer as `verify` does, and where it told a gain, the baseline beside it: each twice, in turns.

    What is seen of the gain is kept in the study, and for the next searches on this machine (`autotune.tuning.later`), unless it is
    another task, its code has changed since, or the study is of another device.

    Args:
        task, logs, on_warning: as in `probe`.
        study: as `load_study` reads it; one with an answer that is no command line.
        on_progress: called with a line as each run begins.
        **options

    Returns:
        The answer's outcome, of its runs the one that failed or else the fastest; what was seen of the gain, None where there is none
        or something failed; and how the study's device differs from this one, in words, empty where it does not.

    Raises:
        AutotuneError: as `probe` does; a `StudyError` where there is no answer.
    """
    answer = study.answer()
    asked = VerifyOptions.of(options, total_bytes=_total_bytes)
    base = answer.baseline.config if answer.baseline is not None and answer.speedup_ci is not None else None
    turns = [answer.config] if base is None else [answer.config, base, base, answer.config]
    outcomes, inspection = _run_each(task, turns, asked, asked.num_steps, logs, on_warning, on_progress)
    own, beside = outcomes[::3], outcomes[1:3]
    seen = recheck_answer(answer, own, beside)
    searched_hash = study.facts.fingerprint.task
    is_same_code = inspection is None or searched_hash in (None, inspection.facts.source_hash)
    elsewhere = "" if inspection is None else _elsewhere(study.facts.fingerprint, inspection)
    not_kept = "" if seen is None else ", so what is seen of the gain is not kept"
    if not is_same_code:
        on_warning(f"this is another task than the study's, or its code has changed{not_kept}")
    if elsewhere:
        on_warning(f"the study was not searched on this device: {elsewhere}{not_kept}")
    if seen is not None and is_same_code and not elsewhere:
        try:
            keep_recheck(study.url, study.name, seen)
        except StudyError as error:
            on_warning(f"what was seen of the gain is not kept in the study: {error}")
        if inspection is not None:
            RecheckCache(study.file.parent if study.file else logs, holds_for(inspection.device)).add(seen)
    failed = next((outcome for outcome in own if not outcome.ok), None)
    return failed or max(own, key=samples_per_s), seen, elsewhere


def _elsewhere(searched: Fingerprint, inspection: Inspection) -> str:
    """How the device of a study differs from that of a run, in words, as far as the study recorded it; empty where it does not."""
    here = fingerprint(inspection, find_techniques(), searched)
    compared = (
        ("device", searched.device, here.device),
        ("number of threads", searched.num_threads, here.num_threads),
        ("number of processes", searched.num_processes or 1, here.num_processes or 1),
    )
    return "; ".join(f"{what} {was} there and {now} here" for what, was, now in compared if was and now and was != now)


def _run_each(
    task: Task | str | Path,
    configs: Sequence[Mapping[str, Choice]],
    options: ProbeOptions | VerifyOptions,
    num_steps: int,
    logs: Path,
    on_warning: Callable[[str], None],
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Outcome], Inspection | None]:
    """Run configs one after the other. The inspection is None where it failed."""
    for config in configs:
        find_techniques().complete(config)  # refuses a typo before anything takes seconds
    source = TaskSource.of(task).with_global_batch(options.global_batch)
    place = logs / source.name
    local = LocalRunner(
        source,
        device=options.device,
        devices=options.devices,
        logs=place.with_suffix(".logs"),
    )
    local.keep_compiled(place.with_suffix(".compiled"))
    # read before a supervisor holds memory: each probe's limit counts that memory, too
    info = local.slots()[0].device
    with local as runner:
        settings = ProbeSettings(
            memory_limit_bytes=options.memory_limit_bytes or info.free_bytes,
            num_steps=num_steps,
            min_timed_s=capabilities_of(info.name).energy_window_s,
            timeout_s=options.timeout_s,
            world=runner.world,
        )
        complete = [_complete(config, runner) for config in configs]
        job = InspectJob(
            memory_limit_bytes=settings.memory_limit_bytes,
            timeout_s=settings.timeout_s,
            trained=runner.techniques.trained(complete[0]),
            world=runner.world,
        )
        inspection = None
        with contextlib.suppress(JobFailed):  # the probe will say better why it failed
            inspection = runner.run(job)
            for config in complete:
                _require_support(config, inspection, runner.techniques)
            for warning in inspection.facts.warnings:
                on_warning(warning)
        outcomes = []
        for number, config in enumerate(complete, 1):
            on_progress(f"run {number} of {len(complete)}: {runner.techniques.describe(config)}")
            outcomes.append(runner.probe(config, settings))
        warnings: dict[Config, str] = {}
        for config, outcome in zip(complete, outcomes, strict=True):
            if warning := _outgrows(settings.memory_limit_bytes, config, outcome):
                warnings.setdefault(config, warning)
        for warning in warnings.values():
            on_warning(warning)
        return outcomes, inspection


def _outgrows(limit_bytes: int | None, config: Config, outcome: Outcome) -> str:
    """That a long run of a config is expected to take more than the memory limit; empty where it is not."""
    found = outcome.measurement
    if (
        found is None
        or limit_bytes is None
        or not found.long_run_growth_bytes
        or found.long_run_peak_bytes <= limit_bytes
    ):
        return ""
    return (
        f"{find_techniques().describe(config)}: its memory still grew, and a long run is expected to hold "
        f"{format_bytes(found.long_run_peak_bytes)}, more than the limit of {format_bytes(limit_bytes)}; more --steps measure it"
    )


def _require_support(config: Config, inspection: Inspection, techniques: Techniques) -> None:
    """Raise ConfigError for a technique of the config that does not apply. A number need not be among those searched."""
    switched = {}
    for name, choice in techniques.switched_on(config):
        support = inspection.support_of(name)
        if not techniques[name].ordered or not {*support.choices, *support.optional} - {techniques[name].off}:
            switched[name] = choice
    build_space(inspection, techniques, fix=switched)


@takes(SweepOptions)
def sweep(
    task: Task | str | Path, *, on_row: Callable[[sweeping.Progress], None] | None = None, **options: Any
) -> Table:
    """Measure a whole space into a recorded table, on which searches can be compared.

    Args:
        task: as in `search`.
        on_row: called with each new row.
        **options

    Raises:
        AutotuneError: as `search` does.
    """
    asked = SweepOptions.of(options, total_bytes=_total_bytes)
    return sweeping.sweep(TaskSource.of(task), asked, on_row or (lambda progress: None))


@takes(PredictOptions)
def predict(
    task: Task | str | Path,
    config: Mapping[str, Choice] | None = None,
    *,
    logs: Path = LOGS,
    on_first: Callable[[MemoryPrediction], None] = lambda prediction: None,
    on_warning: Callable[[str], None] = lambda warning: None,
    **options: Any,
) -> MemoryPrediction:
    """Predict what fits into a memory without training: the largest batch of each combination of techniques, or one config.

    The model is built and training steps are traced without values, in a process that sees no GPU. Only a model whose constructor
    reads values of large tensors, or loads them in its own way, is built for real.

    Args:
        task: as in `search`.
        config: predict this config alone; what it does not name is off.
        logs: folder for what the user's code prints, and for traces for the next time; `on_warning` is told where it cannot be written.
        on_first: called once, as soon as plain training is traced, with what is known by then; not where `config` is given.
        **options

    Raises:
        AutotuneError: as `search` does; a `TaskError` where the model cannot be traced (it says why), where time was up before
            anything was traced, or where the host's memory ran out.
    """
    started = time.monotonic()
    asked, info, device, world = _of_a_target(PredictOptions, options, config)
    ends = started + asked.timeout_s
    source = TaskSource.of(task).with_global_batch(asked.global_batch)
    with _place_of_logs(source, logs, on_warning) as place, _tracing(source, device, place, asked.timeout_s) as runner:
        only = None if config is None else _complete(config, runner, world)
        job = InspectJob(
            memory_limit_bytes=None,
            calibration=calibrate_device(runner, info, logs)[0] if asked.gpu is None else NOT_MEASURED,
            timeout_s=max(0.0, ends - time.monotonic()),  # of what calibrating leaves
            absent=None if asked.gpu is None else info,
            trained={} if only is None else runner.techniques.trained(only),
            world=world,
            trains=False,
        )
        inspection = know_communicators(runner, inspect(runner, job, asked.timeout_s), logs)
        space, _ = build_space(inspection, runner.techniques)
        configs = [only] if only is not None else list(space.tracing())
        target, sizes = target_of(info), [config.batch_size for config in configs]
        cache = TraceCache(logs, inspection.facts, target, sizes, runner.techniques.trained(space.baseline), world)
        tracing = Tracing(runner, lambda: configs, target, cache, max(0.0, ends - time.monotonic()), world=world)

        def predicted(traces: Traces, *, late: bool = False) -> MemoryPrediction:
            return predict_fit(
                inspection,
                space,
                traces,
                only,
                memory_limit_bytes=asked.memory_limit_bytes or _free_bytes(info, world),
                headroom=asked.headroom,
                ended_after_s=asked.timeout_s if late else None,
                trace_s=tracing.wall_s,
                wall_s=time.monotonic() - started,
            )

        waiting = [on_first] if only is None else []

        def watch(traces: Traces) -> bool:
            if traces.knows_plain and waiting:
                waiting.pop()(predicted(traces))
            return bool(waiting)

        tracing.advance(tracing.max_s, watch)
    late = dict.fromkeys(tracing.missing, f"not traced within {format_seconds(asked.timeout_s)}")
    return predicted(tracing.traces.merged(Traces(target=target, failures=late)), late=bool(late))


@takes(ExplainOptions)
def explain(
    task: Task | str | Path,
    config: Mapping[str, Choice] | None = None,
    *,
    logs: Path = LOGS,
    on_warning: Callable[[str], None] = lambda warning: None,
    **options: Any,
) -> Explanation:
    """Explain where memory and time go, layer by layer and kind by kind, and what each technique alone would change.

    Whole training steps are traced without computing anything. Where one device of this machine trains, the config is also run for
    a short while; a model that cannot be traced is explained by that alone. With several `devices` nothing is run: what rank 0 holds
    is traced, and what goes over the wire in a step.

    Args:
        task: as in `search`.
        config: what it does not name is off; None for the task's baseline.
        logs: folder for what the user's code prints; `on_warning` is told where it cannot be written.
        **options

    Raises:
        AutotuneError: as `probe` does.
    """
    asked, info, device, world = _of_a_target(ExplainOptions, options, config)
    source = TaskSource.of(task).with_global_batch(asked.global_batch)
    limit, settings = asked.memory_limit_bytes or _free_bytes(info, world), None
    runs = asked.gpu is None and world.size == 1  # modules are timed in one process

    def runner_in(place: Path) -> Runner:
        if runs:
            return LocalRunner(source, device=device, logs=place)
        return _tracing(source, device, place, sweeping.INSPECT_TIMEOUT_S)

    if runs:
        settings = ProbeSettings(memory_limit_bytes=limit, timeout_s=ProbeOptions().timeout_s)
    with _place_of_logs(source, logs, on_warning) as place, runner_in(place) as runner:
        complete = None if config is None else _complete(config, runner, world)
        job = InspectJob(
            memory_limit_bytes=limit if runs else None,
            timeout_s=sweeping.INSPECT_TIMEOUT_S,
            absent=None if asked.gpu is None else info,
            trained={} if complete is None else runner.techniques.trained(complete),
            comparing_s=sweeping.COMPARING_S,
            world=world,
            trains=runs,
        )
        inspection = know_communicators(runner, inspect(runner, job), logs)
        complete = complete or runner.techniques.complete(
            inspection.baseline, global_batch=inspection.global_batch, world=inspection.known_world
        )
        _require_support(complete, inspection, runner.techniques)
        return dissect(
            runner,
            inspection,
            complete,
            target=target_of(info),
            settings=settings,
            timeout_s=asked.timeout_s,
        )


def _of_a_target(
    kind: type[Asked], options: Mapping[str, Any], config: Mapping[str, Choice] | None
) -> tuple[Asked, DeviceInfo, str, World]:
    """The options of a prediction or an explanation, the device that it is for, what traces, and the processes that train together.

    Each process has a device of its own. The first stands for all, with the least free memory of any; those of another machine are
    counted alone. A typo in `config` is refused, too.
    """
    gpu, device, devices = (
        options.get("gpu"),
        str(options.get("device", "auto")),
        str(options.get("devices", ONE_DEVICE)),
    )
    if gpu is None:
        names = name_devices(devices, device)
        found = [open_device(name).info() for name in dict.fromkeys(names)]
        info = replace(found[0], free_bytes=min(one.free_bytes for one in found))
        device, world = names[0], World(size=len(names))
    elif device != "auto":
        raise ConfigError(f"--gpu {gpu} and --device {device} contradict each other; leave one of them out")
    elif not re.fullmatch(r"[1-9]\d*", devices):
        raise ConfigError(f"--devices {devices} names devices of this machine; give the number of --gpu {gpu}")
    else:
        card = card_of(gpu)
        info = DeviceInfo(
            name=CudaDevice.kind,
            model=card.name,
            total_bytes=card.total_bytes,
            free_bytes=card.total_bytes,
            capability=card.capability,
            num_multiprocessors=card.num_multiprocessors,
        )
        device, world = "cpu", World(size=int(devices))
    asked = kind.of(options, total_bytes=lambda device: info.total_bytes)
    find_techniques().complete(config or {})  # refuses a typo before anything takes seconds
    return asked, info, device, world


def _free_bytes(info: DeviceInfo, world: World) -> int:
    """Of a device, for one process of a world: those of a CPU share its memory."""
    return info.free_bytes if capabilities_of(info.name).own_memory else info.free_bytes // world.size


@contextlib.contextmanager
def _place_of_logs(source: TaskSource, logs: Path, on_warning: Callable[[str], None]) -> Iterator[Path]:
    """The task's own folder in `logs`; where that cannot be written, one that is deleted, unless what fails names a log there."""
    place, why = logs / f"{source.name}.logs", ""
    new = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = str(error.strerror)
    if not why:
        try:
            yield place
        finally:
            with contextlib.suppress(OSError):  # it holds logs
                for folder in new or [place]:
                    folder.rmdir()
        return
    on_warning(f"nothing is kept, as {logs} cannot be written: {why}")
    passing = Path(tempfile.mkdtemp(prefix="autotune-"))
    yield passing
    shutil.rmtree(passing, ignore_errors=True)


def _tracing(source: TaskSource, device: str, logs: Path, timeout_s: float) -> Runner:
    """A runner that inspects and traces, on any system, once the task is imported within `timeout_s`."""
    if sys.platform != "linux":
        return PortableRunner(source, device=device, logs=logs)
    return LocalRunner(source, device=device, logs=logs, import_timeout_s=timeout_s)


def _total_bytes(device: str) -> int:
    return open_device(device).info().total_bytes


def _open_elsewhere(name: str, source: TaskSource, options: Mapping[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """The runner that a name stands for, and the options that are not its own."""
    own = {"device", "devices", "slots"}
    plain = SearchOptions.of({key: value for key, value in options.items() if key != "memory_limit"})
    logs = place_of(plain.storage, plain.study, source.name).logs
    runner = runner_elsewhere(name, source.with_global_batch(plain.global_batch), plain, logs)
    return runner, {key: value for key, value in options.items() if key not in own}


def _complete(config: Mapping[str, Choice], runner: Runner, world: World | None = None) -> Config:
    """A full config, with the baseline's batch where it names none. Raises ConfigError."""
    stated = runner.stated
    return runner.techniques.complete(
        config, global_batch=stated.global_batch, baseline=stated.baseline, world=world or runner.world
    )
