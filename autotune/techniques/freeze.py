"""Which part of the model is not trained."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Setting, Support, UnsupportedError
from autotune.techniques.base import Partition
from autotune.techniques.block_chains import blocks_of
from autotune.techniques.frameworks import At, Lines, words
from autotune.units import plural

if TYPE_CHECKING:
    from autotune.task import Task

_BLOCKS = re.compile(r"blocks:([1-9]\d*)")
_PARTS = 4  # the chain of blocks is offered in so many parts where the task names none: each ranking takes a search


class _LinesForNames(Lines):
    """Lines for choices that name parts of the model; `blocks:N` has none, since only the model tells which blocks are first."""

    def write(self, choice: Choice) -> dict[str, Any] | None:
        return None if _BLOCKS.search(str(choice)) else super().write(choice)


class Freeze(Partition):
    """`requires_grad_(False)` on a part of the model when it is built, and nothing else.

    A frozen parameter gets no gradient, and so no optimizer state: an optimizer over all parameters skips those without a
    gradient. Modes stay as they are: frozen dropout drops, and frozen batch normalisation uses the statistics of the batch and
    goes on updating its running ones. A parameter that is shared with a module outside the part goes on being trained.

    A choice is the name of a module or parameter, or several names joined by `+`. `blocks:3` stands for the first three
    blocks of the model's chain and what the model registers before them (an embedding, a stem).
    """

    name = "freeze"
    summary = (
        "a part of the model is not trained, and has no gradients and no optimizer state: one ranking for each choice"
    )
    listed_choices = "`none`, the names in `FREEZE`, else `blocks:N`: the first N blocks"
    applies = "if included: named modules, or a chain of blocks"
    order = 20
    frameworks = words(torch=_LinesForNames({At.MODEL: "freeze(model, {choice})"}))

    def label(self, choice: Choice) -> str:
        blocks = _BLOCKS.fullmatch(str(choice))
        what = plural(int(blocks[1]), "block") if blocks else "nothing" if choice == self.off else choice
        return f"{what} frozen"

    def support(self, setting: Setting) -> Support:
        """The parts that the task names, else up to four leading parts of the model's chain of blocks."""
        own = setting.baseline[self.name]
        offered: list[Choice] = [self.off]
        refused = []
        try:
            for choice in setting.task.freeze or _leading_parts(setting):
                frozen = {id(parameter) for parameter in _frozen(setting.task, setting.model, choice)}
                if all(id(parameter) in frozen for parameter in setting.model.parameters()):
                    refused.append(f"{choice} leaves nothing to train")
                else:
                    offered.append(choice)
        except (ConfigError, UnsupportedError) as error:
            refused.append(str(error))
        return Support(
            choices=(own,),
            optional=tuple(choice for choice in offered if choice != own),
            reason="; ".join(refused or ["what is learned changes, so each choice is ranked by itself"]),
            note="it changes what is learned: compare validation results before you use it",
        )

    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task whose models are built with the part frozen."""
        build_model = task.build_model

        def build_frozen(*variant: str) -> torch.nn.Module:
            model = build_model(*variant)
            if isinstance(model, torch.nn.Module):  # the task refuses anything else
                for parameter in _frozen(task, model, str(choice)):
                    parameter.requires_grad_(False)
            return model

        return task.with_other_models(build_model=build_frozen)


def _frozen(task: Task, model: torch.nn.Module, choice: str) -> list[torch.nn.Parameter]:
    """The parameters that a choice freezes.

    Raises:
        ConfigError: the model has no part of that name.
        UnsupportedError: the model has no chain of blocks.
    """
    names: list[str] = []
    for part in choice.split("+"):
        blocks = _BLOCKS.fullmatch(part)
        found = _first_blocks(task, model, int(blocks[1])) if blocks else [part]
        is_inside = _inside(found)
        if not any(is_inside(name) for name, _ in model.named_parameters(remove_duplicate=False)):
            near = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(f"freeze={choice}: the model has no parameter in {part!r}; expected a part of: {near}")
        names += found
    return _only_in(model, names)


def freeze(model: torch.nn.Module, choice: str) -> None:
    """Freeze parts of a model, by their names joined by `+`."""
    for parameter in _only_in(model, choice.split("+")):
        parameter.requires_grad_(False)


def _only_in(model: torch.nn.Module, names: Sequence[str]) -> list[torch.nn.Parameter]:
    """The parameters of some parts of a model, without those shared with modules outside these parts."""
    parameters = list(model.named_parameters(remove_duplicate=False))  # a shared parameter under each of its names
    is_inside = _inside(names)
    shared = {id(parameter) for name, parameter in parameters if not is_inside(name)}
    return [parameter for name, parameter in parameters if is_inside(name) and id(parameter) not in shared]


def _inside(names: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(f"{name}.".startswith(f"{prefix}.") for prefix in names)


def _first_blocks(task: Task, model: torch.nn.Module, num_blocks: int) -> list[str]:
    """Names of the first blocks, and of the parameters that are registered before them."""
    blocks = blocks_of(task, model).blocks
    if num_blocks > len(blocks):
        raise ConfigError(
            f"freeze=blocks:{num_blocks}: the model has {plural(len(blocks), 'block')}; choose at most as many"
        )
    before = itertools.takewhile(lambda named: named[1] is not blocks[0], model.named_modules())
    own = [f"{name}.{parameter}" if name else parameter for name, module in before for parameter in module._parameters]
    leading = {id(block) for block in blocks[:num_blocks]}
    return [*own, *(name for name, m in model.named_modules(remove_duplicate=False) if id(m) in leading)]


def _leading_parts(setting: Setting) -> Sequence[str]:
    """Up to four leading parts of the chain of blocks.

    Raises:
        UnsupportedError: there is no chain, or a module that is registered before it runs after its first block.
    """
    blocks = blocks_of(setting.task, setting.model).blocks
    before = list(itertools.takewhile(lambda module: module is not blocks[0], setting.model.modules()))
    owners = [m for m in before if m._parameters and m is not setting.model]  # the model itself runs around all others
    if blocks[0] not in (ran := setting.run_order([*owners, blocks[0]])):
        raise UnsupportedError("the model does not call its blocks as modules; FREEZE can name parts of it")
    if late := [module for module in ran[ran.index(blocks[0]) :] if module in owners]:
        name = next(name for name, module in setting.model.named_modules() if module is late[0])
        raise UnsupportedError(
            f"{name} is registered before the blocks but runs after them; FREEZE can name the parts to freeze"
        )
    numbers = sorted({-(-len(blocks) * part // _PARTS) for part in range(1, _PARTS + 1)})
    return [f"blocks:{number}" for number in numbers]
