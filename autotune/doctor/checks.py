"""What the checks find out: in processes of their own, each killed when it takes too long, and by small training runs.

Those run as a search's probes do. What all of it means, `verdicts` says.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.devices import capabilities_of, nvml, open_device, selftest
from autotune.devices.cuda import CudaDevice
from autotune.devices.instruments import Instruments
from autotune.devices.selftest import Facts
from autotune.devices.targets import target_of
from autotune.doctor.together import collectives
from autotune.errors import AutotuneError, in_one_line
from autotune.prediction.memory import MemoryModel
from autotune.records.config import ProbeSettings, World
from autotune.records.outcome import Kind
from autotune.runners.jobs import CalibrateJob, InspectJob, JobFailed
from autotune.runners.local import LocalRunner
from autotune.space import build_space
from autotune.study.caches import CommunicatorCache
from autotune.study.place import DEFAULT_FOLDER
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.units import format_seconds

if TYPE_CHECKING:
    import torch


TESTS: dict[str, Callable[..., Facts]] = {**selftest.TESTS, "collectives": collectives}
CHECK_TIMEOUT_S = 20.0
GROUP_TIMEOUT_S = 60.0  # a communicator of eight GPUs takes seconds
JOB_TIMEOUT_S = 30.0  # of a step of the small training runs
RELEASE_S = 5.0  # until a killed process must have ended, and its memory be back
STUCK = {"failure": "the check's process did not end when it was killed: it is stuck in the driver"}


def in_process(test: str, device: str) -> Facts:
    """The facts of a test, in a process that is killed when it takes too long."""
    with _start(test, device) as (process, receiving):
        facts = _receive(process, receiving)
    return STUCK if process.is_alive() else facts


@contextlib.contextmanager
def _start(test: str, device: str, *more: Any) -> Iterator[tuple[Any, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "autotune.devices.selftest"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, test, device, *more))
    process.start()
    sending.close()
    try:
        yield process, receiving
    finally:
        process.kill()
        process.join(RELEASE_S)
        receiving.close()


def _receive(process: Any, receiving: Connection) -> Facts:
    if not receiving.poll(CHECK_TIMEOUT_S):
        return {"failure": f"the check did not end within {format_seconds(CHECK_TIMEOUT_S)}"}
    try:
        facts: Facts = receiving.recv()
    except EOFError:
        process.join(1)
        return {"failure": f"the check's process ended with status {process.exitcode}"}
    return facts


def _run(sending: Connection, test: str, device: str, *more: Any) -> None:
    try:
        facts = TESTS[test](device, *more)
        kept = facts.pop("keep", None)
    except BaseException as error:
        facts, kept = {"failure": in_one_line(error)}, None
    sending.send(facts)
    while kept is not None:
        time.sleep(60)


def kill_and_watch(name: str) -> Facts:
    """Kill a process that holds memory of the device, and see when that is back."""
    device = open_device(name)

    def used() -> float | None:
        return device.telemetry().values.get("used_bytes")

    if used() is None:
        return {"why": "nothing here tells how much of the device's memory is in use"}
    with _start("hold", name) as (process, receiving):
        facts = _receive(process, receiving)
        if "failure" in facts:
            return facts
        while_bytes = used() or 0.0
        facts |= {"gpu": device.capabilities.own_memory, "while_bytes": while_bytes}
        started = time.monotonic()
        process.kill()
        process.join(RELEASE_S)
        if process.is_alive():
            return STUCK
        while (after_bytes := used() or 0.0) > while_bytes - facts["held_bytes"] / 2:
            if time.monotonic() > started + RELEASE_S:
                break
            time.sleep(0.02)
    return {**facts, "after_bytes": after_bytes, "released_s": time.monotonic() - started}


def run_together(devices: Sequence[str]) -> Facts:
    """What devices find out about each other, one process on each: the `ranks`' facts, in their order, and the `devices`.

    The first failure of a rank is told: the others would wait for it.
    """
    deadline = time.monotonic() + GROUP_TIMEOUT_S
    found: dict[int, Facts] = {}
    with contextlib.ExitStack() as stack:
        store = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-"))) / "group")
        waiting: dict[Any, tuple[int, Any]] = {}
        for rank, name in enumerate(devices):
            world = World(size=len(devices), rank=rank)
            process, receiving = stack.enter_context(_start("collectives", name, world, store, GROUP_TIMEOUT_S))
            waiting[receiving] = rank, process
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for line in ready:
                rank, process = waiting.pop(line)
                found[rank] = _receive(process, line)  # type: ignore[arg-type]  # the lines are connections
                if "failure" in found[rank]:
                    return {"failure": f"rank {rank} on {devices[rank]}: {found[rank]['failure']}"}
    if len(found) < len(devices):
        return {"failure": f"the devices did not finish within {format_seconds(GROUP_TIMEOUT_S)}"}
    return {"devices": [*devices], "ranks": [found[rank] for rank in range(len(devices))]}


def keep_communicator(facts: Facts) -> bool:
    """Keep what the devices' communicator takes, for searches that keep their studies where they go by default.

    Args:
        facts: of `run_together`.

    Returns:
        Whether it takes anything of the devices' own memory, so that it is kept.
    """
    device, taken_bytes = open_device(facts["devices"][0]), max(rank["outside_bytes"] for rank in facts["ranks"])
    if not device.capabilities.communicator_bytes or taken_bytes <= 0:
        return False
    CommunicatorCache(Path(DEFAULT_FOLDER), device.info(), len(facts["ranks"])).keep(1, taken_bytes)
    return True


def connections(devices: Sequence[str]) -> Facts:
    """How each two of the devices reach each other: `paths`, in words, and `same`, those on one card."""
    if not devices[0].startswith(CudaDevice.kind):
        return {"paths": {}, "same": [], "why": "processes on the CPU share its memory"}
    if isinstance(connection := nvml.connect(), str):
        return {"paths": {}, "same": [], "why": connection}
    paths: dict[str, str] = {}
    same: list[str] = []
    gpus = [(name, Instruments(int(name.partition(":")[2])).in_nvml(connection)) for name in devices]
    for (one, gpu), (other, neighbour) in itertools.combinations(gpus, 2):
        paths[f"{one} and {other}"] = connection.path(gpu, neighbour)
        if gpu.uuids[1] == neighbour.uuids[1]:
            same.append(f"{one} and {other}")
    return {"paths": paths, "same": same, "why": "the driver does not say"}


def write_database() -> Facts:
    """Write a database with a lock where studies go by default: below the working directory."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".autotune-", dir=Path.cwd()) as folder,
            contextlib.closing(sqlite3.connect(Path(folder) / "study.db", timeout=1)) as database,
        ):
            database.execute("create table probe (number integer)")
            database.commit()
    except (OSError, sqlite3.Error) as error:
        return {"error": in_one_line(error)}
    return {"error": ""}


