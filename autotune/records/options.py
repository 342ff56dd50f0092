"""The options, each spelled once. The command line, the Python API and the stored study read this table.

A new one is an `Option(...)`, and a field in each options class that has it: `--help`, the API, docstrings and `[tool.autotune]`
follow. A new unit goes into `option_kinds.py`. A search reads its options in `tuning/opening.py`. If probes under different values
cannot be compared, the option also needs a field of `Fingerprint` (`study.py`), which `tuning/where_kept.py` fills; if probes need its
value, a field of `ProbeSettings` (`config.py`). An option that the answer must be run with again belongs into `RunOptions`.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from autotune.errors import ConfigError
from autotune.records import option_kinds as kinds
from autotune.records.objective import OBJECTIVES
from autotune.records.option_kinds import Kind
from autotune.records.price import Price
from autotune.units import format_exact_seconds, parse_bytes

TASK, SPACE, EFFORT, KEPT = "task and device", "search space", "effort", "study"  # groups in `--help`
SCRIPT = "a training script as it is, in place of MODEL"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the keyword in Python; `--name`, with hyphens, on the command line.
        kind: how its value is read.
        group: under which `--help` lists it.
        help: its effect, for `--help` and for docstrings.
    """

    name: str
    kind: Kind
    group: str
    help: str

    @property
    def flag(self) -> str:
        """`--memory-limit`."""
        return f"--{self.name.replace('_', '-')}"

    def default(self, value: Any) -> Any:
        """The options class's field for this option, with `value` as its default."""
        metadata = {"option": self}
        if isinstance(value, dict):
            return field(default_factory=value.copy, metadata=metadata)
        return field(default=value, metadata=metadata)

    def required(self) -> Any:
        """The options class's field for this option where it has to be given."""
        return field(metadata={"option": self})


