"""What techniques have in common that change how a model is spread over the processes of a world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.records.config import Choice, Config
from autotune.techniques.base import Phase, Technique
from autotune.techniques.build import Setting

SPREAD = "parallel"  # the technique that says how several processes hold a model
SHARDED = ("fsdp", "hsdp")  # as the choices of `parallel` begin that shard parameters


def shards_parameters(config: Mapping[str, Choice]) -> bool:
    """Whether a config shards parameters; else each process has a copy of the model."""
    return str(config.get(SPREAD)).startswith(SHARDED)


class SpreadTechnique(Technique):
    """What acts on how a model is spread, in a world of several processes."""

    phase = Phase.SPREAD
    order = 10  # before what spreads the model
    keeps_random_masks = True

    def why_not(self, setting: Setting) -> str:
        return "" if setting.world.size > 1 else "only one process trains; --devices starts several"


class SpreadOption(SpreadTechnique):
    """One option of the way in which a model is spread.

    Attributes:
        of_shards: it is an option of shards of parameters; else of copies of the model.
    """

    of_shards: ClassVar[bool]

    def shapes_update(self, choice: Choice) -> bool:
        """It concerns the passes and how gradients are put together."""
        return False

    def conflict(self, config: Config) -> str:
        if shards_parameters(config) == self.of_shards:
            return ""
        what = "sharded parameters" if self.of_shards else "copies of the model"
        return f"it is an option of {what}, and parallel={config['parallel']} has none"
