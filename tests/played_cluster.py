"""A Ray cluster of two nodes, played by one host, and what may befall it in the middle of a search.

Each fault returns what it cost: `tests/runners/test_ray_faults.py` asserts what is lost, `tests/benchmarks/ray.py` prints the times.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.errors import StudyError
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Outcome
from autotune.records.study import Trial
from autotune.runners.jobs import ProbeJob
from autotune.runners.ray import RayRunner
from autotune.runners.runner import NoSlotLeft, SlotLost
from autotune.study.reading import load_study
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.processes import find_children, is_alive
from tests.room import limit_bytes
from tests.short_play_off import AUTOTUNE

ROOT = Path(__file__).parents[1]

KILLS_ITSELF, HANGS = 666, 777  # batch sizes
MODEL = f"""
import os, signal, time
import torch

def build_model():
    with open("/proc/self/oom_score_adj") as score:
        print("nice", os.nice(0), "score", score.read().strip(), "OMP", os.environ.get("OMP_NUM_THREADS"))
    return torch.nn.Linear(8, 8)

def make_batch(size):
    if size == {KILLS_ITSELF}:
        os.kill(os.getpid(), signal.SIGKILL)
    if size == {HANGS}:
        time.sleep(1000)
    return torch.ones(size, 8)

def training_step(model, batch):
    return model(batch).square().mean()
"""
NODE = {"num_cpus": 2, "object_store_memory": 2**27}
LONGEST_S = 90.0  # that anything is waited for


@dataclass
class Played:
    """The cluster; its first node is the head, in which no fault is staged."""

    ray: Any
    second: Any
    small: Path  # the second node's folder for temporary files
    started: dict[int, psutil.Process] = field(default_factory=dict)  # processes of ours that were seen on a node

    @property
    def address(self) -> str:
        """As `--runner ray:ADDRESS` takes it."""
        return str(self.ray.address)

    def add_node(self, **changes: Any) -> Any:
        """One more node like the others."""
        return self.ray.add_node(**NODE, **changes)

    def ours(self, node: Any = None) -> list[psutil.Process]:
        """Processes that were started on the nodes for a search, and still run; with `node`, of those that it has now."""
        here: list[psutil.Process] = []
        for one in [self.ray.head_node, *self.ray.worker_nodes] if node is None else [node]:
            with contextlib.suppress(psutil.Error):
                here += psutil.Process(one.all_processes["raylet"][0].process.pid).children(recursive=True)
        self.started |= {process.pid: process for process in here if is_ours(process)}
        known = self.started.values() if node is None else [process for process in here if is_ours(process)]
        return [process for process in known if is_alive(process)]

    def supervisor(self, *, on_second: bool = True) -> psutil.Process:
        """The supervisor that runs a probe now, on the second node or on any."""
        node = self.second if on_second else None
        return wait_for(
            lambda: next((one for one in self.ours(node) if is_supervisor(one) and find_children(one)), None)
        )


def is_ours(process: psutil.Process) -> bool:
    """Whether it is an actor, or was started by one."""
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "RayStation" in line or "autotune.runners" in line
    return False


def is_supervisor(process: psutil.Process) -> bool:
    """Whether it is a supervisor, and no probe that it has forked."""
    with contextlib.suppress(psutil.Error):
        return "autotune.runners.supervisor" in process.cmdline() and "RayStation" in " ".join(
            process.parent().cmdline()
        )
    return False


def wait_for(found: Callable[[], Any]) -> Any:
    """The first true value that comes."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing came within {LONGEST_S:.0f} s")


@contextlib.contextmanager
def played_cluster(small: Path) -> Iterator[Played]:
    """Two nodes on the loopback address, each with two CPUs for Ray.

    Args:
        small: folder of the second node's temporary files.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then stays on the loopback address
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            yield Played(cluster, cluster.add_node(**NODE, env_vars={"TMPDIR": str(small)}), small)
        finally:
            cluster.shutdown()


def probe(batch_size: int = 4, timeout_s: float = 60.0) -> ProbeJob:
    """A short probe of the model."""
    settings = ProbeSettings(
        memory_limit_bytes=limit_bytes(800), max_timed_s=0.2, max_warmup_s=0.2, timeout_s=timeout_s
    )
    return ProbeJob(config=find_techniques().complete({"batch_size": batch_size}), settings=settings)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a fault cost.

    Attributes:
        lost: what became of the probe that ran.
        seen_s: seconds until the search knew; of a search that was killed, until no process of it was left.
        back_s: until there were as many slots as before; None where there is no other.
        left: processes of ours that the fault left behind.
    """

    lost: str
    seen_s: float
    back_s: float | None
    left: int


def run_through(played: Played, runner: RayRunner, stage: Callable[[], None], job: ProbeJob, *, back: bool) -> Cost:
    """Stage a fault beside a probe on the second node's slot, and see what becomes of both.

    Args:
        back: whether there will be another slot.
    """
    slot = second_slot(played, runner)
    others = len(runner.slots()) - 1
    ticket = runner.submit(job, slot)
    hangs = job.config.batch_size == HANGS
    actor = played.supervisor().parent() if hangs else None
    gone = [actor, *find_children(actor, recursive=True)] if actor is not None else []
    stage()
    began_s = time.monotonic()
    lost = ""
    try:
        while (finished := runner.collect(0.1)) is None:
            pass
        assert isinstance(finished.result, Outcome)
        lost = f"{finished.result.kind}"
    except SlotLost as error:
        lost = "run again elsewhere" if error.tickets == (ticket,) and runner.run(probe()).ok else str(error)
    seen_s = time.monotonic() - began_s
    back_s = None
    if back:
        wait_for(lambda: runner.new_slots() or len(runner.slots()) > others)
        back_s = time.monotonic() - began_s
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(is_alive, gone)))
    return Cost(lost=lost, seen_s=seen_s, back_s=back_s, left=sum(map(is_alive, gone)))