def _perceptron() -> torch.nn.Module:
    from torch import nn

    hidden = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


def _convolutions() -> torch.nn.Module:
    from torch import nn

    blocks = [
        layer for width in (3, 32, 32) for layer in (nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _transformer() -> torch.nn.Module:
    from torch import nn

    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(64 * 256, 10)
    )


def _batches(*shape: int) -> Callable[[int], Any]:
    def make_batch(number: int) -> Any:
        import torch

        return torch.randn(number, *shape), torch.randint(0, 10, (number,))

    return make_batch


TASKS = (
    Task(name="perceptron", build_model=_perceptron, make_batch=_batches(1024), baseline={"batch_size": 256}),
    Task(name="convolutions", build_model=_convolutions, make_batch=_batches(3, 48, 48), baseline={"batch_size": 32}),
    Task(name="transformer", build_model=_transformer, make_batch=_batches(64, 256), baseline={"batch_size": 16}),
)


@contextlib.contextmanager
def run_trainings(device: str) -> Iterator[Iterator[tuple[Task, Facts]]]:
    """The tasks, with what inspecting, predicting and probing them finds; the first one twice, with the device's calibration.

    From the outset each task has a process that imports torch, which takes seconds, beside whatever is done meanwhile. The
    first task is then trained alone, since it is timed. The others, of which only the memory counts, are trained at once on a
    CPU; on a GPU the driver may not tell their memory apart.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(TASKS)) as threads:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))

        def open_runner(task: Task) -> LocalRunner:
            return stack.enter_context(LocalRunner(TaskSource.of(task), device=device, logs=folder / task.name))

        runners: dict[str, Future[LocalRunner]] = {task.name: threads.submit(open_runner, task) for task in TASKS}

        def facts_of(task: Task) -> Facts:
            try:
                return _facts_of(task, runners[task.name].result())
            except AutotuneError as error:
                return {"failure": str(error)}

        def run_each() -> Iterator[tuple[Task, Facts]]:
            for runner in runners.values():
                runner.exception()  # waits until it is open
            first, *others = TASKS
            at_once = capabilities_of(device).tells_processes_apart
            yield first, facts_of(first)
            yield from zip(others, (threads.map if at_once else map)(facts_of, others), strict=True)

        yield run_each()


def _facts_of(task: Task, runner: LocalRunner) -> Facts:
    info = runner.slots()[0].device
    facts: Facts = {"slow_start": runner.slow_start}
    if task is TASKS[0]:
        try:
            facts |= {"calibrated": True, "calibration": asdict(runner.run(CalibrateJob()))}
        except JobFailed as failed:
            facts |= {"calibrated": False, "calibration": asdict(failed.outcome)}
    try:
        inspection = runner.run(InspectJob(memory_limit_bytes=info.free_bytes, timeout_s=JOB_TIMEOUT_S))
    except JobFailed as failed:
        return {**facts, "failure": f"a training step failed: {failed}"}
    config = runner.techniques.complete(inspection.baseline)
    settings = ProbeSettings(memory_limit_bytes=info.free_bytes, max_timed_s=1.0, timeout_s=JOB_TIMEOUT_S)
    outcomes = [runner.probe(config, settings) for _ in range(2 if task is TASKS[0] else 1)]
    if bad := next((outcome for outcome in outcomes if outcome.kind is not Kind.OK), None):
        return {**facts, "failure": f"a probe ended with {bad.kind}: {bad.cause}"}
    traces = runner.trace([config], target_of(info), JOB_TIMEOUT_S)
    space, _ = build_space(inspection, runner.techniques)
    estimate = MemoryModel(traces, inspection.outside_bytes, space).estimate(config)
    measured = [asdict(outcome.measurement) for outcome in outcomes if outcome.measurement]
    predicted = None if estimate is None else (estimate.peak_bytes, estimate.low_bytes, estimate.high_bytes)
    return {**facts, "measured": measured, "predicted": predicted, "untraced": list(traces.failures.values())}
