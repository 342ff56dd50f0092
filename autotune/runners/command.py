"""`CommandRunner`: the user's own training script as it is, one command line for each config."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.prediction.traces import Traces
from autotune.probe.batch_support import batch_support
from autotune.records.config import (
    ACCUMULATION,
    ALONE,
    BATCH_KEYS,
    BATCH_SIZE,
    DEFAULT_BATCH_SIZE,
    Choice,
    Config,
    ProbeSettings,
    World,
    largest_batch_size,
    share_of,
)
from autotune.records.device import NOT_MEASURED, Slot
from autotune.records.energy import ONE_COUNTED
from autotune.records.inspection import Inspection, Support, TaskFacts
from autotune.records.measured import Measured
from autotune.records.options import ONE_DEVICE
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.study import Trial
from autotune.runners import jobs
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Stated
from autotune.task.model_file import name_of
from autotune.techniques import Techniques, declare, find_techniques

DEVICES = "devices"  # the placeholder for their number
OUTPUT = "output_dir"  # the placeholder for a folder to write to; a scratch folder while probing
_LOSS_NOT_SEEN = (
    "the loss is the script's own and is not seen: if it couples the samples of a batch (contrastive, with negatives from the "
    "batch), other micro batches learn something else; then write the number in place of "
    "{batch_size}, and give the samples of an optimizer step as --global-batch"
)
NO_STEP = "no step of an optimizer of torch.optim was seen until then"
LARGEST_HASHED_BYTES = 2**20  # of a file that the command names: more is data
_TOLD = {  # of each probe beside its config, by a study's frames and by trackers
    *(item.name for record in (Trial, Measurement, Measured) for item in fields(record)),
    *(
        "cause",
        "log",
        "train_s",
        "wall_s",
        "peak_mib",
        "description",
        "joules_per_sample_low",
        "joules_per_sample_high",
    ),
}
_TOLD_TOO = re.compile(r"phase_\w+_s|predicted_\w+")
_PLACEHOLDER = re.compile(r"(?<![$\\])( ?)\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Command:
    """A command line with placeholders.

    Attributes:
        template: with `{batch_size}`, `{accumulation_steps}`, `{devices}`, `{output_dir}`, and one `{name}` for each key of
            `choices`.
        choices: name -> choice -> the words that stand for it; the first is what is run today.

    Raises:
        ConfigError: a placeholder without choices, choices without a placeholder, or choices with the name of something else
            that is told of each probe.
    """

    template: str
    choices: Mapping[str, Mapping[Choice, str]]

    def __post_init__(self) -> None:
        filled = (*BATCH_KEYS, DEVICES, OUTPUT)
        known = (*filled, *self.choices)
        for name in self._placeholders:
            if name not in known:
                raise ConfigError(
                    f"--command has {{{name}}}, which stands for nothing; add --choices '{name}:off=,on=--{name}', or write one of "
                    + ", ".join(f"{{{one}}}" for one in known)
                )
        for name, texts in self.choices.items():
            if name in filled:
                raise ConfigError(f"--choices {name}: {{{name}}} is filled in by autotune; leave its choices out")
            if name in _TOLD or _TOLD_TOO.fullmatch(name):
                raise ConfigError(
                    f"--choices {name}: a study tells {name} of each probe, which would hide the choice; give the placeholder another "
                    f"name, such as {{my_{name}}}"
                )
            if name not in self._placeholders:
                raise ConfigError(f"--choices {name}: --command has no {{{name}}}; write it where its words belong")
            if not texts:
                raise ConfigError(f"--choices {name}: there is no choice; expected for example {name}:off=,on=--{name}")

    def has(self, name: str) -> bool:
        """Whether the command takes it."""
        return name in self._placeholders

    @property
    def _placeholders(self) -> tuple[str, ...]:
        return tuple(name for _, name in _PLACEHOLDER.findall(self.template))

    def line(self, config: Mapping[str, Choice], output: str = "output", num_devices: int = 1) -> str:
        """The command line of a config, for a shell. What is empty leaves no blank behind."""
        numbers = {DEVICES: num_devices, **config}

        def text(found: re.Match[str]) -> str:
            blank, name = found.groups()
            if name == OUTPUT:
                return blank + shlex.quote(output)
            words = self.choices[name][config[name]] if name in self.choices else str(numbers[name])
            return blank + words if words else ""

        return _PLACEHOLDER.sub(text, self.template)

    def switches(self, installed: Techniques) -> Techniques:
        """The keys of a config beside the batch, in the order in which they are declared.

        Args:
            installed: what is known of a technique is expected of the switch of its name.
        """
        return Techniques(declare(name, tuple(texts), installed.get(name)) for name, texts in self.choices.items())

    @property
    def name(self) -> str:
        """A short name for the study: the script's."""
        words = _words(self.template)
        script = next((word for word in words if word.endswith(".py")), "")
        if script:
            return name_of(Path(script).absolute())
        module = next((after for word, after in itertools.pairwise(words) if word == "-m"), "")
        return module.rpartition(".")[2] or os.path.basename(words[0])

    @property
    def source_hash(self) -> str:
        """Changes with the command, its choices and the files that it names."""
        digest = hashlib.sha256(repr((self.template, [(n, dict(texts)) for n, texts in self.choices.items()])).encode())
        for file in files_of(self.template):
            if file.stat().st_size <= LARGEST_HASHED_BYTES:
                digest.update(file.read_bytes())
        return digest.hexdigest()


