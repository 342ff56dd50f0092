"""Activation checkpointing on an unmodified model: parts of it run again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Recomputation, Setting, Technique, UnsupportedError
from autotune.techniques.block_chains import Chain, blocks_of, is_layer, numbers_up_to
from autotune.techniques.frameworks import TRANSFORMERS, At, Lines, Table, Unsaid, words
from autotune.techniques.recomputation import Checkpointed, Segments
from autotune.units import plural

if TYPE_CHECKING:
    import torch

    from autotune.task import Task


class CheckpointSegments(Technique):
    """Non-reentrant `torch.utils.checkpoint` around segments of a `Sequential`, or around n of the L blocks of a list.

    Only the instances' `forward` is replaced: classes, parameter names and the state dict stay as they are.
    """

    name = "checkpoint_segments"
    summary = "blocks run again in the backward pass: far less memory, more computing"
    listed_choices = "0 to the number of blocks"
    applies = "a `Sequential` or `ModuleList` of blocks, found anywhere in the model"
    off = 0
    phase = Phase.MODEL
    ordered = True
    order = 30
    keeps_random_masks = True
    frameworks = words(
        transformers=Table({0: {"gradient_checkpointing": False}}),
        loop=Unsaid(),
        torch=Lines({At.MODEL: "recompute(model, {choice}, {places})"}),
    )

    def label(self, choice: Choice) -> str:
        return plural(int(choice), "checkpoint segment") if choice else "no checkpointing"

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """Every block checkpointed."""
        return max(choices, key=int)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A forward pass is about a third of a step, and is run again for the share of the model that is checkpointed."""
        share = int(choice) / max(int(other) for other in choices)
        again = Factor(typical=1 + 0.3 * share, spread=1.06 + 0.06 * share)
        return Expectation(compute=again, launch=again, activations=Factor(typical=1 - 0.6 * share, spread=1.3))

    def write(
        self, framework: str, choice: Choice, choices: Sequence[Choice] = (), *, optimizer: str = ""
    ) -> dict[str, Any] | None:
        """Hugging Face models checkpoint every block or none."""
        if framework == TRANSFORMERS and choice and choice == max(choices, key=int, default=None):
            return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        return super().write(framework, choice, choices, optimizer=optimizer)

    def read(self, framework: str, arguments: Mapping[str, Any], choices: Sequence[Choice] = ()) -> Choice | None:
        """Every block, where the number of blocks is known."""
        if framework == TRANSFORMERS and arguments.get("gradient_checkpointing"):
            return max(choices, key=int, default=None)
        return super().read(framework, arguments, choices)

    def why_not(self, setting: Setting) -> str:
        chain = blocks_of(setting.task, setting.model)
        called = [block for block in chain.blocks if not is_layer(block)]
        ran = setting.run_order([*called, *([chain.sequential] if chain.sequential else [])])
        return "" if ran else "the model does not call its repeated blocks as modules"

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        return (0, *numbers_up_to(len(blocks_of(setting.task, setting.model).blocks)))

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks, and of the `Sequential` that holds them."""
        chain = blocks_of(build.task, build.model)
        if int(choice) > len(chain.blocks):
            most = plural(len(chain.blocks), "block")
            raise UnsupportedError(f"checkpoint_segments={choice}: the model has no more than {most}")
        first = (chain.blocks[start] for start, _ in _segments(chain, int(choice)))
        blocks = (block for block in first if not is_layer(block))
        whole = {} if chain.sequential is None else {"sequential": chain.sequential}
        recompute(build.model, int(choice), **build.acting_on(self.name, blocks, **whole))

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """The segments of the chain; None where the model has none."""
        try:
            chain = blocks_of(task, model)
        except UnsupportedError:
            return None
        return Recomputation(blocks=chain.blocks, segments=_segments(chain, int(choice)), each=len(chain.blocks))


def recompute(model: torch.nn.Module, num_segments: int, modules: Sequence[str], sequential: str | None = None) -> None:
    """Replace the forward of blocks, by their names, and of the `Sequential` that holds them."""
    _switch_off_caches(model)
    sequence = None
    if sequential is not None:
        container: Any = model.get_submodule(sequential)
        container.forward = sequence = Segments(container, num_segments)
    for name in modules:
        block = model.get_submodule(name)
        block.forward = Checkpointed(block, sequence)


def _segments(chain: Chain, num_segments: int) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) block of each segment: a `Sequential` is cut into them, of a list some blocks are one each."""
    edges = [i * len(chain.blocks) // num_segments for i in range(num_segments + 1)] if num_segments else []
    if chain.sequential is not None:
        return tuple(itertools.pairwise(edges))
    return tuple((start, start + 1) for start in edges[:-1])


def _switch_off_caches(model: torch.nn.Module) -> None:
    """Key-value caches of Hugging Face models would be appended to a second time; training does not read them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
