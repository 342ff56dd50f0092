"""What runs inside a probe's own process: one job on the user's task, and its result as plain data.

Isolation, time-outs and clean-up are the supervisor's; this file turns whatever happens in the user's code into an outcome.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.devices import HIDDEN, Device, device_named, open_device
from autotune.devices.cpu import bound_host_memory
from autotune.devices.kernels.rules import round_up
from autotune.devices.linux import end_with_parent
from autotune.devices.targets import AbsentGpu
from autotune.prediction.traces import Plan
from autotune.probe.timing import LATE
from autotune.randomness import seed_everything
from autotune.records.config import ProbeSettings, World
from autotune.records.device import DeviceInfo
from autotune.records.outcome import COMPARING, COMPILING, Kind, Outcome, Progress
from autotune.runners.failure import failure, outcome_of_failure
from autotune.runners.heap import stir_heap
from autotune.runners.ranks import LOOK_EVERY_S, Pace, answer_file, group_file, question_file
from autotune.task import Task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource
from autotune.task.usercode import innermost_place
from autotune.techniques import find_techniques

if TYPE_CHECKING:
    from autotune.probe.measure import Run
    from autotune.session import Session

Report = Callable[[Progress | dict[str, Any]], None]  # how far it has come, or a part of the answer
MAX_CAUSE = 900  # characters of a cause with the sample that is named in it
COMPILER_BYTES = 2 * 2**30  # beyond the limit, for what a compiler takes: seen up to 0.5 GiB
CACHE = "TORCHINDUCTOR_CACHE_DIR"
HANGING_TIMES = 20  # the time that a comparison has: it gives up by itself after ten, between two passes
_RESERVE_BYTES = 4 * 2**20  # freed when memory runs out, so that the outcome can still be sent


class Channel:
    """The way back to the search: JSON lines through a named pipe, or a file, opened for each line.

    A name rather than a descriptor: user code that closes every descriptor, or prints what it likes, does not cut it.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        with open(self._path, "ab") as pipe:
            pipe.write(json.dumps(message).encode() + b"\n")

    def offer(self, message: dict[str, Any]) -> None:
        """Send one short message, or drop it where nobody reads the pipe and it is full: it must not hold up training."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                os.write(descriptor, json.dumps(message).encode() + b"\n")  # whole or not at all, up to PIPE_BUF bytes
        finally:
            os.close(descriptor)


def run_job(task: Task | None, request: dict[str, Any]) -> None:
    """Run one job and leave the process. Never returns.

    Args:
        task: the user's task, loaded; None for a job that needs none.
        request: `source` (of the task; None where a command trains), `job` (a key of `JOBS`), `arguments` for it,
            `blas_threads` for numpy (0: as it is), `widest` (positions of the dataset's widest samples, or None),
            `compiled` (folder of compiled code; empty: torch's own), `channel` (path of the named pipe), `log` (path),
            `num_ranks` and `rank` (of those on this machine), `first_rank` (of these in their world), `meeting` (where those of
            several machines find each other; empty: all are on this one).

    The exit status is 0 unless the job failed: then no other one of the request is run.
    """
    channel = Channel(request["channel"])
    _take_rank(request)
    heap = stir_heap()
    reserve = bytearray(_RESERVE_BYTES)

    def report(news: Progress | dict[str, Any]) -> None:
        if isinstance(news, Progress):
            channel.offer({"progress": news.to_dict()})
        else:
            channel.send(news)

    if request["compiled"]:
        os.environ[CACHE] = request["compiled"]
    if task is not None and request["widest"] is not None:
        task.use_widest(request["widest"])
    try:
        if task is not None and request["blas_threads"] > 1 and task.dataset() is not None:
            _restore_blas_threads(max(1, request["blas_threads"] // request["num_ranks"]))
        if request["source"] is None:  # a command trains, and there is no task
            from autotune.runners import launch

            message = launch.JOBS[request["job"]]({**request["arguments"], "log": request["log"]}, report)
        else:
            message = JOBS[request["job"]](task, request["arguments"], report)
    except BaseException as error:
        del reserve
        message = {"outcome": failure(error, "setup", 0.0).to_dict()}
    del heap  # held until here
    channel.send({"result": message, "ended_s": time.monotonic()})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(int("outcome" in message and message["outcome"]["kind"] != Kind.OK))


def _take_rank(request: dict[str, Any]) -> None:
    """Give a job of several processes its rank's own arguments, and this process its share of the host's processors."""
    size, rank, arguments = request["num_ranks"], request["rank"], request["arguments"]
    if size == 1 and not request["meeting"]:
        return
    import torch

    arguments["settings"]["world"]["rank"] = request["first_rank"] + rank
    arguments["device"] = arguments["device"].split(",")[rank]
    path = request["channel"].removesuffix(f".{rank}")
    arguments["meeting"] = request["meeting"] or Path(group_file(path))
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    if size == 1:
        return
    threading.Thread(target=_answer, args=(question_file(path), Path(answer_file(path, rank))), daemon=True).start()


def _answer(question: str, answer: Path) -> None:
    """Tell where this rank is, once it is asked: a rank that hangs is told from those that wait for it (`ranks.waited_for`)."""
    from autotune.group import num_collectives

    pace, asked = Pace(), select.poll()
    asked.register(os.open(question, os.O_RDONLY | os.O_NONBLOCK))  # hangs up once the supervisor has opened it, too
    while True:
        is_asked = asked.poll(LOOK_EVERY_S * 1000)
        pace.look(num_collectives(), time.monotonic())
        if is_asked:
            break
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    whole = answer.with_suffix(".part")
    whole.write_text(
        json.dumps(
            {"collectives": pace.begun, "is_stuck": pace.is_stuck(time.monotonic()), "at": innermost_place(stack)}
        )
    )
    whole.replace(answer)


def enter(request: dict[str, Any]) -> None:
    """Make this process a probe's: own process group, dies with its supervisor, prints into the log."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):  # a new interpreter was started as a leader already
            os.setsid()
        end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False, errors="replace")


def _probe(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Measure one config: arguments `config`, `device` and `settings`."""
    from autotune.probe.overflow import first_overflow

    settings = ProbeSettings.from_dict(arguments["settings"])
    started = time.perf_counter()
    device: Device | None = None
    run: Run | None = None
    try:
        device = _limited_device(arguments["device"], settings.memory_limit_bytes, settings.seed)
        run = _prepare_run(task, arguments, device, settings, report)
        outcome = Outcome(kind=Kind.OK, measurement=run.measure(time.perf_counter() - started))
    except BaseException as error:
        stage, train_s = (run.reporter.stage, run.reporter.train_s) if run else ("setup", 0.0)
        outcome = outcome_of_failure(error, device, stage, train_s)
        if time.perf_counter() - started < settings.timeout_s / 2 and settings.world.size == 1:
            outcome = _with_odd_sample(outcome, task, _raises_alone(run.session if run else None, type(error)))
    in_time_s = LATE * settings.timeout_s
    # A time-out of the second run, which takes as long again, would hide what is known by now.
    again = 2 * (time.perf_counter() - started) < in_time_s
    alone = settings.world.size == 1  # the other ranks are ended as soon as this one tells
    if outcome.kind is Kind.NONFINITE and again and alone and device is not None and run is not None:
        before = run.reporter.progress
        run = None  # the second one needs what it holds
        gc.collect()
        with contextlib.suppress(Exception):  # the outcome is known, whatever happens here
            overflow = first_overflow(task, arguments["config"], device, settings, report, before, started + in_time_s)
            outcome = replace(
                outcome, overflow=overflow, cause=f"{outcome.cause}; {overflow}"[:500] if overflow else outcome.cause
            )
    return {"outcome": outcome.to_dict()}


def _raises_alone(session: Session | None, kind: type[BaseException]) -> Callable[[Any], bool] | None:
    """Whether the loss of one sample raises such an error; None where that cannot be asked."""
    if session is None or session.task.takes_whole_steps:
        return None
    import torch
    from torch.utils.data import default_collate

    from autotune.task.batches import to_device

    def raises(sample: Any) -> bool:
        with torch.no_grad():
            batch = (session.task.collate_fn or default_collate)([sample])
            try:
                session.task.loss(session.model.eval(), to_device(batch, session.device))
            except kind:
                return True
        return False

    return raises


def _with_odd_sample(outcome: Outcome, task: Task, raises: Callable[[Any], bool] | None = None) -> Outcome:
    """A failure by what training was given, with the sample that is unlike the others, if there is one."""
    from autotune.task.unequal_samples import odd_sample

    if outcome.kind not in (Kind.ERROR, Kind.NONFINITE) or outcome.own_fault or outcome.device_fault:
        return outcome
    odd = ""
    with contextlib.suppress(Exception):  # the outcome is known, whatever happens here
        odd = odd_sample(task, raises, nonfinite=outcome.kind is Kind.NONFINITE)
    if not odd or odd in outcome.cause:
        return outcome
    return replace(outcome, cause=f"{outcome.cause}; {odd}"[:MAX_CAUSE])


def _fill_cache(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Compile what a config needs, so that its job finds it in the cache: the arguments of `_probe` or `_evaluate`."""
    report(Progress(stage=COMPILING))
    settings = ProbeSettings.from_dict(arguments["settings"])
    device: Device | None = None
    try:
        device = _limited_device(arguments["device"], settings.memory_limit_bytes, settings.seed, compiles=True)
        return {"compile_s": _prepare_run(task, arguments, device, settings, lambda progress: None).warm_up()}
    except BaseException as error:
        return {"outcome": outcome_of_failure(error, device, COMPILING).to_dict()}


def _calibrate(task: Task | None, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Measure the device: argument `device`, as it names itself."""
    from autotune.devices.calibration import measure

    return {"calibration": measure(device_named(arguments["device"])).to_dict()}


def _inspect(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Validate the task and say what applies to it: arguments `device`, or `absent` (a `DeviceInfo`), `trains`, and those of
    `inspect_task`.
    """
    from autotune.probe.inspection import inspect_task

    name, absent, trains = arguments.pop("device"), arguments.pop("absent"), arguments.pop("trains")
    arguments["world"] = World.from_dict(arguments["world"])
    longest_s = HANGING_TIMES * arguments["comparing_s"]

    def watched(progress: Progress) -> None:
        report(progress)
        if hasattr(signal, "setitimer"):  # a comparison that hangs is ended; another inspection goes on without it
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, longest_s if progress.stage == COMPARING else 0.0)

    device: Device = open_device(name) if absent is None else AbsentGpu(DeviceInfo.from_dict(absent))
    if absent is not None or not device.capabilities.own_processors:
        hide_gpus()
    seed_everything(0)
    try:
        if trains:
            return {"inspection": inspect_task(task, device=device, report=watched, **arguments)}
        device.enter()
        outside_bytes = device.outside_bytes()  # what is imported now, no probe holds
        from autotune.prediction.fakes import inspect_untrained

        device = AbsentGpu(device.info()) if device.capabilities.own_processors else device
        found = inspect_untrained(task, device=device, host_bytes=bound_host_memory(), **arguments)
        return {"inspection": found | {"outside_bytes": outside_bytes}}
    except BaseException as error:
        return {"outcome": _with_odd_sample(outcome_of_failure(error, device, "setup"), task).to_dict()}


def _check(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Checks G, B and N: arguments `config`, `device`, `settings`, `batch_size`, `memory_limit_bytes`."""
    from autotune.probe.checks import run_checks
    from autotune.probe.runs import enough_samples

    if task.takes_whole_steps:
        return {"not_compared": "the task's own step is one unit, so its gradients are not to be had"}
    device: Device | None = None
    try:
        techniques = find_techniques()
        compiles = techniques.setup_s(techniques.complete(arguments["config"])) > 0  # a check measures no memory
        device = _limited_device(arguments["device"], arguments["memory_limit_bytes"], seed=0, compiles=compiles)
        settings = ProbeSettings.from_dict(arguments["settings"])
        world = settings.world
        _join_others(arguments, device, settings)
        size = arguments["batch_size"]
        if world.rank == 0:  # it makes the samples for all of them
            size = enough_samples(task, device, size)
        if world.size > 1:
            num_parts = world.size * min(2, arguments["config"]["accumulation_steps"])
            size = round_up(size, num_parts)
        return {"check": run_checks(task, arguments["config"], device, batch_size=size, world=world).to_dict()}
    except BaseException as error:
        return {"outcome": outcome_of_failure(error, device, "checks").to_dict()}


def _trace(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Trace configs without running them: arguments `plan`, `target`, and `slice_s`, after which no group is begun. Each that
    is finished is sent at once.
    """
    hide_gpus()  # tracing for a GPU must not touch one
    from autotune.prediction.job import trace_plan

    seed_everything(0)
    host_bytes = bound_host_memory()
    started, num_begun = time.monotonic(), 0
    for message in trace_plan(task, Plan.from_dict(arguments["plan"]), arguments["target"], host_bytes):
        if "begun" in message:
            if num_begun and time.monotonic() >= started + arguments["slice_s"]:
                break
            num_begun += 1
        report(message)
    return {"done": True}


def _anatomies(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """What lives at the peak of configs: arguments `configs`, `target`, `world`, and `slice_s`, after which none is begun but the first."""
    hide_gpus()
    from autotune.prediction.anatomy import anatomies

    seed_everything(0)
    host_bytes = bound_host_memory()
    started, found = time.monotonic(), []
    techniques = find_techniques()
    configs = (techniques.complete(config) for config in arguments["configs"])
    world = World.from_dict(arguments["world"])
    for anatomy in anatomies(task, configs, arguments["target"], techniques, host_bytes, world):
        found.append(anatomy if isinstance(anatomy, str) else anatomy.to_dict())
        if time.monotonic() >= started + arguments["slice_s"]:
            break
    return {"anatomies": found}


def _modules(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Where the time of a config goes: the arguments of `_probe`."""
    from autotune.probe.module_times import measure_modules

    settings = ProbeSettings.from_dict(arguments["settings"])
    config = find_techniques().complete(arguments["config"])
    device = _limited_device(arguments["device"], settings.memory_limit_bytes, settings.seed)
    return {"modules": measure_modules(task, config, device, settings.world).to_dict()}


def _evaluate(task: Task, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Measure evaluation: the arguments of `_probe`, and `num_samples` of the training step before it."""
    settings = ProbeSettings.from_dict(arguments["settings"])
    started = time.perf_counter()
    device: Device | None = None
    run: Run | None = None
    try:
        device = _limited_device(arguments["device"], settings.memory_limit_bytes, settings.seed)
        run = _prepare_run(task, arguments, device, settings, report)
        return {"outcome": Outcome(kind=Kind.OK, measurement=run.measure(time.perf_counter() - started)).to_dict()}
    except BaseException as error:
        return {"outcome": outcome_of_failure(error, device, run.reporter.stage if run else "setup").to_dict()}


def _join_others(arguments: dict[str, Any], device: Device, settings: ProbeSettings) -> None:
    """Make this process one of its world's group, where it has one."""
    from autotune.group import join

    if settings.world.size > 1:  # the supervisor ends a wait first, and asks who is waited for
        join(settings.world, device.torch_device, arguments["meeting"], 2 * settings.timeout_s)


def _prepare_run(task: Task, arguments: dict[str, Any], device: Device, settings: ProbeSettings, report: Report) -> Run:
    """A run that is about to begin, of evaluation where the arguments are those of `_evaluate`."""
    from autotune.probe.evaluation import EvaluationRun, train_a_step
    from autotune.probe.measure import Run
    from autotune.recovery import RAISE
    from autotune.session import prepare

    _join_others(arguments, device, settings)
    if (num_samples := arguments.get("num_samples")) is None:
        session = prepare(task, arguments["config"], device=device, on_oom=RAISE, world=settings.world)
        return Run(session, device, settings, report)
    few = task.small_batch(num_samples)
    session = prepare(task.on_evaluation_data(), arguments["config"], device=device, on_oom=RAISE, world=settings.world)
    train_a_step(session, few, num_samples)
    session.evaluator.begin()
    return EvaluationRun(session, device, settings, report)


JOBS: dict[str, Callable[[Any, dict[str, Any], Report], dict[str, Any]]] = {
    "calibrate": _calibrate,
    "fill_cache": _fill_cache,
    "probe": _probe,
    "inspect": _inspect,
    "check": _check,
    "trace": _trace,
    "anatomy": _anatomies,
    "modules": _modules,
    "evaluate": _evaluate,
}


def _limited_device(name: str, memory_limit_bytes: int | None, seed: int, *, compiles: bool = False) -> Device:
    """The device to train on, within its limit, after everything random was seeded.

    Args:
        compiles: the process has a compiler's memory beside the model's, which a limit of the whole process would take for one.
    """
    device = open_device(name)
    if not device.capabilities.own_processors:
        hide_gpus()
    seed_everything(seed)
    if memory_limit_bytes is not None:
        beside_bytes = COMPILER_BYTES if compiles and device.capabilities.limits_whole_process else 0
        device.limit_memory(memory_limit_bytes + beside_bytes)
    return device


def hide_gpus() -> None:
    """Let this process, which has one job and needs no GPU for it, and its data workers see none.

    An optimizer's step on a CPU would initialise CUDA, which takes seconds and hundreds of megabytes. Called once the
    user's module is loaded: that may ask for the number of GPUs.
    """
    os.environ.update(HIDDEN)


def _restore_blas_threads(num_threads: int) -> None:
    """Give numpy's BLAS its threads back, which the fork server was started without, to hold one thread.

    Only for a dataset, which may compute with numpy: a new OpenBLAS thread spins for 0.1 s before it sleeps.
    """
    from threadpoolctl import threadpool_limits

    threadpool_limits(num_threads, user_api="blas")


def main() -> None:
    """Entry of a probe in a new interpreter (the fall-back): loads the task itself. Takes the request's path."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    enter(request)
    # what measures the device forks, which the user's module may not allow
    needs_none = request["source"] is None or request["job"] == "calibrate"
    task = None if needs_none else load_source(TaskSource.from_dict(request["source"]))
    run_job(task, request)


if __name__ == "__main__":
    main()
