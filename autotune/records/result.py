"""The recommendation: a config that was itself run, and the evidence for it. Plain frozen data, JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_type_hints

from autotune.lazy import given
from autotune.records.check import Check, Coupling
from autotune.records.config import Choice
from autotune.records.formats import Group, Record, require_readable
from autotune.records.measured import Dropped, Evaluation, Measured, OneDevice, Rival
from autotune.records.price import Price

FORMAT = 2  # format 1 had no `format`, `first_probe_s` and `split_s`


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one technique of the answer, from pairs of configs that differ in it alone; without pairs it is not isolated."""

    technique: str
    choice: Choice
    baseline_choice: Choice
    speed_ratio: float | None  # throughput with it over without it
    memory_ratio: float | None  # peak with it over without it
    num_pairs: int
    speed_ratio_ci: tuple[float, float] | None = None  # 95 % interval
    disturbed: bool = False  # other work disturbed a process of each pair


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """How far from the limits of the device the answer runs.

    Attributes:
        arithmetic: the type of its matrix products and convolutions.
        flops_per_s: rate of the model's own work at the answer's speed; what is computed twice counts once.
        flops_share: this rate over the device's measured rate in that type, for the model's mix of work.
        bytes_per_s: bytes that its operators read and write in a second, as if there were no caches.
        bandwidth_share: these over the measured bandwidth of memory; above 1 where caches serve.
        contention: share of the time in which others held the device while its rates were measured.
    """

    arithmetic: str
    flops_per_s: float
    flops_share: float
    bytes_per_s: float
    bandwidth_share: float
    contention: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The answer for one choice of what is trained. It is compared only with a baseline that trains the same.

    Attributes:
        choice: what is trained: the keys of a config in which the rankings differ, with their values.
        study: name of the study that keeps its search, in the same file as the user's own study.
        num_parameters, num_trainable: elements, all and those that require a gradient; None where that was not found out.
        config: None where there is no answer; then all figures are None, too, and `failure`, else empty, says why.
        speedup, speedup_ci, energy_ratio, energy_ratio_ci, verdict, confirmed, evaluation: as in `Result`.
    """

    choice: dict[str, Choice]
    study: str
    num_parameters: int | None = None
    num_trainable: int | None = None
    config: dict[str, Choice] | None = None
    samples_per_s: float | None = None
    samples_per_s_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    energy_ratio: float | None = None
    energy_ratio_ci: tuple[float, float] | None = None
    verdict: str = ""
    confirmed: bool = False
    evaluation: Evaluation | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Goal(Group):
    """What the search was asked for.

    Attributes:
        price: what one device costs an hour, as the user said; None where nobody asked.
        train_samples: the length of the training in samples, as the user said; the answer was then chosen by the time of the
            whole training, compiling included. None where the speed of a step decided.
        asked: those of the options in `RunOptions` that the user gave, so that `prepare`, `probe` and `verify` get the same.
    """

    memory_limit_bytes: int
    headroom: float
    objective: str
    price: Price | None = None
    train_samples: float | None = None
    asked: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Subject(Group):
    """What was searched: the task and the device.

    Attributes:
        device: its name.
        num_processes: number of processes that train together, each on a device of its own, or all on the CPU.
        model: the task as `prepare` and the command line take it; empty for one built in Python.
        made_by: the call that makes the task of what an integration tunes; empty for any other.
        parts: which of a model file's functions and constants the task has, as in `TaskFacts`.
        optimizer: class of the task's optimizer, as in `TaskFacts`.
        trained: what is trained, where it differs from what the task's own baseline trains.
        coupling: whether micro batches give the gradient of the whole batch; None where that was not looked into.
        has_batchnorm: batch normalisation makes the micro batch part of what is learned.
    """

    device: str = ""
    num_processes: int = 1
    model: str = ""
    made_by: str = ""
    parts: tuple[str, ...] = ()
    optimizer: str = ""
    trained: dict[str, Choice] = field(default_factory=dict)
    coupling: Coupling | None = None
    has_batchnorm: bool = False

    @property
    def model_file(self) -> tuple[str, str]:
        """The file of `model`, and the name of the Task in it; both may be empty."""
        return file_and_attribute(self.model)


@dataclass(frozen=True, kw_only=True)
class PlayOffOutcome(Group):
    """The fresh processes that took turns, from which the answer was chosen.

    Attributes:
        confirmed: whether a play-off was run; an interrupted search answers with the best so far, unconfirmed.
        finalists: the configs that played with what was measured of them, those that failed included.
        num_rounds: number of rounds in which the answer ran beside the baseline, or the baseline beside its `rival` where it
            is the answer. None in answers of earlier versions.
        rival: the best of the others where the baseline is the answer; None where none played.
        training_speedup: the answer's throughput over the whole training, compiling included, over the baseline's, with the 95 % interval
            of a later run; None where the length of the training is not known, where neither compiles, and where the baseline is the
            answer.
        paired_ci: the 95 % interval of `speedup` from this search's pairs alone, which the verdict follows from; None where
            `speedup_ci` is.
        paired_std: standard deviation of the logarithm of `speedup` by those pairs; None where it was not confirmed.
        later_std: standard deviation of the logarithm of a gain between a search and a later run on this machine, which
            `speedup_ci` holds as well; 0 where the search was not of this machine.
        num_rechecks: how many rechecks of this machine's answers that follows from; 0 where it is only assumed.
    """

    confirmed: bool = True
    finalists: tuple[Measured | Dropped, ...] = ()
    num_rounds: int | None = None
    rival: Rival | None = None
    training_speedup: tuple[float, float, float] | None = None
    paired_ci: tuple[float, float] | None = None
    paired_std: float | None = None
    later_std: float = 0.0
    num_rechecks: int = 0


@dataclass(frozen=True, kw_only=True)
class Reasons(Group):
    """Why the answer is as fast as it is.

    Attributes:
        effects: what each technique of the answer gained or cost.
        limit: the resource that limits the speed now (`compute`, `memory`, `data loading`, ...) in one sentence.
        use: how near the device's limits it runs; None where the device was not measured or the model could not be traced.
        peak_by_kind: `answer` and `baseline` -> bytes of tensors at the traced peak by kind: parameters, gradients, optimizer,
            activations, temporaries. What could not be traced is left out.
        tokens_per_s: throughput in what the task's `loss_weight` counts; None without `loss_weight`.
    """

    effects: tuple[Effect, ...] = ()
    limit: str = ""
    use: DeviceUse | None = None
    peak_by_kind: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EnergyUse(Group):
    """The energy of a sample, of all devices that train together.

    Attributes:
        joules_per_sample: of the answer, with its 95 % interval; None where it is not known.
        energy_ratio: the answer's joules a sample over the baseline's, as both are shown, with its 95 % interval from paired
            fresh processes. None without one of them, and where the answer is the baseline.
        no_energy: why it is not known, and what would help; empty where it is.
    """

    joules_per_sample: float | None = None
    joules_per_sample_ci: tuple[float, float] | None = None
    energy_ratio: float | None = None
    energy_ratio_ci: tuple[float, float] | None = None
    no_energy: str = ""


@dataclass(frozen=True, kw_only=True)
class Money(Record):
    """What training costs, at the throughput that was measured.

    Attributes:
        num_devices: that are paid for.
        per_million_samples: of the answer.
        baseline_per_million_samples: None where the baseline does not run.
    """

    num_devices: int
    per_million_samples: float
    baseline_per_million_samples: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compiling(Group):
    """What compiling the answer costs, and when that has paid off. All are None where the answer compiles nothing.

    Attributes:
        compile_cold_s: seconds that compiling takes with an empty cache.
        break_even_steps, break_even_s: optimizer steps, and seconds from the start, compiling included, after which training
            has come as far as with the fastest config that compiles nothing; None also where it never does.
    """

    compile_cold_s: float | None = None
    break_even_steps: int | None = None
    break_even_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost(Group):
    """What the answer cost.

    Attributes:
        probes, outcomes, train_s: finished probes, how many ended in each kind, and their seconds inside training steps; of
            the whole study, earlier searches included.
        wall_s: seconds of this search alone, from its start to the answer.
        first_probe_s: seconds until the first probe was started; None where none was.
        split_s: what `wall_s` was spent on: seconds of `import`, `inspection`, `tracing`, `probes` (outside training),
            `training`, `checks`, `one device`, `evaluation`, `other`, which add up to it.
    """

    probes: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    train_s: float = 0.0
    wall_s: float = 0.0
    first_probe_s: float | None = None
    split_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """The answer of a search.

    Its groups lie flat in the JSON document, and their fields are its attributes as well: `result.wall_s` is `result.cost.wall_s`.

    Attributes:
        samples_per_s: throughput, within the range that the config's undisturbed processes measured.
        baseline: None when it does not run. One that runs, and leaves less than the headroom free, is compared with.
        speedup: throughput over the baseline's, as both are shown; None without a baseline. `speedup_ci`: the 95 % interval of what
            a later run will see, from paired fresh processes and what later runs on this machine differed by; None also where the
            answer is the baseline, and then the play-off's `rival` tells of the others.
        verdict: `faster` or `slower` than the baseline where all of `paired_ci` says so, `same` where all of it is close to 1 or
            nothing beats the baseline; `faster` where the baseline does not run. `undecided` where the evidence is too thin,
            and for every answer that changes something and is not confirmed. Where energy was searched for, `thriftier` or
            `hungrier`, by `energy_ratio_ci`.
        undecided: what is open and what would decide it; empty for other verdicts.
        front: every config that no other beats in both memory and throughput, and in energy where that is known of all, by
            increasing memory.
        money: None where no price was given.
        checks: the comparison of the answer's changes with plain fp32, where there was one.
        unchecked: why the answer was not compared with plain fp32 and so is no recommendation: an interrupt ended the search
            too early. Empty otherwise.
        evaluation: None where nobody asked for it.
        one_device: the baseline on one device, where several were searched; None for one device, and where one is searched, too.
        command: the answer as a command line, where each probe was a run of a command; empty otherwise.
        places: technique of the answer -> the modules that it acted on, as its probe found.
        storage, study: where the search is kept.
        rankings: this answer and those for other choices of what is trained; empty where there is no other. What is learned
            differs between them and was not compared, so none is called better. `cost` covers this answer's search alone.
        format: version of this record; `from_dict` reads every one up to today's.
    """

    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    goal: Goal
    baseline: Measured | None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    verdict: str
    undecided: str = ""
    play_off: PlayOffOutcome = field(default_factory=PlayOffOutcome)
    front: tuple[Measured, ...] = ()
    reasons: Reasons = field(default_factory=Reasons)
    checks: tuple[Check, ...] = ()
    unchecked: str = ""
    compiling: Compiling = field(default_factory=Compiling)
    evaluation: Evaluation | None = None
    energy: EnergyUse = field(default_factory=EnergyUse)
    money: Money | None = None
    one_device: OneDevice | None = None
    cost: Cost = field(default_factory=Cost)
    storage: str = ""
    study: str = ""
    subject: Subject = field(default_factory=Subject)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    command: str = ""
    warnings: tuple[str, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    format: int = FORMAT

    if not TYPE_CHECKING:  # mypy is to find a misspelt name, so the package itself writes `result.cost.wall_s`

        def __getattr__(self, name: str) -> Any:
            """A field of a group."""
            if name not in _GROUP_OF:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(getattr(self, _GROUP_OF[name]), name)

    def __repr__(self) -> str:
        return str(given("in_short")(self))

    def summary(self, width: int = 100) -> str:
        """The answer with its reasons, as `autotune search` prints it, in lines of at most `width`."""
        return str(given("page")(self, width))

    def export(self, to: str, *, force: bool = False) -> Any:
        """The answer for another tool, as `autotune export STUDY --to NAME` prints it: an `autotune.export.Export`.

        Args:
            force: export also where there is a `doubt`.

        Raises:
            ConfigError: there is no exporter of that name, it cannot say a command line, or there is a `doubt`.
        """
        return given("export")(self, to, force=force)

    @property
    def doubt(self) -> str:
        """Why nobody should train with the answer yet: it was not compared with plain fp32, or did not pass. Empty without doubt."""
        failed = (check.reason or "its gradients differ" for check in self.checks if check.passed is not True)
        return self.unchecked or next(failed, "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Rebuild a result of this format or an earlier one.

        Raises:
            StudyError: it was written in a later format.
        """
        require_readable("the answer", data.get("format", 1), FORMAT)
        return super().from_dict({**data, "format": FORMAT})


_GROUP_OF = {
    name: group
    for group, kind in get_type_hints(Result).items()
    if isinstance(kind, type) and issubclass(kind, Group)
    for name in get_type_hints(kind)
}


def file_and_attribute(model: str) -> tuple[str, str]:
    """The file in `PATH` or `PATH:ATTRIBUTE`, and the attribute, which names the Task; both may be empty."""
    if model.endswith(".py"):
        return model, ""
    file, _, attribute = model.rpartition(":")
    return file, attribute
