"""Switches of the user's own training script, which a search by command sets by the words of its command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from autotune.records.calibration import FP32
from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, UnsupportedError, plain_label
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation


class Declared(Technique):
    """One switch of a script. Where its name is a technique's, what is known of that technique is expected of it.

    The script switches it, so it applies itself to nothing, and no gradients are there to be compared.
    """

    summary: ClassVar[str] = "a switch of the training script"
    listed_choices: ClassVar[str] = ""
    applies: ClassVar[str] = "searches by command"
    phase: ClassVar[Phase] = Phase.MODEL
    exact: ClassVar[bool] = False
    choices: ClassVar[tuple[Choice, ...]]
    like: ClassVar[Technique | None]

    def support(self, setting: Setting) -> Support:
        """All choices: the script knows them."""
        return Support(choices=self.choices)

    def apply(self, build: Build, choice: Choice) -> None:
        """Refuse: the script alone can.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"{self.name} is a switch of a training script: run the script's own command")

    def validate(self, choice: Any) -> Choice:
        """One of those that the command line declares."""
        if choice not in self.choices:
            raise ValueError(f"expected one of {', '.join(map(str, self.choices))}")
        return self.choices[self.choices.index(choice)]

    def label(self, choice: Choice) -> str:
        """The technique's own where it has that choice."""
        return self.like.label(choice) if self.like and _has(self.like, choice) else plain_label(self.name, choice)

    def arithmetic(self, choice: Choice) -> str:
        """As of the technique."""
        return FP32 if self.like is None else self.like.arithmetic(self._as_known(choice))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """As of the technique; anything of a name that is none."""
        if self.like is None:
            return super().expectation(choice, choices)
        return self.like.expectation(self._as_known(choice), tuple(map(self._as_known, choices)))

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """As of the technique, where it has all of these choices."""
        known = self.like is not None and all(_has(self.like, choice) for choice in choices)
        return self.like.least_memory(choices) if self.like and known else None

    def _as_known(self, choice: Choice) -> Choice:
        """The technique's choice that it stands for: itself, or what usually wins for a word that only the script knows."""
        assert self.like is not None
        if choice == self.off or _has(self.like, choice):
            return self.like.off if choice == self.off else choice
        return self.like.likely[0] if self.like.likely else self.like.off


def declare(name: str, choices: Sequence[Choice], like: Technique | None) -> Declared:
    """A switch of the script, the first of whose `choices` is what the script does today.

    Args:
        like: the technique of that name; None for a name of the user's own.
    """
    off = like.off if like is not None and like.off in choices else choices[0]
    known = like is not None and all(_has(like, choice) for choice in choices)
    others = tuple(choice for choice in choices if choice != off)
    likely = tuple(choice for choice in like.likely if choice in others) or others[:1] if like else ()
    own = {
        "name": name,
        "choices": tuple(choices),
        "like": like,
        "off": off,
        "likely": likely,
        "ordered": known and like is not None and like.ordered,
        "changes_learning": like is not None and like.changes_learning,
        "__doc__": Declared.__doc__,
    }
    made: Declared = type("Declared", (Declared,), own)()
    return made


def _has(technique: Technique, choice: Choice) -> bool:
    try:
        return technique.validate(choice) == choice
    except ValueError:
        return False
