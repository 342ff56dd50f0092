"""A guest of the play-off: what is measured in some of its rounds beside those who play, and has no part in the choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.records.config import Config
from autotune.records.outcome import Outcome

NUM_ROUNDS = 3  # in which it runs through: processes differ, and those who play tell by how much


@dataclass
class Guest:
    """A config that is no point of the space, so that it is never compared by its choices: the baseline of one device, say.

    Attributes:
        config: that its next process runs.
        run: runs a config in a round; None where that was cut short.
        does_not_fit: whether an outcome says that its config is too large.
        smaller: the config that takes the place of one that is too large; None where there is none.
        wall_s: seconds that its next process will take.
        outcomes: of the processes of `config`, by round.
        failed: the outcome after which it is measured no more; None as long as it may be.
    """

    config: Config
    run: Callable[[Config, int], Outcome | None]
    does_not_fit: Callable[[Outcome], bool]
    smaller: Callable[[Config], Config | None]
    wall_s: float = 0.0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failed: Outcome | None = None

    @property
    def num_missing(self) -> int:
        """The rounds in which it still has to run."""
        return 0 if self.failed is not None else max(0, NUM_ROUNDS - len(self.ran))

    @property
    def ran(self) -> dict[int, Outcome]:
        """The processes that ran through within the memory."""
        return {number: outcome for number, outcome in self.outcomes.items() if outcome.ok}

    def visit(self, number: int) -> None:
        """Run it in a round."""
        if (outcome := self.run(self.config, number)) is not None:
            self.wall_s = outcome.running_s
            self.note(self.config, number, outcome)

    def note(self, config: Config, number: int, outcome: Outcome) -> None:
        """Take note of a process. Where a config is too large, a smaller one takes its place."""
        if config != self.config:
            return
        if not self.does_not_fit(outcome):
            self.outcomes[number] = outcome
            self.failed = None if outcome.ok or outcome.crowded else outcome
            return
        self.outcomes = {}
        if (smaller := self.smaller(config)) is not None:
            self.config = smaller
        else:
            self.failed = outcome
