"""What other frameworks call techniques and the batch, in both directions, as plain data.

The names of the frameworks, which are the keys of `Technique.frameworks`:

- `transformers`: arguments of `transformers.TrainingArguments`
- `lightning`: arguments of `lightning.Trainer`; `strategy` is a mapping of those of `DDPStrategy`
- `accelerate`: arguments of `accelerate.Accelerator`; `fsdp_plugin` and `kwargs_handlers` are mappings of those of
  `FullyShardedDataParallelPlugin` and `DistributedDataParallelKwargs`
- `deepspeed`: sections of a `ds_config.json`
- `dataloader`: arguments of `torch.utils.data.DataLoader`, which Lightning and Accelerate leave to the user
- `loop`: a training loop that stays as it is. It has no words; its techniques act on the model, the optimizer or the process
- `torch`: lines of a training script in plain torch, by their place in it; see `Lines`
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.records.config import ACCUMULATION, BATCH_SIZE, Choice

TRANSFORMERS, LIGHTNING, ACCELERATE = "transformers", "lightning", "accelerate"
DEEPSPEED, DATALOADER, LOOP, TORCH = "deepspeed", "dataloader", "loop", "torch"
# `--frameworks` limits a search to what one of these can express
FRAMEWORKS = (TRANSFORMERS, LIGHTNING, ACCELERATE, DEEPSPEED, DATALOADER, LOOP)


_TAKERS = {
    TRANSFORMERS: "TrainingArguments",
    LIGHTNING: "Lightning's Trainer",
    ACCELERATE: "Accelerator",
    DEEPSPEED: "ds_config.json",
    DATALOADER: "DataLoader",
}


def why_unsaid(frameworks: Sequence[str]) -> str:
    """Why a choice is not searched that none of the frameworks has words for."""
    takers = [_TAKERS[framework] for framework in frameworks if framework in _TAKERS]
    told = [f"no argument of {' or '.join(takers)} says it"] if takers else []
    return ", and ".join([*told, *(["it takes another training loop"] if LOOP in frameworks else [])])


class At(StrEnum):
    """A place in a script. From PROCESS on there is `DEVICE`, from MODEL `model`, from OPTIMIZER `optimizer`, from LOADER `dataset`."""

    ENVIRONMENT = "environment"  # before torch is imported
    PROCESS = "process"  # before the model is built
    BUILD = "build"  # an argument of `build_model`
    MODEL = "model"  # the model is on its device
    SPREAD = "spread"  # arguments of what spreads the model over `WORLD_SIZE` processes
    OPTIMIZER = "optimizer"  # the optimizer is made, and has no state
    OPTIMIZERS = "optimizers"  # an optimizer in the place of `optimizer`, once that is set up
    LOADER = "loader"  # arguments of the data loader
    BATCHES = "batches"  # an iterator that replaces the loader's, `batches`
    STEP = "step"  # a context around an optimizer step
    BATCH = "batch"  # `batch`, a micro batch, is on the device
    FORWARD = "forward"  # a context around a forward pass
    OWN_STEP = "own step"  # a context around a whole step of the user's, who may change weights between two forward passes of it
    SCALER = "scaler"  # the gradient scaler


class Words(ABC):
    """How one framework's arguments say a technique's choice.

    Attributes:
        on_shards: what else they do where several processes share something out; empty for nothing.
    """

    on_shards: str = ""

    @abstractmethod
    def write(self, choice: Choice) -> dict[str, Any] | None:
        """The arguments for a choice; None where the framework has no words for it."""

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        """The choice that arguments stand for; None where they do not say, as for a loop, which cannot be read."""
        return None

    def is_default(self, choice: Choice) -> bool:
        """Whether the framework makes this choice without any argument, so that new ones need not say it."""
        return False


def words(**by_framework: Words) -> Mapping[str, Words]:
    """What frameworks call a technique, by the frameworks' names in the module's docstring."""
    return by_framework


@dataclass(frozen=True)
class Table(Words):
    """Each choice has arguments of its own.

    Attributes:
        arguments: choice -> the arguments that make it.
        aliases: other arguments that are read as a choice: (argument, value) -> choice.
    """

    arguments: Mapping[Choice, Mapping[str, Any]]
    aliases: Mapping[tuple[str, Any], Choice] | None = None
    on_shards: str = ""

    def write(self, choice: Choice) -> dict[str, Any] | None:
        return None if choice not in self.arguments else dict(self.arguments[choice])

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        """The choice whose arguments are all given, the one with the most arguments first; else an alias's choice."""
        most_first = sorted(self.arguments.items(), key=lambda item: -len(item[1]))
        aliases = [(choice, {name: value}) for (name, value), choice in (self.aliases or {}).items()]
        for choice, said in (*most_first, *aliases):
            if merge(arguments, said) == dict(arguments):
                return choice
        return None


