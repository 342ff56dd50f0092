"""What other frameworks call techniques and the batch, in both directions, as plain data.

The names of the frameworks, which are the keys of `Technique.frameworks`:

- `transformers`: arguments of `transformers.TrainingArguments`
- `lightning`: arguments of `lightning.Trainer`
- `accelerate`: arguments of `accelerate.Accelerator`
- `deepspeed`: sections of a `ds_config.json`
- `dataloader`: arguments of `torch.utils.data.DataLoader`, which Lightning and Accelerate leave to the user
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.records.batch_plan import ACCUMULATION, BATCH_SIZE
from autotune.records.config import Choice

TRANSFORMERS, LIGHTNING, ACCELERATE = "transformers", "lightning", "accelerate"
DEEPSPEED, DATALOADER = "deepspeed", "dataloader"
FRAMEWORKS = (TRANSFORMERS, LIGHTNING, ACCELERATE, DEEPSPEED, DATALOADER)


class Words(Protocol):
    """How one framework's arguments say a technique's choice."""

    def write(self, choice: Choice) -> dict[str, Any] | None:
        """The arguments for a choice; None where the framework has no words for it."""

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        """The choice that arguments make; None where they do not say."""


@dataclass(frozen=True)
class Table:
    """Each choice has arguments of its own.

    Attributes:
        arguments: choice -> the arguments that make it.
        aliases: other arguments that are read as a choice: (argument, value) -> choice.
    """

    arguments: Mapping[Choice, Mapping[str, Any]]
    aliases: Mapping[tuple[str, Any], Choice] | None = None

    def write(self, choice: Choice) -> dict[str, Any] | None:
        """The arguments for a choice; None where the framework has no words for it."""
        return None if choice not in self.arguments else dict(self.arguments[choice])

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        """The choice whose arguments are all there, the one with the most first."""
        for choice, said in sorted(self.arguments.items(), key=lambda item: -len(item[1])):
            if all(name in arguments and arguments[name] == value for name, value in said.items()):
                return choice
        for (name, value), choice in (self.aliases or {}).items():
            if name in arguments and arguments[name] == value:
                return choice
        return None


@dataclass(frozen=True)
class Argument:
    """One argument takes the choice as it is.

    Attributes:
        name: the argument.
        unset: the choice that the framework makes when the argument is None.
    """

    name: str
    unset: Choice | None = None

    def write(self, choice: Choice) -> dict[str, Any]:
        """The argument with the choice as its value."""
        return {self.name: None if choice == self.unset else choice}

    def read(self, arguments: Mapping[str, Any]) -> Choice | None:
        """The argument's value; None where it is not there."""
        if self.name not in arguments:
            return None
        value: Choice | None = arguments[self.name]
        return self.unset if value is None else value


# The batch size of evaluation, which is no key of a config.
EVAL_BATCH: Mapping[str, Argument] = {TRANSFORMERS: Argument("per_device_eval_batch_size")}

# The batch plan's keys, which are no techniques.
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
