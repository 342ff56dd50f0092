"""The state that the steps of a search share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.proposers import sampler_named
from autotune.proposers.base import Proposer
from autotune.proposers.one_at_a_time import UndoChanges, Untried
from autotune.records.config import Choice
from autotune.records.device import NOT_MEASURED, Calibration
from autotune.records.options import SearchOptions
from autotune.space import Changes
from autotune.tuning.events import Note
from autotune.tuning.playoff import PlayOff
from autotune.tuning.probing import Probing
from autotune.tuning.tracing import Tracing


@dataclass(kw_only=True)
class Search(Probing):
    """One search over one task, with what it probes by.

    Attributes:
        calibration: of the device.
        asked: the options that must be given again to run the answer.
        warnings: the warnings of the answer.
        play_off: None before it was opened.
        refused: what did not pass its comparison with plain fp32, each with the reason.
        others: what else of the task is to be trained, each to be ranked by a search of its own.
    """

    options: SearchOptions
    tracing: Tracing
    calibration: Calibration = NOT_MEASURED
    asked: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    play_off: PlayOff | None = None
    refused: list[str] = field(default_factory=list)
    others: Sequence[Mapping[str, Choice]] = ()

    def proposer(self) -> Proposer:
        """A new proposer for the sampler that the user chose."""
        return sampler_named(self.options.sampler)(self.cost_model, self.options.seed)

    def undo_changes(self) -> Proposer:
        """A proposer of the best config with each of its changes undone."""
        return UndoChanges(self.cost_model.is_likely_to_fit, self.cost_model.predict)

    def untried(self) -> Untried:
        """A proposer of what no probe has run yet."""
        return Untried(self.cost_model)

    def warn(self, text: str) -> None:
        """Warn the user now and in the answer. A repeated warning is given once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.listener.on(Note(text=text, warning=True))

    def tell(self, text: str) -> None:
        """Tell the user now."""
        self.listener.on(Note(text=text))

    def leave_out(self, name: str, choice: Choice, reason: str) -> None:
        """Take a choice of a technique, which does not train as plain fp32 does, out of the space."""
        self.history.space = self.history.space.without(name, {choice})
        self._refuse(f"{name}={choice} is left out: {reason}")

    def bar(self, changes: Changes, reason: str) -> None:
        """Let no config with all of these changes be probed or be the answer."""
        self.history.space = self.history.space.barring(changes)
        self._refuse(reason)

    def _refuse(self, text: str) -> None:
        self.refused.append(text)
        self.warn(text)