def second_slot(played: Played, runner: RayRunner) -> str:
    """The slot on the second node."""
    sockets = {node["RayletSocketName"]: node["NodeID"] for node in runner._ray.nodes()}
    name = runner._nodes[sockets[played.second.raylet_socket_name]]
    return next(slot.name for slot in runner.slots() if slot.name.startswith(f"{name}/"))


def kill_worker(played: Played, runner: RayRunner) -> Cost:
    """A probe's process gets SIGKILL."""
    return run_through(played, runner, lambda: None, probe(KILLS_ITSELF), back=True)


def kill_actor(played: Played, runner: RayRunner) -> Cost:
    """The actor gets SIGKILL."""
    return run_through(played, runner, lambda: played.supervisor().parent().kill(), probe(HANGS), back=True)


def stop_supervisor(played: Played, runner: RayRunner) -> Cost:
    """The supervisor hangs."""
    stage = lambda: played.supervisor().send_signal(signal.SIGSTOP)  # noqa: E731
    return run_through(played, runner, stage, probe(HANGS, timeout_s=2.0), back=True)


def fill_disk(played: Played, runner: RayRunner) -> Cost:
    """The disk that the actor works on is full, and the probe fails for that or another reason."""
    full = played.small / "full"

    def fill() -> None:
        with full.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))

    try:
        return run_through(played, runner, fill, probe(HANGS, timeout_s=2.0), back=True)
    finally:
        full.unlink()


def kill_raylet(played: Played, runner: RayRunner) -> Cost:
    """The raylet of a node gets SIGKILL."""
    stage = lambda: os.kill(played.second.all_processes["raylet"][0].process.pid, signal.SIGKILL)  # noqa: E731
    return run_through(played, runner, stage, probe(HANGS), back=False)


def remove_node(played: Played, runner: RayRunner) -> Cost:
    """A node goes, all of it."""

    remove = lambda: played.ray.remove_node(played.second, allow_graceful=False)  # noqa: E731
    return run_through(played, runner, remove, probe(HANGS), back=False)


def grow(played: Played, runner: RayRunner) -> Cost:
    """A node comes while a probe runs."""
    ticket = runner.submit(probe(HANGS))
    began_s = time.monotonic()
    played.add_node()
    wait_for(runner.new_slots)
    seen_s = time.monotonic() - began_s
    lost = "runs on" if runner.progress(ticket) is not None else "lost"
    runner.cancel(ticket)
    runner.collect()
    return Cost(lost=lost, seen_s=seen_s, back_s=None, left=0)


def shrink(played: Played, runner: RayRunner) -> Cost:
    """Every node loses slots until none is used any more."""
    started = []
    while True:
        ticket = runner.submit(probe(HANGS))
        actor = played.supervisor(on_second=False).parent()
        started += [actor, *find_children(actor, recursive=True)]
        actor.kill()
        began_s = time.monotonic()
        try:
            runner.collect()
        except NoSlotLeft as error:
            lost = "given back, and the search ends" if error.tickets == (ticket,) else str(error)
            break
        except SlotLost:
            pass
    seen_s = time.monotonic() - began_s
    return Cost(lost=lost, seen_s=seen_s, back_s=None, left=sum(map(is_alive, started)))


def kill_driver(played: Played | None, folder: Path) -> Cost:
    """The process that searches gets SIGKILL after three trials, and the same command goes on; `None`: it has a Ray of its own."""
    (folder / "played.py").write_text(MODEL)
    address = "ray" if played is None else f"ray:{played.address}"
    command = [*AUTOTUNE, "search", "played.py", "--runner", address, "--budget", "2m", "--json"]
    study = folder / "studies" / "played.db"
    shared: dict[str, Any] = {
        "cwd": folder,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, **shared, stdout=subprocess.DEVNULL) as driver:
        try:
            wait_for(lambda: len(probes_of(study)) >= 3)
            started = [*psutil.Process(driver.pid).children(recursive=True), *(played.ours() if played else ())]
        finally:
            driver.kill()
    began_s = time.monotonic()
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(is_alive, started)))
    seen_s, before = time.monotonic() - began_s, probes_of(study)
    subprocess.run(command, **shared, stdout=subprocess.DEVNULL, check=True)
    kept = {trial.number: trial.outcome for trial in probes_of(study)}
    lost = [trial.number for trial in before if kept.get(trial.number) != trial.outcome]
    return Cost(lost=f"{len(lost)} finished trials", seen_s=seen_s, back_s=None, left=sum(map(is_alive, started)))


def probes_of(study: Path) -> tuple[Trial, ...]:
    """The finished probes of a study that another process may be making."""
    with contextlib.suppress(StudyError):
        return load_study(study).probes
    return ()


@contextlib.contextmanager
def running(played: Played, folder: Path) -> Iterator[RayRunner]:
    """A runner with a slot on each node."""
    (folder / "model.py").write_text(MODEL)
    with RayRunner(TaskSource.of(folder / "model.py"), address=played.address, logs=folder / "logs") as runner:
        yield runner


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk with little room, mounted on a folder; the folder itself where this user may mount nothing."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64M", "autotune-test", str(folder)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
