"""Batch size: samples per micro step. The loader and the session read it from the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Phase, Setting, Technique

if TYPE_CHECKING:
    from autotune.session import Build

# Each octave is cut at 1, 1.25 and 1.5: steps of 1.2x to 1.33x, multiples of 8 from 32 on (tensor cores want those).
_OCTAVE_QUARTERS = (4, 5, 6)
_RANGE_BELOW, _RANGE_ABOVE = 16, 64  # searched: baseline / 16 to baseline x 64


class BatchSize(Technique):
    """Samples per micro step and device."""

    name: ClassVar[str] = "batch_size"
    summary: ClassVar[str] = "samples per micro step: larger keeps the device busier and takes more memory"
    off: ClassVar[Choice] = 32
    phase: ClassVar[Phase] = Phase.LOADER
    ordered: ClassVar[bool] = True

    def support(self, setting: Setting) -> Support:
        """The exact divisors of the global batch, or about 1.25x steps around the baseline; up to the dataset."""
        baseline = int(setting.baseline[self.name])
        most = setting.dataset_size
        if setting.global_batch is not None:
            sizes = {d for d in range(1, setting.global_batch + 1) if setting.global_batch % d == 0}
        else:
            low, high = max(1, baseline // _RANGE_BELOW), baseline * _RANGE_ABOVE
            sizes = {size for size in fine_sizes(high) if size >= low}
        allowed = {size for size in sizes if most is None or size <= most} | {baseline}
        bounded = most is not None and max(sizes) > most
        return Support(
            choices=tuple(sorted(allowed)),
            reason=f"the training set has {most} samples; larger batches are left out" if bounded else "",
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Nothing to do: the loader and the session read `config.batch_size`."""

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Nothing by itself: the predictors know how time and memory follow from the batch size."""
        return Expectation()

    def validate(self, choice: Any) -> Choice:
        """A positive integer."""
        return positive_int(choice)


def fine_sizes(high: int) -> list[int]:
    """Sizes from 1 to `high` in about 1.25x steps: 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, ..."""
    sizes = {1, 2, 3}
    octave = 4
    while octave <= high:
        sizes.update(octave * quarters // 4 for quarters in _OCTAVE_QUARTERS)
        octave *= 2
    return sorted(size for size in sizes if size <= high)


def positive_int(choice: Any) -> int:
    """Return `choice` if it is an integer of at least 1, and no bool.

    Raises:
        ValueError: it is not.
    """
    if type(choice) is not int or choice < 1:
        raise ValueError("expected a whole number of at least 1")
    return choice
