"""Activation checkpointing on an unmodified model: parts of it run again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Factor, Phase, Recomputation, Setting, Technique, UnsupportedError
from autotune.techniques.block_chains import Chain, find_chain, is_layer

if TYPE_CHECKING:
    import torch

    from autotune.session import Build
    from autotune.task import Task

_EVERY_CHOICE_UP_TO = 8

Place = tuple["torch.nn.Module", str]  # a buffer: the module and the buffer's name in it


class CheckpointSegments(Technique):
    """Non-reentrant `torch.utils.checkpoint` around segments of a `Sequential`, or around n of the L blocks of a list.

    Only the instances' `forward` is replaced: classes, parameter names and the state dict stay as they are.
    """

    name: ClassVar[str] = "checkpoint_segments"
    summary: ClassVar[str] = "parts of the model run again in the backward pass: far fewer activations, more computing"
    off: ClassVar[Choice] = 0
    phase: ClassVar[Phase] = Phase.MODEL
    ordered: ClassVar[bool] = True

    def support(self, setting: Setting) -> Support:
        """0 to the number of blocks, thinned when there are many."""
        try:
            chain = blocks_of(setting.task, setting.model)
        except UnsupportedError as error:
            return Support(choices=(0,), reason=str(error))
        if not _is_run(chain, setting):
            return Support(choices=(0,), reason="the model does not call its repeated blocks as modules")
        return Support(choices=(0, *thinned(len(chain.blocks))))

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks, and of the `Sequential` that holds them."""
        chain = blocks_of(build.task, build.model)
        num_segments, num_blocks = int(choice), len(chain.blocks)
        if num_segments > num_blocks:
            raise UnsupportedError(
                f"checkpoint_segments={num_segments}: the model has no more than {num_blocks} blocks"
            )
        _switch_off_caches(build.model)
        sequence = None
        if chain.sequential is not None:
            sequence = _Segments(chain.sequential, num_segments)
            chain.sequential.forward = sequence  # type: ignore[method-assign]
        for start, _ in _segments(chain, num_segments):
            block = chain.blocks[start]
            if not is_layer(block):
                block.forward = _Checkpointed(block, sequence)

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """The segments of the chain; None where the model has none."""
        try:
            chain = blocks_of(task, model)
        except UnsupportedError:
            return None
        return Recomputation(blocks=chain.blocks, segments=_segments(chain, int(choice)), each=len(chain.blocks))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A forward pass is about a third of a step, and is run again for the share of the model that is checkpointed."""
        share = int(choice) / max(int(other) for other in choices)
        again = Factor(typical=1 + 0.3 * share, spread=1.06 + 0.06 * share)
        return Expectation(compute=again, launch=again, activations=Factor(typical=1 - 0.6 * share, spread=1.3))

    def validate(self, choice: Any) -> Choice:
        """An integer of at least 0."""
        if type(choice) is not int or choice < 0:
            raise ValueError("expected a whole number of at least 0")
        return choice


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


class _Recomputed:
    """Calls a module's forward through `checkpoint` while it trains, and directly otherwise.

    An object, not a closure, so that a deep copy of the model (a moving average of it, say) refers to its own blocks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.original = vars(module).get("forward")  # a forward that the user replaced on this very instance
        self.constant: set[Place] = set()  # buffers that forward passes were seen to leave alone

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def checkpoint(self, modules: tuple[torch.nn.Module, ...], function: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            buffers = _Buffers(modules, self.constant)
            return buffers.recorded(), _EachTime(buffers.replayed)

        # Keyword arguments travel as positional ones: among those alone checkpoint looks for tensors, whose device's
        # random state it keeps.
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            positional = values[: len(values) - len(names)]
            return function(*positional, **dict(zip(names, values[len(positional) :], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)


class _Checkpointed(_Recomputed):
    """The forward of one block. Inside a segment of its `Sequential` the segment is recomputed, not the block."""

    def __init__(self, module: torch.nn.Module, segments: _Segments | None) -> None:
        super().__init__(module)
        self.segments = segments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_training(self.module) or (self.segments is not None and self.segments.running):
            return self.call(*args, **kwargs)
        return self.checkpoint((self.module,), self.call, *args, **kwargs)


class _Segments(_Recomputed):
    """The forward of a `Sequential`, cut into segments of nearly equal numbers of children.

    Models may also iterate over a `Sequential` and call its children themselves; then the children's own
    `_Checkpointed` takes effect.
    """

    def __init__(self, module: torch.nn.Sequential, num_segments: int) -> None:
        super().__init__(module)
        self.num_segments = num_segments
        self.running = False  # inside a segment, also when it is recomputed

    def __call__(self, input: Any) -> Any:  # named as in `nn.Sequential.forward`
        if not _is_training(self.module):
            return self.call(input)
        children = tuple(self.module.children())
        edges = [i * len(children) // self.num_segments for i in range(self.num_segments + 1)]
        value = input
        for start, end in itertools.pairwise(edges):
            value = self.checkpoint(children[start:end], _Segment(self, children[start:end]), value)
        return value


class _Segment:
    def __init__(self, segments: _Segments, modules: tuple[torch.nn.Module, ...]) -> None:
        self.segments = segments
        self.modules = modules

    def __call__(self, value: Any) -> Any:
        before, self.segments.running = self.segments.running, True
        try:
            for module in self.modules:
                value = module(value)
        finally:
            self.segments.running = before
        return value


class _Buffers:
    """Lets a forward pass that is run twice change the buffers once.

    Running statistics of normalisation layers, the vectors of spectral norm, a codebook: the recomputation starts from
    the values that the first pass started from, so that it computes the same, and its changes are thrown away. Without
    this BatchNorm's running statistics are updated twice and gradients do not show it (pytorch issue 96136).
    """

    def __init__(self, modules: tuple[torch.nn.Module, ...], constant: set[Place]) -> None:
        self.places = [
            (m, name) for root in modules for m in root.modules() for name, b in m._buffers.items() if b is not None
        ]
        self.constant = constant
        self.before: dict[Place, torch.Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the first pass: remember the buffers that it changes. Known constants (masks) are not copied."""
        originals = [
            (place, buffer, buffer._version) for place in self.places if (buffer := _buffer(place)) is not None
        ]
        copies = {place: buffer.detach().clone() for place, buffer, _ in originals if place not in self.constant}
        try:
            yield
        finally:
            for place, buffer, version in originals:
                if _buffer(place) is buffer and buffer._version == version and not _may_be_statistics(buffer):
                    self.constant.add(place)
                else:
                    self.constant.discard(place)
                    self.before[place] = copies.get(place, buffer)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Around the recomputation: the remembered values stand in, and the present ones come back afterwards."""
        present = {place: _buffer(place) for place in self.before}
        for (module, name), value in self.before.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in present.items():
                module._buffers[name] = buffer


class _EachTime(AbstractContextManager[None]):
    """Makes a new context whenever it is entered: checkpoint has one object for all recomputations of a forward pass.

    There are several where the loss takes derivatives itself, before the backward pass.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(self, *exception: Any) -> None:
        self._entered.close()


def _may_be_statistics(buffer: torch.Tensor) -> bool:
    """Batch normalisation writes its running statistics without counting up their version."""
    return buffer.dim() == 1 and buffer.is_floating_point()


def _buffer(place: Place) -> torch.Tensor | None:
    module, name = place
    return module._buffers[name]


def _is_training(module: torch.nn.Module) -> bool:
    import torch

    return module.training and torch.is_grad_enabled()


def _switch_off_caches(model: torch.nn.Module) -> None:
    """Key-value caches of Hugging Face models would be appended to a second time; training does not read them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _is_run(chain: Chain, setting: Setting) -> bool:
    """Whether a forward pass calls what would be checkpointed."""
    calls: list[None] = []
    called = [block for block in chain.blocks if not is_layer(block)] + ([chain.sequential] if chain.sequential else [])
    hooks = [module.register_forward_pre_hook(lambda *_: calls.append(None)) for module in called]
    try:
        setting.task.loss(setting.model, setting.fresh_batch())
    finally:
        for hook in hooks:
            hook.remove()
    return bool(calls)
