"""Switches of the user's own training script, which a search by command sets by the words of its command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, UnsupportedError
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation


class Declared(Technique):
    """One switch of a script. The script switches it, so it applies itself to nothing, and no gradients are there to be compared."""

    summary: ClassVar[str] = "a switch of the training script"
    applies: ClassVar[str] = "searches by command"
    phase: ClassVar[Phase] = Phase.MODEL
    exact: ClassVar[bool] = False

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


class DeclaredLike(Declared):
    """A switch with the name of a technique: what is known of that technique is expected of it."""

    like: ClassVar[Technique]

    def label(self, choice: Choice) -> str:
        """The technique's own where it has that choice."""
        return self.like.label(choice) if _has(self.like, choice) else super().label(choice)

    def arithmetic(self, choice: Choice) -> str:
        """As of the technique."""
        return self.like.arithmetic(self._as_known(choice))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """As of the technique."""
        return self.like.expectation(self._as_known(choice), tuple(map(self._as_known, choices)))

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """As of the technique, where it has all of these choices."""
        return self.like.least_memory(choices) if all(_has(self.like, choice) for choice in choices) else None

    def _as_known(self, choice: Choice) -> Choice:
        """The technique's choice that it stands for: itself, or what usually wins for a word that only the script knows."""
        if choice != self.off and not _has(self.like, choice):
            return self.like.likely[0] if self.like.likely else self.like.off
        return self.like.off if choice == self.off else choice


def declare(name: str, choices: Sequence[Choice], like: Technique | None) -> Declared:
    """A switch of the script, the first of whose `choices` is what the script does today.

    Args:
        like: the technique of that name; None for a name of the user's own.
    """
    own: dict[str, Any] = {"name": name, "choices": tuple(choices), "off": choices[0], "__doc__": Declared.__doc__}
    if like is None:
        return type("Declared", (Declared,), own)()  # type: ignore[no-any-return]
    off = like.off if like.off in choices else choices[0]
    others = tuple(choice for choice in choices if choice != off)
    own |= {
        "like": like,
        "off": off,
        "likely": tuple(choice for choice in like.likely if choice in others) or others[:1],
        "ordered": like.ordered and all(_has(like, choice) for choice in choices),
        "changes_learning": like.changes_learning,
    }
    return type("DeclaredLike", (DeclaredLike,), own)()  # type: ignore[no-any-return]


def _has(technique: Technique, choice: Choice) -> bool:
    try:
        return technique.validate(choice) == choice
    except ValueError:
        return False
