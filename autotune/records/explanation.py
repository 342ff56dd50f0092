"""Where a config's memory and time go, and what would change it: plain data, and its modules folded for a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.records.config import Choice
from autotune.records.device import NO_COMMUNICATORS, Communicators
from autotune.records.formats import Record
from autotune.records.outcome import Outcome

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "batch")
FORWARD, BACKWARD, STEP = PHASES = ("forward", "backward", "step")
# What runs outside of every layer has a name in brackets: the model's own code between layers (also all modules together
# where none is known), what comes before its first layer, what comes after its last one, and the update.
MODEL, BATCH, LOSS, UPDATE = "(model)", "(batch)", "(loss)", "(optimizer)"
ALIKE = 0.2  # the figures of equal blocks may differ by this share


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """What one module holds at the moment of the peak, and its work in one micro batch.

    Attributes:
        name: the qualified name. Submodules are counted apart. A name in brackets stands for code outside of every layer.
        held_bytes: kind -> bytes of the storages made while the module ran, forward or backward; parameters, their gradients
            and their optimizer state count for the module that owns them.
        flops: phase -> FLOPs of matrix products and convolutions; recomputed blocks count as backward.
        moved_bytes: phase -> bytes that its operators read and write, as if there were no caches.
    """

    name: str
    held_bytes: dict[str, int]
    flops: dict[str, float]
    moved_bytes: dict[str, float]

    @property
    def total_bytes(self) -> int:
        """The sum over all kinds."""
        return sum(self.held_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The storages alive at one moment of a step: their bytes in the order of `KINDS`."""

    phase: str
    held_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Anatomy(Record):
    """The memory of two optimizer steps of one config, traced without running them.

    Attributes:
        peak_bytes: the largest sum of living storages: what `torch.cuda.max_memory_allocated` returns on a GPU.
        reserved_bytes: what CUDA's caching allocator has taken from the card by then, simulated; on a CPU `peak_bytes`.
        phase: the phase in which the peak falls; `module`: the module whose code ran then.
        last_layer: the module that ran last before the loss; empty where it is not known.
        modules: everything that lives at the peak, largest first. Their bytes add up to the peak.
        timeline: some moments of the step that holds the peak, the peak among them.
        wire_bytes: collective -> bytes of an optimizer step that go over the wire, as in `Work`; empty where one process trains.
    """

    peak_bytes: int
    reserved_bytes: int
    phase: str
    module: str
    last_layer: str
    modules: tuple[ModuleMemory, ...]
    timeline: tuple[Moment, ...] = ()
    wire_bytes: dict[str, float] = field(default_factory=dict)

    def kinds(self) -> dict[str, int]:
        """Kind -> bytes at the peak, in the order of `KINDS`."""
        return {kind: sum(module.held_bytes.get(kind, 0) for module in self.modules) for kind in KINDS}

    def work(self, accumulation_steps: int) -> tuple[float, float]:
        """The FLOPs of an optimizer step, and the bytes that it moves."""
        times = {FORWARD: accumulation_steps, BACKWARD: accumulation_steps, STEP: 1}
        flops, moved = (
            sum(times[phase] * value for module in work for phase, value in module.items())
            for work in ([m.flops for m in self.modules], [m.moved_bytes for m in self.modules])
        )
        return flops, moved