DEVICE = Option("device", kinds.text("auto|cpu|cuda[:i]"), TASK, "where to train")
DEVICES = Option(
    "devices",
    kinds.text("1|N|all|cuda:0,1|cpu:2"),
    TASK,
    "the devices that train the model together, each by a process",
)
ONE_DEVICE = "1"
SLOTS = Option(
    "slots",
    kinds.text("N|all|cuda:0,1|cpu:2"),
    EFFORT,
    "run independent probes at once, each on a device or a part of the CPU of its own",
)
ONE_SLOT = "1"
MEMORY_LIMIT = Option(
    "memory_limit",
    kinds.MEMORY,
    TASK,
    "memory of one training process, in bytes or as a share of the device's; default: all that is free, or the limit of a continued study",
)
GLOBAL_BATCH = Option("global_batch", kinds.COUNT, TASK, "samples per optimizer step, in place of the task's own")
HEADROOM = Option("headroom", kinds.SHARE, TASK, "share of the memory limit to keep free")
OBJECTIVE = Option(
    "objective", kinds.one_of(tuple(OBJECTIVES)), SPACE, "; ".join(objective.help for objective in OBJECTIVES.values())
)
PRICE = Option(
    "price", kinds.PRICE, SPACE, "what one device costs an hour: then the answer tells what a million samples cost"
)
TRAIN_STEPS = Option(
    "train_steps",
    kinds.COUNT,
    SPACE,
    "optimizer steps of the baseline that the training is to take: compiling then counts as a part of its time",
)
TRAIN_EPOCHS = Option(
    "train_epochs",
    kinds.COUNT,
    SPACE,
    "passes over the dataset that the training is to take, in place of --train-steps",
)
FIX = Option("fix", kinds.CHOICE_OF, SPACE, "use only this choice of a technique")
INCLUDE = Option("include", kinds.NAMES, SPACE, "try a technique's optional choices too")
EXCLUDE = Option("exclude", kinds.NAMES, SPACE, "leave a technique as it is in the baseline")
FRAMEWORKS = Option(
    "frameworks",
    kinds.NAMES,
    SPACE,
    "search only what the arguments of these can say: transformers, lightning, accelerate, deepspeed, dataloader",
)
GRID = Option("grid", kinds.CHOICES_OF, SPACE, "try only these choices of a technique")
CHOICES = Option(
    "choices", kinds.TEXTS_OF, SCRIPT, "the words that stand for {NAME} in the command; the first is what you run today"
)
BASELINE = Option(
    "baseline", kinds.CHOICE_OF, SCRIPT, "what you run today where it is not the first choice, e.g. batch_size=8"
)
SAMPLER = Option(
    "sampler", kinds.text("NAME"), SPACE, "the proposer of configs: cost-model, Optuna's gp, tpe or random, or grid"
)
SEED = Option("seed", kinds.SEED, SPACE, "seed of all random choices")
LONGEST_AUTO_S = 600.0
BUDGET = Option(
    "budget",
    kinds.SECONDS_OR_AUTO,
    EFFORT,
    "time for the whole search, play-off included; auto, the default: as long as what more search is expected to gain is worth its "
    f"time over the training ahead (--train-steps, else an hour), at most {format_exact_seconds(LONGEST_AUTO_S)}",
)
TRIALS = Option("trials", kinds.COUNT, EFFORT, "at most N probes before the play-off")
PROBE_TIMEOUT = Option(
    "probe_timeout",
    kinds.SECONDS,
    EFFORT,
    "kill a probe after this time; a search's default is a multiple of the baseline's time",
)
TIMEOUT = Option("timeout", kinds.SECONDS, EFFORT, "end the run after this time")
PREDICT_TIMEOUT = Option(
    "timeout", kinds.SECONDS, EFFORT, "end after this time, and leave out what is not traced by then"
)
TRACE_TIMEOUT = Option("timeout", kinds.SECONDS, EFFORT, "stop tracing after this time, and leave out the rest")
STEPS = Option("steps", kinds.COUNT, EFFORT, "exactly N timed optimizer steps")
INTERVAL = Option("interval", kinds.SHARE, EFFORT, "repeat a config until its throughput is known to within this share")
MAX_REPEATS = Option("max_repeats", kinds.COUNT, EFFORT, "repeat a config at most N times")
TIMED = Option("timed", kinds.SECONDS, EFFORT, "time each probe for at most this long")
EVAL = Option("eval", kinds.SWITCH, EFFORT, "find the batch size for evaluation too, in a share of the budget")
STUDY = Option("study", kinds.text("NAME"), KEPT, "name of the study; default: the task's")
STORAGE = Option("storage", kinds.text("URL"), KEPT, "database file or Optuna URL; default: studies/<task>.db")
LIKE = Option(
    "like",
    kinds.text("STUDY"),
    EFFORT,
    "begin with what this study taught, and not with what like studies on this machine did",
)
NO_PRIORS = Option("no_priors", kinds.SWITCH, EFFORT, "begin without what earlier studies taught")
TABLE = Option("out", kinds.path("FILE.csv"), KEPT, "the table to write; an existing one is continued")
GPU = Option(
    "gpu",
    kinds.text("80GiB|NAME"),
    TASK,
    "memory or name of a GPU, which need not be in this machine, e.g. 'A100 80GB'",
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every run of a task; an answer is run with the same ones."""

    device: str = DEVICE.default("auto")
    devices: str = DEVICES.default(ONE_DEVICE)
    memory_limit_bytes: int | None = MEMORY_LIMIT.default(None)
    global_batch: int | None = GLOBAL_BATCH.default(None)

    def __post_init__(self) -> None:
        for item, option in _table(type(self)):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            try:
                object.__setattr__(self, item.name, option.kind.read(value))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{option.name}: {error}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any], *, total_bytes: Callable[[str], int] | None = None) -> Self:
        """Options from values by the names that users write, as text or as Python values.

        Args:
            total_bytes: tells the memory of a device by its name, for a limit given as a percentage.

        Raises:
            ConfigError: a value is not possible.
            TypeError: a name is no option, or a required option is missing.
        """
        names = {option.name: item.name for item, option in _table(cls)}
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
                raise TypeError(f"there is no option {name!r}; {hint}")
        options = cls(**{names[name]: value for name, value in given.items()})
        limit: Any = options.memory_limit_bytes
        if isinstance(limit, str):
            assert total_bytes is not None, "a percentage needs the device's memory"
            limit = parse_bytes(limit, total_bytes=total_bytes(options.device))
            object.__setattr__(options, "memory_limit_bytes", limit)
        return options

    def asked(self) -> dict[str, str | int]:
        """The options with which an answer has to be run, without those that are defaults."""
        values = {option.name: (getattr(self, item.name), item.default) for item, option in _table(RunOptions)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True, kw_only=True)
class SearchOptions(RunOptions):
    """The options of a search."""

    headroom: float = HEADROOM.default(0.05)
    objective: str = OBJECTIVE.default("throughput")
    price: Price | None = PRICE.default(None)  # noqa: RUF009  # a field
    train_steps: int | None = TRAIN_STEPS.default(None)
    train_epochs: int | None = TRAIN_EPOCHS.default(None)
    fix: Mapping[str, Any] = FIX.default({})
    include: tuple[str, ...] = INCLUDE.default(())
    exclude: tuple[str, ...] = EXCLUDE.default(())
    frameworks: tuple[str, ...] = FRAMEWORKS.default(())
    sampler: str = SAMPLER.default("cost-model")
    seed: int = SEED.default(0)
    budget_s: float | None = BUDGET.default(None)
    num_trials: int | None = TRIALS.default(None)
    probe_timeout_s: float | None = PROBE_TIMEOUT.default(None)
    slots: str = SLOTS.default(ONE_SLOT)
    eval: bool = EVAL.default(False)
    like: str | None = LIKE.default(None)
    no_priors: bool = NO_PRIORS.default(False)
    study: str | None = STUDY.default(None)
    storage: str | None = STORAGE.default(None)

    @property
    def longest_s(self) -> float:
        """Seconds that the search may take at most."""
        return LONGEST_AUTO_S if self.budget_s is None else self.budget_s


@dataclass(frozen=True, kw_only=True)
class CommandOptions(SearchOptions):
    """The options of a search whose probes are runs of a command."""

    choices: Mapping[str, Any] = CHOICES.default({})
    baseline: Mapping[str, Any] = BASELINE.default({})


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(RunOptions):
    """The options of a single probe."""

    timeout_s: float = TIMEOUT.default(600.0)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RunOptions):
    """The options of a long run."""

    num_steps: int = STEPS.required()
    timeout_s: float = TIMEOUT.default(24 * 3600.0)


@dataclass(frozen=True, kw_only=True)
class PredictOptions(RunOptions):
    """The options of a prediction."""

    gpu: str | None = GPU.default(None)
    headroom: float = HEADROOM.default(0.05)
    timeout_s: float = PREDICT_TIMEOUT.default(120.0)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(RunOptions):
    """The options of an explanation."""

    gpu: str | None = GPU.default(None)
    timeout_s: float = TRACE_TIMEOUT.default(60.0)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    """The options of a sweep: a technique that `grid` does not name is swept over all its choices."""

    out: Path = TABLE.required()  # noqa: RUF009  # a field
    grid: Mapping[str, Any] = GRID.default({})
    include: tuple[str, ...] = INCLUDE.default(())
    exclude: tuple[str, ...] = EXCLUDE.default(())
    interval: float = INTERVAL.default(0.03)
    max_repeats: int = MAX_REPEATS.default(8)
    max_timed_s: float = TIMED.default(0.5)
    max_warmup_s: float = 1.0  # processes differ more than blocks within one, so many short probes do best
    probe_timeout_s: float = PROBE_TIMEOUT.default(120.0)
    seed: int = SEED.default(0)


def table(options: type[RunOptions]) -> dict[Option, Any]:
    """The options of a class, in order, with their defaults; MISSING for those that have to be given."""
    return {
        option: item.default if item.default_factory is MISSING else item.default_factory()
        for item, option in _table(options)
    }


def words(asked: Mapping[str, str | int]) -> list[str]:
    """The result of `RunOptions.asked` as words of a command line."""
    kind_of = {option.name: option for _, option in _table(RunOptions)}
    return [word for name, value in asked.items() for word in (kind_of[name].flag, kind_of[name].kind.write(value))]


def machines_in(devices: str) -> tuple[int, int] | None:
    """Of `2x4`, as a runner on several machines takes `devices`: the machines, and the devices of each. None for one machine's."""
    named = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", devices)
    return None if named is None else (int(named[1]), int(named[2]))


def torchrun_of(devices: str, num_processes: int) -> tuple[str, str]:
    """Where a script is started that trains in several processes, empty on one machine, and the command up to the script's name.

    Args:
        devices: the option; one that names no machines means one machine.
    """
    if (machines := machines_in(devices)) is None:
        return "", f"torchrun --nproc-per-node {num_processes}"
    number, of_each = machines
    return (
        f"on each of {number} machines, of which FIRST is one",
        f"torchrun --nnodes {number} --nproc-per-node {of_each} --rdzv-backend c10d --rdzv-endpoint FIRST",
    )


def takes(options: type[RunOptions]) -> Callable[[F], F]:
    """Have the signature and the docstring of a function that takes `**options` name each option.

    In the docstring the names replace the line `**options`.
    """

    def decorate(function: F) -> F:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = []
        for option, default in table(options).items():
            optional = " | None" if default is None else ""
            shown = inspect.Parameter.empty if default is MISSING else default
            added.append(
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=shown,
                    annotation=option.kind.python + optional,
                )
            )
        returns = inspect.signature(function).return_annotation
        function.__signature__ = inspect.Signature([*own, *added], return_annotation=returns)  # type: ignore[attr-defined]
        lines = (
            textwrap.fill(f"{o.name}: {o.help}.", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for o in table(options)
        )
        function.__doc__ = (function.__doc__ or "").replace("        **options\n", "\n".join(lines) + "\n")
        return function

    return decorate


def _table(options: type[RunOptions]) -> list[tuple[Field[Any], Option]]:
    return [(item, item.metadata["option"]) for item in fields(options) if "option" in item.metadata]
