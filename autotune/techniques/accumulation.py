"""Gradient accumulation: micro steps per optimizer step. The loader and the session read it from the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Phase, Setting, Technique
from autotune.techniques.batch_size import positive_int

if TYPE_CHECKING:
    import torch

    from autotune.session import Build


class Accumulation(Technique):
    """Micro steps per optimizer step; with a global batch it follows from the batch size."""

    name: ClassVar[str] = "accumulation_steps"
    summary: ClassVar[str] = "micro steps per optimizer step: keeps the global batch while the micro batch shrinks"
    off: ClassVar[Choice] = 1
    phase: ClassVar[Phase] = Phase.LOADER
    ordered: ClassVar[bool] = True

    def support(self, setting: Setting) -> Support:
        """One value per divisor of the global batch; 1 without one.

        With batch normalisation the micro batch is part of what is learned: the gradients of micro batches of 2 and of
        8 were measured to have a cosine of 0.33. Accumulating more than the baseline is then searched only when
        included.
        """
        if setting.global_batch is None:
            return Support(choices=(1,), reason="no global batch is given, so every step takes one batch")
        steps = tuple(d for d in range(1, setting.global_batch + 1) if setting.global_batch % d == 0)
        baseline = int(setting.baseline[self.name])
        if not uses_batch_statistics(setting.model) or baseline >= steps[-1]:
            return Support(choices=steps)
        return Support(
            choices=tuple(step for step in steps if step <= baseline),
            reason=(
                f"the model has batch normalisation, so accumulating more than the baseline's {baseline} micro steps "
                "normalises over smaller batches, which changes what is learned"
            ),
            optional=tuple(step for step in steps if step > baseline),
            note=(
                "batch normalisation sees one micro batch at a time: accumulation learns something else than the whole "
                "batch at once, so compare validation results before changing accumulation_steps"
            ),
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Nothing to do: the loader and the session read `config.accumulation_steps`."""

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Nothing by itself: the predictors know how often the optimizer steps."""
        return Expectation()

    def validate(self, choice: Any) -> Choice:
        """A positive integer."""
        return positive_int(choice)


def uses_batch_statistics(model: torch.nn.Module) -> bool:
    """Whether some module normalises over the samples of a micro batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
