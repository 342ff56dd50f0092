"""Activation checkpointing on an unmodified model: some parts keep no activations, and run again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Recomputation, Setting, Technique, UnsupportedError
from autotune.techniques.block_chains import Chain, blocks_of, is_layer, numbers_up_to
from autotune.techniques.build import Forward
from autotune.techniques.frameworks import TRANSFORMERS, At, Lines, Table, Unsaid, words
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
        """The choice that checkpoints every block."""
        return max(choices, key=int)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A forward pass is about a third of a step, and runs again for the checkpointed share of the model."""
        share = int(choice) / max(int(other) for other in choices)
        again = Factor(typical=1 + 0.3 * share, spread=1.06 + 0.06 * share)
        return Expectation(compute=again, launch=again, activations=Factor(typical=1 - 0.6 * share, spread=1.3))

    def write(
        self, framework: str, choice: Choice, choices: Sequence[Choice] = (), *, optimizer: str = ""
    ) -> dict[str, Any] | None:
        """Hugging Face models can checkpoint only every block or none."""
        if framework == TRANSFORMERS and choice and choice == max(choices, key=int, default=None):
            return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        return super().write(framework, choice, choices, optimizer=optimizer)

    def read(self, framework: str, arguments: Mapping[str, Any], choices: Sequence[Choice] = ()) -> Choice | None:
        """Hugging Face's checkpointing is read as every block, where their number is known."""
        if framework == TRANSFORMERS and arguments.get("gradient_checkpointing"):
            return max(choices, key=int, default=None)
        return super().read(framework, arguments, choices)

    def why_not(self, setting: Setting) -> str:
        chain = blocks_of(setting.task, setting.model)
        ran = setting.run_order([*chain.larger, *([chain.sequential] if chain.sequential else [])])
        return "" if ran else "the model does not call its repeated blocks as modules"

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        return (0, *numbers_up_to(len(blocks_of(setting.task, setting.model).blocks)))

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks, and of the `Sequential` that holds them."""
        chain = blocks_of(build.task, build.model)
        if int(choice) > len(chain.blocks):
            found = plural(len(chain.blocks), "block")
            raise UnsupportedError(f"checkpoint_segments={choice}: the model has {found}; choose at most as many")
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
    sequence = None
    if sequential is not None:
        container: Any = model.get_submodule(sequential)
        container.forward = sequence = Segments(container, num_segments)
    for name in modules:
        block = model.get_submodule(name)
        block.forward = Checkpointed(block, sequence)


def _segments(chain: Chain, num_segments: int) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) block of each segment. A `Sequential` is cut into segments; in a list each segment is a single block."""
    segments = _cut(len(chain.blocks), num_segments)
    return segments if chain.sequential is not None else tuple((start, start + 1) for start, _ in segments)


