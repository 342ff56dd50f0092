"""The recommendation: a config that was itself run, and the evidence for it. Plain frozen data, JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.given import given
from autotune.records.config import Choice
from autotune.records.coupling import Coupling
from autotune.records.formats import Record, require_readable

FORMAT = 2  # 1 had no number, no `first_probe_s` and no `split_s`


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A config and what fresh processes found it to do. `samples_per_s_ci` is a 95 % interval (low, high)."""

    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    step_s: float
    num_processes: int  # fresh processes behind the figures


@dataclass(frozen=True, kw_only=True)
class Dropped(Measured):
    """A config that failed in the play-off, with the figures of its processes that ran through: zeros where none did."""

    dropped: str  # why


@dataclass(frozen=True, kw_only=True)
class Rival(Measured):
    """The best of those that played against a baseline that is kept, with its throughput over the baseline's."""

    speedup: float
    speedup_ci: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one technique of the answer, by pairs of configs that differ in it alone (`num_pairs` 0: not isolated)."""

    technique: str
    choice: Choice
    baseline_choice: Choice
    speed_ratio: float | None  # throughput with it over without it
    memory_ratio: float | None  # peak with it over without it
    num_pairs: int
    speed_ratio_ci: tuple[float, float] | None = None  # 95 % interval
    disturbed: bool = False  # other work disturbed a process of each pair


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best config where something else is trained, held against the baseline of the same training alone.

    Attributes:
        choice: what is trained: the keys of a config in which the rankings differ.
        study: keeps its search, in the file of the user's own.
        num_parameters, num_trainable: elements, all and those that require a gradient; None where that was not found out.
        config: None where there is no answer, and so are all figures. `failure` says why; it is empty otherwise.
        speedup, speedup_ci, verdict, confirmed, evaluation: as in `Result`.
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
    verdict: str = ""
    confirmed: bool = False
    evaluation: Evaluation | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The answer's gradients on the user's own model against plain fp32 (checks G, B and N)."""

    technique: str  # `config` for the whole answer, else one technique's name
    choice: Choice
    exact: bool  # held to the bound of exact techniques, else to that of reduced precision
    loss_error: float  # relative
    gradient_error: float  # relative, over all parameters
    gradient_cosine: float
    buffer_error: float  # relative, after one step
    names_equal: bool  # parameter names and state_dict keys unchanged
    noise: float  # relative gradient difference between two plain runs, or for one ulp
    passed: bool | None  # None: the model magnifies rounding so far that the comparison tells little
    reason: str = ""
    cause: tuple[str, ...] = ()  # keys of the config that made it fail; `accumulation_steps`: cutting the batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", tuple(self.cause))  # a list where it comes from JSON


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """One process that evaluated in batches of `eval_batch_size` samples.

    Attributes:
        kind: how it ended, as an outcome's; `cause` says why, where it failed.
        fits: it ran, within the memory limit less headroom.
        samples_per_s, samples_per_s_ci, peak_bytes: None where it failed.
    """

    eval_batch_size: int
    kind: str
    fits: bool
    samples_per_s: float | None = None
    samples_per_s_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The batch size with which the answer's techniques evaluate fastest: forward passes without gradients.

    Attributes:
        eval_batch_size: the smallest of those that are as fast as the fastest; None where none was found, and so are all
            figures.
        peak_bytes: of its processes. Each took a training step of a few samples first, so the optimizer's state counts.
        num_processes: fresh processes behind the figures.
        tried: every process, in order.
        unfinished: why no more was tried; empty where enough is known.
    """

    eval_batch_size: int | None = None
    samples_per_s: float | None = None
    samples_per_s_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None
    num_processes: int = 0
    tried: tuple[Evaluated, ...] = ()
    unfinished: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """How far from the limits of the device the answer runs.

    Attributes:
        arithmetic: the type of its matrix products and convolutions.
        flops_per_s: of the model's own work at the answer's speed: what is computed twice counts once.
        flops_share: of the rates that the device was measured to reach in that type, for the model's mix of work.
        bytes_per_s: that its operators read and write, as if there were no caches.
        bandwidth_share: of the measured bandwidth of memory; above 1 where caches serve.
        contention: share of the time in which others held the device while its rates were measured.
    """

    arithmetic: str
    flops_per_s: float
    flops_share: float
    bytes_per_s: float
    bandwidth_share: float
    contention: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """The answer of a search.

    Attributes:
        samples_per_s: within what processes of the config measured that no other work disturbed.
        verdict: `faster` or `slower` than the baseline where the whole of `speedup_ci` is, `same` where all of it is close to 1 or
            nothing beats the baseline; `faster` where the baseline does not run. `undecided` where the evidence is too thin,
            and for every answer that changes something and is not confirmed.
        speedup: throughput over the baseline's, as both are told; `speedup_ci` its 95 % interval, from paired fresh processes.
            None when the baseline itself does not run within the limit (`baseline` is None then, too). The answer may be the
            baseline itself: the interval is None then, and `rival` tells what was seen of the others.
        rival: the best of the others where the baseline is the answer; None where none played.
        num_rounds: of the play-off, in which the answer ran beside the baseline; where it is the baseline, the best of the others.
            None where that is not known: in answers of earlier versions.
        undecided: what is open and what would decide it; empty for other verdicts.
        confirmed: whether a play-off was run; an interrupted search answers with the best so far, unconfirmed.
        front: every config that nothing beats in both memory and throughput, by increasing memory.
        checks: the comparison of the answer's changes with plain fp32, where there was one.
        unchecked: why the answer was not compared with plain fp32 and is no recommendation: an interrupt ended the search
            before. Empty otherwise.
        limit: the resource that limits the speed now (`compute`, `memory`, `data loading`, ...) in one sentence.
        use: how near the device's limits that is; None where the device was not measured or the model could not be traced.
        peak_by_kind: `answer` and `baseline` -> bytes of tensors at the traced peak by kind: parameters, gradients, optimizer,
            activations, temporaries. What could not be traced is left out.
        tokens_per_s: throughput as the task's `loss_weight` counts; None without one.
        compile_cold_s: seconds that the answer takes to compile with an empty cache; None where it compiles nothing.
        break_even_steps, break_even_s: optimizer steps of the answer, and seconds of training from its start, compiling
            included, after which it has come as far as the fastest config that compiles nothing; None where it compiles
            nothing, or never does.
        train_samples: how many the training is to take, as the user said; the answer was then chosen by the time for all
            of them, compiling included. None where the speed of a step decided.
        evaluation: None where nobody asked for it.
        coupling: whether micro batches give the gradient of the whole batch; None where that was not looked into.
        probes, outcomes, train_s: of the whole study, earlier searches included: finished probes, how many of each kind,
            and their seconds inside training steps.
        wall_s: of this search alone, from its start to the answer. `first_probe_s`: of it, until the first probe was started;
            None where none was. `split_s`: where it went, in seconds that add up to it: `import`, `inspection`, `tracing`,
            `probes` (outside training), `training`, `checks`, `evaluation`, `other`.
        optimizer: class of the task's optimizer, as in `TaskFacts`.
        asked: what of `device`, `global_batch` and `memory_limit` the search was given, for `prepare`, `probe` and
            `verify` to be given, too.
        command: the command line of the answer, where the search ran one for each probe; empty otherwise.
        model: the task as `prepare` and the command line take it; empty for one built in Python.
        parts: which of a model file's functions and constants the task has, as in `TaskFacts`.
        places: technique of the answer -> the modules that it acted on, as its probe told.
        trained: what is trained that the task's own baseline does not train.
        rankings: this answer and, beside it, those to other trainings of the task; empty where there is no other. What is
            learned differs between them and was not compared, so none of them is better than another. `probes`, `outcomes`,
            `train_s`, `wall_s` and `split_s` are of this answer's search alone.
        format: version of this record; `from_dict` reads every one up to today's.
    """

    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    memory_limit_bytes: int
    headroom: float
    baseline: Measured | None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    verdict: str
    objective: str
    confirmed: bool = True
    rival: Rival | None = None
    num_rounds: int | None = None
    undecided: str = ""
    finalists: tuple[Measured | Dropped, ...] = ()
    front: tuple[Measured, ...] = ()
    effects: tuple[Effect, ...] = ()
    checks: tuple[Check, ...] = ()
    unchecked: str = ""
    limit: str = ""
    use: DeviceUse | None = None
    peak_by_kind: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens_per_s: float | None = None
    compile_cold_s: float | None = None
    break_even_steps: int | None = None
    break_even_s: float | None = None
    train_samples: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)
    probes: int = 0
    wall_s: float = 0.0
    first_probe_s: float | None = None
    split_s: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    storage: str = ""
    study: str = ""
    device: str = ""
    optimizer: str = ""
    asked: dict[str, str | int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    command: str = ""
    model: str = ""
    parts: tuple[str, ...] = ()
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, Choice] = field(default_factory=dict)
    rankings: tuple[Ranking, ...] = ()
    evaluation: Evaluation | None = None
    coupling: Coupling | None = None
    format: int = FORMAT

    def __repr__(self) -> str:
        return str(given("in_short")(self))

    def summary(self, width: int = 100) -> str:
        """The answer with its reasons, as `autotune search` prints it, in lines of at most `width`."""
        return str(given("page")(self, width))

    def export(self, to: str, *, force: bool = False) -> Any:
        """The answer in other words, as `autotune export STUDY --to NAME` prints it: an `autotune.export.Export`.

        Args:
            force: also where there is a `doubt`.

        Raises:
            ConfigError: there is no exporter of that name, the answer is a command line, or there is a `doubt`.
        """
        return given("export")(self, to, force=force)

    @property
    def doubt(self) -> str:
        """Why nobody should train with the answer yet: it was not compared with plain fp32, or did not pass. Empty where it did."""
        failed = (check.reason or "its gradients differ" for check in self.checks if check.passed is not True)
        return self.unchecked or next(failed, "")

    @property
    def model_file(self) -> tuple[str, str]:
        """The file of `model`, and the name of the Task in it; both may be empty."""
        return file_and_attribute(self.model)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Rebuild a result of this format or an earlier one.

        Raises:
            StudyError: it was written in a later format.
        """
        require_readable("the answer", data.get("format", 1), FORMAT)
        return super().from_dict({**data, "format": FORMAT})


def file_and_attribute(model: str) -> tuple[str, str]:
    """The file of a model as a command names it, and the name of the Task in it; both may be empty."""
    if model.endswith(".py"):
        return model, ""
    file, _, attribute = model.rpartition(":")
    return file, attribute
