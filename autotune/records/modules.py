"""Modules folded for a reader: a repeated block counts as one, and so do equal blocks beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

ALIKE = 0.2  # by which the figures of equal blocks may differ


@dataclass(frozen=True)
class Fold:
    """Some equal blocks, or one module.

    Attributes:
        label: `blocks.0-5`, `head`.
        block: the name of the first block, `blocks.0`.
        blocks: the names of each block's modules, the block's own, if it is there, first.
    """

    label: str
    block: str
    blocks: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of all modules in it."""
        return frozenset(name for block in self.blocks for name in block)


def fold_repeats(figures: Mapping[str, float]) -> list[Fold]:
    """Fold modules by the first number in their names, in the order of the names.

    A block without an equal beside it is taken apart by the next number where there are equal blocks in it.

    Args:
        figures: qualified name -> its figure. Blocks whose sums differ by more than `ALIKE` stay apart.
    """
    return list(_fold_run(figures, 0))


def _fold_run(figures: Mapping[str, float], depth: int) -> Iterator[Fold]:
    blocks: dict[str, list[str]] = {}
    for name in figures:
        blocks.setdefault(_block(name, depth), []).append(name)
    folds: list[list[str]] = []
    in_order = sorted(blocks, key=lambda block: (_stem(block), _number(block)))
    for block in in_order:
        last = folds[-1][-1] if folds else None
        if last is not None and _are_alike(last, block, blocks, lambda b: sum(figures[name] for name in blocks[b])):
            folds[-1].append(block)
        else:
            folds.append([block])
    for fold in folds:
        names = blocks[fold[0]]
        if len(fold) == 1 and len(names) > 1:
            inside = list(_fold_run({name: figures[name] for name in names}, depth + 1))
            if any(len(one.blocks) > 1 and one.blocks[0] != (one.block,) for one in inside):  # layers are no blocks
                yield from inside
                continue
        yield Fold(_label(fold), fold[0], tuple(tuple(sorted(blocks[block])) for block in fold))


def _block(name: str, depth: int) -> str:
    """`transformer.h.0` of `transformer.h.0.attn`, to the number after `depth` others; the name itself where there is none."""
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[depth] + 1]) if len(numbered) > depth else name


def _stem(block: str) -> str:
    return block.rpartition(".")[0] if _number(block) >= 0 else block


def _number(block: str) -> int:
    last = block.rpartition(".")[2]
    return int(last) if last.isdigit() else -1


def _are_alike(one: str, other: str, blocks: Mapping[str, list[str]], total: Callable[[str], float]) -> bool:
    if _number(one) < 0 or _number(other) != _number(one) + 1 or _stem(one) != _stem(other):
        return False
    inside = [{name.removeprefix(block) for name in blocks[block]} for block in (one, other)]
    return inside[0] == inside[1] and abs(total(one) - total(other)) <= ALIKE * max(total(one), total(other))


def _label(fold: list[str]) -> str:
    return fold[0] if len(fold) == 1 else f"{fold[0]}-{_number(fold[-1])}"
