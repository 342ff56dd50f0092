"""What runs inside a probe's own process where the user's command trains: starts it, gathers what its processes tell, ends it.

Time-outs and clean-up are the supervisor's, as for any probe. A job's arguments are `command`, `config`, `settings`, `device` (several
with commas between), `world` (None while it is unknown), `scratch` (a folder for all that is written) and `log` (what the command prints).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.devices import HIDDEN, capabilities_of
from autotune.devices.cpu import bound_private_memory
from autotune.devices.linux import kernel_oom_kills
from autotune.devices.torch_errors import failed_allocation
from autotune.errors import describe_exit
from autotune.probe.waiting import Ranks
from autotune.records.config import World
from autotune.records.energy import ONE_COUNTED
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome, Progress
from autotune.runners.hook import SETTINGS
from autotune.runners.watch import RankReport
from autotune.units import plural

LOOK_EVERY_S = 0.05
TAIL_BYTES = 2**20  # of the log, in which an error is looked for
TOLD = 4000  # characters of it
PACKAGE = Path(__file__).resolve().parent.parent.parent

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Ran:
    """A command that has ended, or was ended.

    Attributes:
        reports: of its processes, the first that began comes first.
        exit_code: None where it was ended because enough was known.
        oom_killed: whether the kernel killed a process for memory meanwhile.
        tail: of what it printed.
    """

    reports: list[RankReport] = field(default_factory=list)
    exit_code: int | None = None
    oom_killed: bool = False
    tail: str = ""

    @property
    def leader(self) -> RankReport | None:
        """The first rank's report; None where it has not taken a step."""
        return next((one for one in self.reports if one.world.rank == 0 and one.num_steps), None)

    @property
    def progress(self) -> Progress:
        """The leader's, with the peak of the process that needs most, since each has the limit to itself."""
        progress = Progress() if self.leader is None else self.leader.progress
        return replace(progress, peak_bytes=max((one.progress.peak_bytes for one in self.reports), default=0))

    @property
    def ranks(self) -> Ranks | None:
        """What each rank computes and waits for; None where that is not known of all."""
        ranks = sorted((one for one in self.reports if one.num_steps), key=lambda one: one.world.rank)
        return Ranks.of([one.times for one in ranks]) if len(ranks) == ranks[0].world.size else None


def probe(arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Measure one command line."""
    return {"outcome": _outcome(_run(arguments, report)).to_dict()}


def inspect(arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Complete the `inspection` in the arguments by what a few steps of a command line tell."""
    before = set(os.listdir())
    ran = _run(arguments, report)
    outcome = _outcome(ran)
    measured = outcome.measurement
    if measured is None and outcome.kind is not Kind.OOM:
        return {"outcome": outcome.to_dict()}
    first = ran.leader or next(iter(ran.reports), RankReport(began_s=0.0))
    drafted = Inspection.from_dict(arguments["inspection"])
    written = sorted(set(os.listdir()) - before - {"__pycache__"})
    code = f"{drafted.facts.source_hash}\0{first.code}"
    warning = f"the command wrote {', '.join(written)} into {os.getcwd()}; let it write to {{output_dir}}"
    learned = replace(
        drafted,
        facts=replace(
            drafted.facts,
            source_hash=hashlib.sha256(code.encode()).hexdigest(),
            optimizer=first.optimizer,
            has_batchnorm=first.has_batchnorm,
            warnings=(warning,) if written else (),
        ),
        world=first.known_world,
        outside_bytes=first.outside_bytes,
        step_s=None if measured is None else measured.step_s,
        shortage="" if measured is not None else outcome.cause,
    )
    return {"inspection": learned.to_dict()}


JOBS: dict[str, Callable[[dict[str, Any], Report], dict[str, Any]]] = {"probe": probe, "inspect": inspect}


def _run(arguments: dict[str, Any], report: Report) -> Ran:
    """Run the command until its first rank knows enough, or until it ends."""
    scratch = Path(arguments["scratch"])
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in ("hook", "reports", "output"):
        (scratch / folder).mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("hook.py"), scratch / "hook" / "sitecustomize.py")
    devices = arguments["device"].split(",")
    probed = {
        "config": arguments["config"],
        "settings": arguments["settings"],
        "device": devices[0],
        "reports": str(scratch / "reports"),
        "package": str(PACKAGE),
        "started_s": time.monotonic(),
    }
    settings = scratch / "probe.json"
    settings.write_text(json.dumps(probed))
    kills = kernel_oom_kills()
    of_process = capabilities_of(devices[0]).limits_whole_process
    limit_bytes = arguments["settings"]["memory_limit_bytes"] if of_process else None
    with settings.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # until this process ends, however it does; the command's look for it
        process = subprocess.Popen(
            ["/bin/sh", "-c", arguments["command"]],
            stdin=subprocess.DEVNULL,
            env=_environment(scratch, devices, arguments["world"] and World.from_dict(arguments["world"])),
            start_new_session=True,
            preexec_fn=None if limit_bytes is None else partial(bound_private_memory, limit_bytes),
        )
        while True:
            exit_code = process.poll()  # before the reports are read, which a process writes before it ends
            ran = Ran(_reports(scratch / "reports"), exit_code, kernel_oom_kills() > kills)
            if ran.leader is not None:
                report(ran.progress)
            if exit_code is not None or any(one.is_done for one in ran.reports):
                return replace(ran, tail=_tail(Path(arguments["log"])))
            time.sleep(LOOK_EVERY_S)


