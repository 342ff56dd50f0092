"""Activation checkpointing on an unmodified model: parts of it run again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Recomputation, Technique, UnsupportedError
from autotune.techniques.block_chains import Chain, find_chain, is_layer
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import LOOP, TORCH, TRANSFORMERS, At, Lines, Table, Unsaid, Words
from autotune.techniques.recomputed import Checkpointed, Segments
from autotune.units import plural

if TYPE_CHECKING:
    import torch

    from autotune.task import Task

_EVERY_CHOICE_UP_TO = 8


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
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Table({0: {"gradient_checkpointing": False}}),
        LOOP: Unsaid(),
        TORCH: Lines({At.MODEL: "recompute(model, {choice}, {places})"}),
    }

    def support(self, setting: Setting) -> Support:
        """0 to the number of blocks, thinned when there are many."""
        try:
            chain = blocks_of(setting.task, setting.model)
        except UnsupportedError as error:
            return Support(choices=(0,), reason=str(error))
        called = [block for block in chain.blocks if not is_layer(block)]
        if not setting.run_order([*called, *([chain.sequential] if chain.sequential else [])]):
            return Support(choices=(0,), reason="the model does not call its repeated blocks as modules")
        return Support(choices=(0, *thinned(len(chain.blocks))))

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks, and of the `Sequential` that holds them."""
        chain = blocks_of(build.task, build.model)
        num_segments, num_blocks = int(choice), len(chain.blocks)
        if num_segments > num_blocks:
            raise UnsupportedError(
                f"checkpoint_segments={num_segments}: the model has no more than {plural(num_blocks, 'block')}"
            )
        first = (chain.blocks[start] for start, _ in _segments(chain, num_segments))
        blocks = (block for block in first if not is_layer(block))
        whole = {} if chain.sequential is None else {"sequential": chain.sequential}
        recompute(build.model, num_segments, **build.acting_on(self.name, blocks, **whole))

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """The segments of the chain; None where the model has none."""
        try:
            chain = blocks_of(task, model)
        except UnsupportedError:
            return None
        return Recomputation(blocks=chain.blocks, segments=_segments(chain, int(choice)), each=len(chain.blocks))

    def label(self, choice: Choice) -> str:
        return f"{choice} checkpoint segment{'' if choice == 1 else 's'}" if choice else "no checkpointing"

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """Every block checkpointed."""
        return max(choices, key=int)

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

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A forward pass is about a third of a step, and is run again for the share of the model that is checkpointed."""
        share = int(choice) / max(int(other) for other in choices)
        again = Factor(typical=1 + 0.3 * share, spread=1.06 + 0.06 * share)
        return Expectation(compute=again, launch=again, activations=Factor(typical=1 - 0.6 * share, spread=1.3))


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


def thinned(num_blocks: int) -> list[int]:
    """1 to `num_blocks`; of more than 8 blocks 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `num_blocks` itself."""
    if num_blocks <= _EVERY_CHOICE_UP_TO:
        return list(range(1, num_blocks + 1))
    choices, octave = {1, num_blocks}, 2
    while octave <= num_blocks:
        choices.update((octave, octave * 3 // 2))
        octave *= 2
    return sorted(choice for choice in choices if choice <= num_blocks)


def blocks_of(task: Task, model: torch.nn.Module) -> Chain:
    """The blocks that the task names, else those found in the model.

    Raises:
        UnsupportedError: there are none, or what the task names is not part of the model.
    """
    if task.checkpoint_blocks is None:
        chain = find_chain(model)
        if chain is None:
            raise UnsupportedError(
                "the model has no Sequential or ModuleList of blocks; checkpoint_blocks(model) can name them"
            )
        return chain
    blocks = tuple(dict.fromkeys(task.checkpoint_blocks(model)))
    modules = set(model.modules())
    if not blocks or not all(block in modules for block in blocks):
        raise UnsupportedError("checkpoint_blocks(model) must return modules of that model, at least one")
    return Chain(blocks)


def _switch_off_caches(model: torch.nn.Module) -> None:
    """Key-value caches of Hugging Face models would be appended to a second time; training does not read them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