@dataclass(frozen=True)
class Argument(Words):
    """One argument takes the choice as it is.

    Attributes:
        name: the argument.
        unset: the choice that the framework makes when the argument is None.
    """

    name: str
    unset: Choice | None = None

    def write(self, choice: Choice) -> dict[str, Any]:
        return {self.name: None if choice == self.unset else choice}

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        value: Choice | None = arguments.get(self.name)
        return self.unset if value is None and self.name in arguments else value


@dataclass(frozen=True)
class Option(Words):
    """One argument takes the choice as it is, and need not be there for what the framework does by default.

    Attributes:
        name: the argument, or `group.name` for one in an argument that is a mapping.
        default: the choice that the framework makes without it.
    """

    name: str
    default: Choice

    def write(self, choice: Choice) -> dict[str, Any]:
        group, _, name = self.name.rpartition(".")
        said = {name: choice}
        return {group: said} if group else said

    def is_default(self, choice: Choice) -> bool:
        return choice == self.default

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        group, _, name = self.name.rpartition(".")
        found = arguments.get(group) if group else arguments
        value: Choice | None = found.get(name) if isinstance(found, Mapping) else None  # `strategy` may be a name
        return value


@dataclass(frozen=True)
class Unsaid(Words):
    """Nothing has to be said: `apply` does it all to the model, the optimizer or the process.

    Attributes:
        choices: the choices of which this is true; None for all.
    """

    choices: tuple[Choice, ...] | None = None

    def write(self, choice: Choice) -> dict[str, Any] | None:
        return {} if self.choices is None or choice in self.choices else None


@dataclass(frozen=True)
class Lines(Words):
    """Every choice has the same lines of plain torch, which are not read back.

    Functions and classes that the lines name are copied from the technique's own file, with what these need in turn. `{choice}`
    stands for the choice, `{places}` for what the technique wrote into `Build.places`, as keyword arguments, `{modules}` for the
    modules in it.

    Attributes:
        lines: place in the script -> lines, an expression where the place takes one.
    """

    lines: Mapping[At, str]

    def write(self, choice: Choice) -> dict[str, Any] | None:
        literal = json.dumps(choice) if isinstance(choice, str) else repr(choice)
        return {place: text.replace("{choice}", literal) for place, text in self.lines.items()}


def merge(said: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments and further ones, which win. Arguments that are mappings are merged likewise."""
    both = (name for name in more if isinstance(more[name], Mapping) and isinstance(said.get(name), Mapping))
    return {**said, **more, **{name: merge(said[name], more[name]) for name in both}}


# the batch size for evaluation, which is no key of a config
EVAL_BATCH: Mapping[str, Argument] = {TRANSFORMERS: Argument("per_device_eval_batch_size")}

# the keys of the batch plan, which are no techniques
BATCH: Mapping[str, Mapping[str, Argument]] = {
    BATCH_SIZE: {
        TRANSFORMERS: Argument("per_device_train_batch_size"),
        DEEPSPEED: Argument("train_micro_batch_size_per_gpu"),
        DATALOADER: Argument("batch_size"),
    },
    ACCUMULATION: {
        TRANSFORMERS: Argument("gradient_accumulation_steps"),
        LIGHTNING: Argument("accumulate_grad_batches"),
        ACCELERATE: Argument("gradient_accumulation_steps"),
        DEEPSPEED: Argument("gradient_accumulation_steps"),
    },
}
