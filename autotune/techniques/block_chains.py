"""The blocks of a model that can be recomputed: those that the task names, else the longest chain of repeated blocks, however nested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from autotune.lazy import torch
from autotune.techniques.base import UnsupportedError

if TYPE_CHECKING:
    from autotune.task import Task

# Blocks inside a chain's blocks are taken in their place when they hold nearly all of the chain's layers (as in the stages of a
# residual network): finer pieces keep fewer activations alive while one is recomputed. A mixture's experts hold a smaller share.
_NEARLY_ALL = 0.9
_AT_LEAST_HALF = 0.5  # a repeated chain with a smaller share of the layers loses to a mixed one
_EVERY_CHOICE_UP_TO = 8


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other.

    Attributes:
        blocks: in the order of the model.
        sequential: the `nn.Sequential` whose children are exactly `blocks`, which can be cut anywhere; None for a
            `ModuleList`, or for several containers with the same kind of block.
    """

    blocks: tuple[torch.nn.Module, ...]
    sequential: torch.nn.Sequential | None = None

    @property
    def larger(self) -> list[torch.nn.Module]:
        """The blocks that are more than a single layer."""
        return [block for block in self.blocks if not is_layer(block)]


def blocks_of(task: Task, model: torch.nn.Module) -> Chain:
    """The blocks that the task names, else those found in the model.

    Raises:
        UnsupportedError: there are no blocks, or those that the task names are not part of the model.
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
        found = [type(block).__name__ for block in blocks]
        raise UnsupportedError(
            f"checkpoint_blocks(model) returned {found}; expected modules of that model, at least one, such as list(model.blocks)"
        )
    return Chain(blocks)


def find_chain(model: torch.nn.Module) -> Chain | None:
    """The chain with the most layers, or None where the model has no container with two blocks worth recomputing.

    Every `Sequential` and `ModuleList` is a chain; those whose most frequent block is of the same class (the stages of
    a residual network, an encoder and a decoder) count as one. A chain with a repeated block is preferred to a mixed
    one around it. A chain is measured by its layers with parameters and not by its parameters: each such layer keeps its
    input for the backward pass, while most parameters lie where activations are small (the classifier of a VGG).
    """
    merged: dict[object, list[Chain]] = {}
    for chain in _chains(model):
        together = merged.setdefault(_repeated_kind(chain) or id(chain), [])
        inside = {module for outer in together for block in outer.blocks for module in block.modules()}
        if not inside.intersection(chain.blocks):
            together.append(chain)
    candidates = [chains[0] if len(chains) == 1 else _join(chains) for chains in merged.values()]
    candidates = [chain for chain in candidates if _is_worth_recomputing(chain)]
    repeated = [chain for chain in candidates if _repeated_kind(chain)]
    if _most_layers(repeated) > 0 and _most_layers(repeated) >= _AT_LEAST_HALF * _most_layers(candidates):
        candidates = repeated
    large = [chain for chain in candidates if _num_layers(chain) >= _NEARLY_ALL * _most_layers(candidates)]
    # among chains with nearly the same layers take the finest
    return max(large, key=lambda chain: (len(chain.blocks), _num_layers(chain)), default=None)


def _repeated_kind(chain: Chain) -> type[torch.nn.Module] | None:
    """The class that occurs most often among the blocks, single layers aside, if it occurs more than once."""
    kinds = Counter(map(type, chain.larger)).most_common(1)
    return kinds[0][0] if kinds and kinds[0][1] > 1 else None


def _chains(module: torch.nn.Module) -> Iterator[Chain]:
    """Every container with at least two blocks, outer ones first."""
    if _is_sequential(module) or isinstance(module, torch.nn.ModuleList):
        blocks = tuple(dict.fromkeys(_blocks(module)))
        if _is_sequential(module) and blocks == tuple(module.children()):
            chain = Chain(blocks, cast("torch.nn.Sequential", module))
        else:
            chain = _join([Chain(blocks)])
        if len(chain.blocks) > 1:
            yield chain
    for child in module.children():
        yield from _chains(child)


def _join(chains: list[Chain]) -> Chain:
    """One chain of all the blocks; single layers are left out, since alone they are not worth recomputing."""
    return Chain(tuple(block for chain in chains for block in chain.larger))


def _blocks(container: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The children of a container. Lists among them are flattened; a `Sequential` of several blocks is a chain of its own."""
    for child in container.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from _blocks(child)
        elif not (_is_sequential(child) and sum(not is_layer(block) for block in child.children()) > 1):
            yield child


def _is_sequential(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Sequential) and type(module).forward is torch.nn.Sequential.forward


def is_layer(module: torch.nn.Module) -> bool:
    """Whether it is one of torch's own layers, which keep their input and little else: to recompute one alone gains nothing."""
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, torch.nn.RNNBase)
    return own and next(module.children(), None) is None


def _is_worth_recomputing(chain: Chain) -> bool:
    # A scripted block has no forward that could be replaced.
    scripted = any(isinstance(block, torch.jit.ScriptModule) for block in chain.blocks)
    return len(chain.blocks) > 1 and _num_layers(chain) > 1 and not scripted


def _num_layers(chain: Chain) -> int:
    """Modules of the chain that own parameters."""
    return sum(bool(module._parameters) for block in chain.blocks for module in block.modules())


def _most_layers(chains: list[Chain]) -> int:
    return max(map(_num_layers, chains), default=0)


def numbers_up_to(num_blocks: int) -> list[int]:
    """1 to `num_blocks`; if there are more than 8, only 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and `num_blocks` itself."""
    if num_blocks <= _EVERY_CHOICE_UP_TO:
        return list(range(1, num_blocks + 1))
    choices, octave = {1, num_blocks}, 2
    while octave <= num_blocks:
        choices.update((octave, octave * 3 // 2))
        octave *= 2
    return sorted(choice for choice in choices if choice <= num_blocks)