def files_of(template: str) -> list[Path]:
    """The files that the words of a command line with placeholders name, or what is behind their `=`.

    Raises:
        ConfigError: it is no command line for a shell.
    """
    named = (part for word in _words(template) for part in (word, word.partition("=")[2]))
    # a `Path` raises where a word is too long for a name
    return [Path(name) for name in dict.fromkeys(named) if os.path.isfile(name)]


def _words(template: str) -> list[str]:
    try:
        words = shlex.split(_PLACEHOLDER.sub(" ", template))
    except ValueError as error:
        raise ConfigError(f"--command {template!r} is no command line for a shell: {error}") from None
    if not words:
        raise ConfigError("--command is empty; expected for example 'python train.py --batch {batch_size}'")
    return words


class CommandRunner(LocalRunner):
    """Runs a command line for each probe, and hears of its optimizer's steps.

    Its `techniques` are the switches of the script.

    Args:
        global_batch: samples per optimizer step, of all processes of the command together; None leaves it open.
        baseline: what is run today, as a partial config; the first choice of what it does not name.
        device, devices, logs: as of `LocalRunner`; the command takes the number of devices, and starts a process on each.

    Raises:
        ConfigError: the command line cannot keep a global batch.
        DeviceError: there is no such device.
    """

    keeps_traces = False
    slowest_start = 3.0  # imports and downloads take as long as the disk and the other programs let them

    def __init__(
        self,
        command: Command,
        *,
        logs: Path,
        device: str = "auto",
        devices: str = ONE_DEVICE,
        global_batch: int | None = None,
        baseline: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(None, logs=logs, device=device, devices=devices)
        self.task_name = command.name
        self._study = command.name if devices == ONE_DEVICE else f"{command.name} on {devices}"
        self._switches = command.switches(find_techniques())
        self._command = command
        self._global_batch = global_batch
        self._world: World | None = None  # of the command, once it was inspected
        if self.world.size > 1 and not command.has(DEVICES):
            raise ConfigError(
                f"--devices {devices}: --command has no {{devices}}; write it where the number of processes belongs, as in "
                "torchrun --nproc-per-node {devices}"
            )
        self._baseline = {name: next(iter(texts)) for name, texts in command.choices.items()} | dict(baseline or {})
        if not command.has(BATCH_SIZE) and global_batch is None:
            raise ConfigError(
                "--command has no {batch_size}; write it where the number belongs, or say by --global-batch N "
                "how many samples an optimizer step takes"
            )
        if command.has(ACCUMULATION) and not command.has(BATCH_SIZE):
            raise ConfigError("--command has {accumulation_steps} without {batch_size}; write both, or neither")
        self.stated = Stated(global_batch=global_batch, baseline=baseline or None)

    @property
    def techniques(self) -> Techniques:
        return self._switches

    def slots(self) -> tuple[Slot, ...]:
        """As of `LocalRunner`. The energy of several processes is not known."""
        (slot,) = super().slots()
        if self.world.size == 1:
            return (slot,)
        return (replace(slot, device=replace(slot.device, no_energy=slot.device.no_energy or ONE_COUNTED)),)

    def command(self, config: Config) -> str:
        return self._command.line(config, num_devices=self.world.size)

    @property
    def default_study(self) -> str:
        """Each number of devices has one of its own."""
        return self._study

    def _run(self, job: jobs.Job[jobs.R], watch: Callable[[jobs.R], bool] | None) -> jobs.R | Outcome:
        """As any runner. An inspection runs a few steps of the baseline's command: whether it trains, in how many processes, and how
        fast. What the script keeps to itself is said at once.

        Raises:
            ConfigError: the global batch cannot be shared by so many processes.
        """
        found: Any = self._known(job) or super()._run(job, watch)
        if isinstance(found, Inspection):
            found = self._inspected(found)
        elif isinstance(job, jobs.InspectJob) and found.kind is Kind.TIMEOUT and found.bound is None:
            found = replace(found, cause=f"{found.cause}; {NO_STEP}")
        return found  # type: ignore[no-any-return]

    def _known(self, job: jobs.Job[Any]) -> Any:
        """What comes of a job that cannot be asked of a script; None for another."""
        match job:
            case jobs.CalibrateJob():  # no figure of the device says how fast a script is whose operators are not seen
                return NOT_MEASURED
            case jobs.CheckJob():
                return jobs.NotCompared(
                    reason="the script keeps its gradients to itself, so what its switches change of them is not seen; "
                    "compare the loss of a longer run"
                )
            case jobs.EvaluateJob():
                unseen = "the script's own model is not seen, so it cannot be evaluated alone"
                return Outcome(kind=Kind.UNSUPPORTED, cause=unseen)
            case jobs.TraceJob():
                unseen = "a command trains, whose model is not seen"
                return Traces(target=job.target, failures=dict.fromkeys(job.plan.labels(), unseen))
        return None

    def _inspected(self, found: Inspection) -> Inspection:
        """The inspection, with what a few steps have shown."""
        self._world = found.world
        world = found.known_world  # unknown where memory ran out before any step
        baseline = self._complete(self._baseline, world)
        unseen = [_LOSS_NOT_SEEN] if self._command.has(BATCH_SIZE) else []
        if self.world.size > 1 and found.world is not None and world.size != self.world.size:
            unseen.append(
                f"{world.size} of the command's processes train together, and there are {self.world.size} devices: expected one "
                "on each; the memory of a device without one is not seen"
            )
        return replace(
            self._drafted(baseline, world, has_batchnorm=found.facts.has_batchnorm),
            facts=replace(found.facts, warnings=(*found.facts.warnings, *unseen)),
            world=world,
            outside_bytes=found.outside_bytes,
            step_s=found.step_s,
            step_samples=found.step_samples,
            shortage=found.shortage,
            baseline_alone=self._baseline_alone().as_dict() if self._may_run_alone else None,
        )

    def _num_ranks(self, job: jobs.Job[Any]) -> int:
        """One: the command starts its ranks itself."""
        return 1

    def tracer(self) -> None:
        """Nothing: there is nothing to trace."""
        return

    def _arguments(self, job: jobs.Job[Any]) -> dict[str, Any]:
        """What `autotune.runners.launch` takes."""
        scratch = os.path.join(os.path.dirname(self._channel), "scratch")
        device, world, num_devices = self._slot, self._world, self.world.size
        if self._may_run_alone and job.world.size == 1:
            device, world, num_devices = self._device.name, ALONE, 1
        where = {"device": device, "world": world and world.to_dict(), "scratch": scratch}
        match job:
            case jobs.ProbeJob():
                config, settings, more = job.config, job.settings, {}
            case jobs.InspectJob():
                config = self._as_given()
                settings = ProbeSettings(
                    memory_limit_bytes=job.memory_limit_bytes, timeout_s=job.timeout_s, max_warmup_s=0.0, num_steps=1
                )
                more = {"inspection": self._drafted(config, ALONE, has_batchnorm=False).to_dict()}
            case _:
                raise ConfigError(f"a command cannot be asked for a {job.name}: its model is not seen")
        line = self._command.line(config, os.path.join(scratch, "output"), num_devices)
        return where | more | {"config": config.as_dict(), "settings": settings.to_dict(), "command": line}

    def _as_given(self) -> Config:
        """The baseline while nobody knows yet how many processes share the global batch: as for one a device, as far as that goes."""
        baseline, accumulates = dict(self._baseline), self._command.has(ACCUMULATION)
        if self._global_batch is not None:
            share = share_of(self._global_batch, self.world)
            baseline.setdefault(BATCH_SIZE, largest_batch_size(DEFAULT_BATCH_SIZE if accumulates else share, share))
            if accumulates:
                steps = share // int(self.techniques.validate(BATCH_SIZE, baseline[BATCH_SIZE]))
                baseline.setdefault(ACCUMULATION, max(1, steps))
        return self.techniques.complete(baseline)

    @property
    def _may_run_alone(self) -> bool:
        """Whether a probe may ask for one process where several train together: the command takes their number."""
        return self.world.size > 1 and self._world is not None and self._world.size > 1

    def _baseline_alone(self) -> Config:
        """The baseline of one process alone, whose batch follows from the global batch as far as it has to."""
        follows = set()
        if self._global_batch is not None:
            follows = {ACCUMULATION} if self._command.has(ACCUMULATION) else {ACCUMULATION, BATCH_SIZE}
        return self._complete({name: text for name, text in self._baseline.items() if name not in follows}, ALONE)

    def _complete(self, stated: Mapping[str, Any], world: World) -> Config:
        """The whole config of one of a world's processes, of which a part is stated.

        Raises:
            ConfigError: it does not keep the global batch.
        """
        whole = not self._command.has(ACCUMULATION)
        baseline = dict(stated)
        if whole and self._global_batch is not None:
            baseline.setdefault(BATCH_SIZE, share_of(self._global_batch, world))
        complete = self.techniques.complete(baseline, global_batch=self._global_batch, world=world)
        if whole and complete.accumulation_steps > 1:
            raise ConfigError(
                f"{BATCH_SIZE} {complete.batch_size} does not make a global batch of {self._global_batch} without accumulation; "
                "write {accumulation_steps} into --command, or leave the batch out of --baseline"
            )
        return complete

    def _drafted(self, baseline: Config, world: World, *, has_batchnorm: bool) -> Inspection:
        """The inspection as far as it needs no run.

        Args:
            baseline: of one process of the world.
        """
        whole = not self._command.has(ACCUMULATION)
        return Inspection(
            facts=TaskFacts(name=self.task_name, source_hash=self._command.source_hash, has_batchnorm=has_batchnorm),
            world=self._world,
            device=self.slots()[0].device,
            global_batch=self._global_batch,
            baseline=baseline.as_dict(),
            baseline_given=BATCH_SIZE in self._baseline
            or not self._command.has(BATCH_SIZE)
            or (whole and self._global_batch is not None),
            batch=batch_support(
                baseline.plan_in(world),
                global_batch=self._global_batch,
                normalises=has_batchnorm,
                whole_step="the command has no {accumulation_steps}" if whole else "",
            ),
            support={name: Support(choices=switch.choices) for name, switch in self.techniques.items()},
            outside_bytes=0,
            step_samples=baseline.samples_per_step,
            comparable=False,
        )