@dataclass(frozen=True, kw_only=True)
class ModuleTimes(Record):
    """Where the time of a micro batch goes, and the allocator's real peak: measured with hooks, which cost time themselves.

    Attributes:
        seconds: module -> phase -> seconds of one micro batch, the mean of a few; submodules are counted apart.
        allocated_bytes: the largest sum of living tensors over two optimizer steps.
    """

    seconds: dict[str, dict[str, float]]
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change of the config, and what tracing it predicts.

    Attributes:
        choices: the choices that differ from the config's.
        label: the same in words.
        saves_bytes: by how much the allocator's peak falls.
        flops_ratio, moved_ratio: FLOPs and bytes moved by a step, each over the config's; above 1 the change costs time.
        included: whether a search tries it without being asked.
        changes_learning: whether it trains something else than the config does.
        note: what to know before using it.
    """

    choices: dict[str, Choice]
    label: str
    saves_bytes: int
    flops_ratio: float
    moved_ratio: float
    included: bool
    changes_learning: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A large part of the memory, and the advice that saves most of it without changing what is learned.

    Attributes:
        part: what it is, in words, as a plural.
        held_bytes: bytes of this part at the peak; `share`: the same as a share of the peak.
        remedy: label of an advice, empty where none saves much of this part; `saves_bytes`: what it saves of the whole peak.
    """

    part: str
    held_bytes: int
    share: float
    remedy: str = ""
    saves_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Explanation(Record):
    """What `explain` answers.

    Attributes:
        task, device: their names; `on_gpu`: whether the device is a GPU.
        config: the config that is explained.
        memory: its traced memory; None where it cannot be traced, and then `untraced` says why.
        outside_bytes: what a process holds outside the allocator before it trains: that before the model is built, and
            `num_communicators` of the library of collectives, of which `communicators` tells what is known.
        probe: a short real run; None without a device. `times`: measured in a further run; where there are none, `untimed`
            says why.
        advice: largest saving first. `no_gain`: changes that were traced and save nothing. `not_predicted`: choice -> why.
        remarks: largest part first.
    """

    task: str
    device: str
    on_gpu: bool
    config: dict[str, Choice]
    memory: Anatomy | None
    untraced: str
    outside_bytes: int
    probe: Outcome | None
    times: ModuleTimes | None
    untimed: str
    advice: tuple[Advice, ...] = ()
    no_gain: tuple[str, ...] = ()
    not_predicted: dict[str, str] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    num_communicators: int = 0
    communicators: Communicators = NO_COMMUNICATORS
    trace_s: float = 0.0
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON-ready data, together with the sums that a reader looks for first."""
        sums = {"kinds": self.memory.kinds()} if self.memory is not None else {}
        return {**super().to_dict(), **sums, "beside_bytes": self.beside_bytes}

    @property
    def beside_bytes(self) -> int:
        """What the process holds beside the tensors at its peak: libraries, the allocator's remains, a CUDA context."""
        measured = self.probe.measurement if self.probe is not None else None
        if measured is not None:
            known = self.times.allocated_bytes if self.times is not None else self.memory and self.memory.peak_bytes
            return max(0, measured.peak_bytes - (known or 0))
        allocator = self.memory.reserved_bytes - self.memory.peak_bytes if self.memory is not None else 0
        return self.outside_bytes + allocator


@dataclass(frozen=True)
class Fold:
    """Some equal blocks, or one module.

    Attributes:
        label: `blocks.0-5`, `head`.
        block: the name of the first block, `blocks.0`.
        blocks: for each block the names of its modules; the block itself, if it is one of them, comes first.
    """

    label: str
    block: str
    blocks: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of all modules in it."""
        return frozenset(name for block in self.blocks for name in block)


def fold_repeats(figures: Mapping[str, float]) -> list[Fold]:
    """Fold modules into blocks by the first number in their names, in the order of the names.

    Consecutive equal blocks make one fold. A block without an equal neighbour is folded by the next number instead, where
    that finds equal blocks inside it.

    Args:
        figures: qualified name -> its figure. Blocks whose sums differ by more than `ALIKE` stay apart.
    """
    return list(_fold_run(figures, 0))


def _fold_run(figures: Mapping[str, float], depth: int) -> Iterator[Fold]:
    blocks: dict[str, list[str]] = {}
    for name in figures:
        blocks.setdefault(_block(name, depth), []).append(name)
    folds: list[list[str]] = []
    for block in sorted(blocks, key=lambda block: (_stem(block), _number(block))):
        if folds and _are_alike(folds[-1][-1], block, blocks, figures):
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
    """A name up to its number at `depth`, counted from 0: `transformer.h.0` of `transformer.h.0.attn`. All of it without such a number."""
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[depth] + 1]) if len(numbered) > depth else name


def _stem(block: str) -> str:
    return block.rpartition(".")[0] if _number(block) >= 0 else block


def _number(block: str) -> int:
    last = block.rpartition(".")[2]
    return int(last) if last.isdigit() else -1


def _are_alike(one: str, other: str, blocks: Mapping[str, list[str]], figures: Mapping[str, float]) -> bool:
    if _number(one) < 0 or _number(other) != _number(one) + 1 or _stem(one) != _stem(other):
        return False
    inside = [{name.removeprefix(block) for name in blocks[block]} for block in (one, other)]
    totals = [sum(figures[name] for name in blocks[block]) for block in (one, other)]
    return inside[0] == inside[1] and abs(totals[0] - totals[1]) <= ALIKE * max(totals)


def _label(fold: list[str]) -> str:
    return fold[0] if len(fold) == 1 else f"{fold[0]}-{_number(fold[-1])}"