def _cut(num_blocks: int, num_segments: int) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) block of each of `num_segments` segments with nearly equal numbers of blocks."""
    edges = [number * num_blocks // max(1, num_segments) for number in range(num_segments + 1)]
    return tuple(itertools.pairwise(edges))


Contexts = tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]  # around a pass, and around its recomputation
Place = tuple["torch.nn.Module", str]  # a buffer: the module and the buffer's name in it


@dataclass(eq=False)
class Recomputed(Forward):
    """Calls a module's forward through `checkpoint` while it trains, and directly otherwise.

    Attributes:
        keep: makes contexts for the first pass and its recomputation, so that the first keeps results for the other; or None.
        constant: buffers that passes were seen to leave alone.
    """

    keep: Callable[[], Contexts] | None = field(default=None, init=False)
    constant: set[Place] = field(default_factory=set, init=False)

    def checkpoint(self, modules: tuple[torch.nn.Module, ...], function: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of `function`, which calls `modules` and runs again in the backward pass."""
        from torch.utils.checkpoint import checkpoint

        def contexts() -> Contexts:
            before: dict[Place, torch.Tensor] = {}
            first, again = (nullcontext(), nullcontext()) if self.keep is None else self.keep()
            first = _within(remember_buffers(modules, before, self.constant), first)
            return first, _EachTime(partial(copies_stand_in, before), again)

        # Keyword arguments are passed as positional ones, because checkpoint looks only among these for tensors whose device's
        # random state it has to keep.
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            positional = values[: len(values) - len(names)]
            return function(*positional, **dict(zip(names, values[len(positional) :], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)


@dataclass(eq=False)
class Checkpointed(Recomputed):
    """The forward of one block. While a segment of its `Sequential` runs, that segment is recomputed as a whole, not the block."""

    segments: Segments | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward pass."""
        if not self.trains() or (self.segments is not None and self.segments.running):
            return self.call(*args, **kwargs)
        return self.checkpoint((self.module,), self.call, *args, **kwargs)


@dataclass(eq=False)
class Segments(Recomputed):
    """The forward of a `Sequential`, cut into segments of nearly equal numbers of children.

    Models may also iterate over a `Sequential` and call its children themselves; then the children's own
    `Checkpointed` takes effect.
    """

    num_segments: int
    running: bool = field(default=False, init=False)  # True inside a segment, also during its recomputation

    def __call__(self, input: Any) -> Any:  # named as in `nn.Sequential.forward`
        """The forward pass of the `Sequential`."""
        if not self.trains():
            return self.call(input)
        children = tuple(self.module.children())
        value = input
        for start, end in _cut(len(children), self.num_segments):
            value = self.checkpoint(children[start:end], partial(self._run, children[start:end]), value)
        return value

    def _run(self, modules: tuple[torch.nn.Module, ...], value: Any) -> Any:
        before, self.running = self.running, True
        try:
            for module in modules:
                value = module(value)
        finally:
            self.running = before
        return value


@contextmanager
def remember_buffers(
    modules: tuple[torch.nn.Module, ...], before: dict[Place, torch.Tensor], constant: set[Place]
) -> Iterator[None]:
    """A context for a first pass that remembers the values of the buffers that the pass changes, as they were before it.

    Such buffers are running statistics of normalisation layers, the vectors of spectral norm, a codebook. The recomputation
    starts from the same values as the first pass, so it computes the same, and its changes are thrown away. Otherwise
    BatchNorm's running statistics would be updated twice, which gradients do not show (pytorch issue 96136).

    Args:
        before: is filled: buffer -> its value before the pass.
        constant: buffers that passes were seen to leave alone, such as masks; these are not copied. It is kept up to date.
    """
    originals = [(place, buffer, buffer._version) for place, buffer in buffers_of(modules).items()]
    copies = {place: buffer.detach().clone() for place, buffer, _ in originals if place not in constant}
    try:
        yield
    finally:
        for place, buffer, version in originals:
            if _buffer(place) is buffer and buffer._version == version and not _may_be_statistics(buffer):
                constant.add(place)
            else:
                constant.discard(place)
                before[place] = copies.get(place, buffer)


def buffers_of(modules: tuple[torch.nn.Module, ...]) -> dict[Place, torch.Tensor]:
    """Every buffer of the modules and of their submodules."""
    return {(m, name): b for root in modules for m in root.modules() for name, b in m._buffers.items() if b is not None}


@contextmanager
def copies_stand_in(buffers: Mapping[Place, torch.Tensor]) -> Iterator[None]:
    """A context in which copies of the given values replace buffers; afterwards the original buffers are back."""
    present = {place: _buffer(place) for place in buffers}
    for (module, name), value in buffers.items():
        module._buffers[name] = value.clone()
    try:
        yield
    finally:
        for (module, name), buffer in present.items():
            module._buffers[name] = buffer


@contextmanager
def _within(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _EachTime(ExitStack):
    """Makes a new context whenever it is entered, since checkpoint uses one object for all recomputations of a forward pass.

    There are several where the loss takes derivatives itself, before the backward pass. The first uses up what was kept.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]], first: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._make = make
        self._inner = first

    def __enter__(self) -> Self:
        self.enter_context(self._make())
        self.enter_context(self._inner)
        self._inner = nullcontext()
        return self


def _may_be_statistics(buffer: torch.Tensor) -> bool:
    """Whether a buffer may be running statistics, which batch normalisation changes without counting up their version."""
    return buffer.dim() == 1 and buffer.is_floating_point()


def _buffer(place: Place) -> torch.Tensor | None:
    module, name = place
    return module._buffers[name]