def _environment(scratch: Path, devices: Sequence[str], world: World | None) -> dict[str, str]:
    """The user's, with the hook, and without trackers and uploads.

    A command of one process sees one GPU: it might spread its batch over all that it sees. `cuda:0` alone may be the first of several.
    """
    paths = [str(scratch / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {
        "AUTOTUNE_PROBE": "1",
        SETTINGS: str(scratch / "probe.json"),
        "PYTHONPATH": os.pathsep.join(paths),
        "WANDB_MODE": "disabled",
        "COMET_MODE": "disabled",
        "NEPTUNE_MODE": "debug",
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "disabled",
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
        "MLFLOW_TRACKING_URI": (scratch / "output" / "mlflow").as_uri(),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    found = {"HF_HUB_OFFLINE": "1", **os.environ, **quiet}  # what a script needs of the hub it has fetched by now
    variable, numbers = capabilities_of(devices[0]).chosen_by, [device.partition(":")[2] for device in devices]
    if not numbers[0]:  # the CPU
        return found | HIDDEN
    if variable and (numbers != ["0"] or (world and world.size == 1)):
        visible = dict(enumerate(filter(None, os.environ.get(variable, "").split(","))))
        found[variable] = ",".join(visible.get(int(number), number) for number in numbers)
    return found


def _reports(folder: Path) -> list[RankReport]:
    reports = [RankReport.from_dict(json.loads(file.read_text())) for file in folder.glob("*.json")]
    return sorted(reports, key=lambda one: one.began_s)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _outcome(ran: Ran) -> Outcome:
    """What came of it. An allocation that failed counts, also where the script caught that and went on."""
    ended_well = ran.exit_code in (None, 0)
    for one in ran.reports:
        if one.outcome is not None and (one.outcome.kind is Kind.OOM or not ended_well or one.is_done):
            return one.outcome  # another's error did not keep the command from going on
    progress = ran.progress
    failed = partial(
        Outcome,
        detail=ran.tail[-TOLD:],
        stage=progress.stage,
        train_s=progress.train_s,
        peak_bytes=progress.peak_bytes,
    )
    if ran.oom_killed and not ended_well:
        return failed(kind=Kind.OOM, cause="the kernel's out-of-memory killer ended a process of the command")
    if said := failed_allocation(ran.tail):
        caught = "the command caught it and went on: " if ended_well else ""
        return failed(kind=Kind.OOM, cause=f"an allocation failed; {caught}{said}"[:500])
    steps = plural(ran.leader.num_steps if ran.leader else 0, "optimizer step")
    if ran.exit_code:
        by_signal = 128 < ran.exit_code < 160  # as a shell says it
        how = describe_exit(128 - ran.exit_code if by_signal else ran.exit_code)
        said = (ran.tail.strip().splitlines() or ["it printed nothing"])[-1]
        kind = Kind.CRASHED if how.startswith("died") else Kind.ERROR
        return failed(kind=kind, cause=f"the command {how} after {steps}: {said}"[:500])
    if ran.leader is not None and (measured := ran.leader.measurement) is not None:
        if (ranks := ran.ranks) is not None:
            measured = replace(measured, waits_s=ranks.waits_s, slow_rank=ranks.slow_rank)
        if ran.leader.world.size > 1:
            measured = measured.with_energy((), ONE_COUNTED)
        return Outcome(kind=Kind.OK, measurement=replace(measured, peak_bytes=progress.peak_bytes))
    if ran.leader is not None:
        return failed(
            kind=Kind.ERROR,
            cause=f"the command ended after {steps}, too few to be timed: let it train for longer (--max_steps, say)",
        )
    return failed(
        kind=Kind.ERROR,
        cause="the command ended without a step of an optimizer of torch.optim in a Python process; "
        "its output says what it did instead",
    )
