"""Which slots this machine has: places where probes run at once, each with its device, processors and share of the host.

Probes of one study are compared with each other, so slots are alike: devices of one kind, and as many processors for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.devices import available, capabilities_of, device_named, nvml, open_device
from autotune.devices.linux import cores
from autotune.errors import DeviceError
from autotune.records.device import DeviceInfo
from autotune.units import format_bytes, plural

NEARLY_FREE = 0.9  # of the most memory that is free on a device of the kind: all slots share the limit of the fullest


@dataclass(frozen=True, kw_only=True)
class SlotResources:
    """What belongs to one slot.

    Attributes:
        name: unique among the slots: that of its GPU, `cuda:1`, or `cpu:0`, `cpu:1` for parts of the CPU.
        device: the name of its device.
        processors: numbers of those that its processes run on, data-loading workers included; on the device's NUMA node.
        num_sharing: slots that share the host's memory, this one included.
    """

    name: str
    device: str
    processors: frozenset[int]
    num_sharing: int


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots to use, and which devices are left out, and why, in words."""

    slots: tuple[SlotResources, ...]
    notes: tuple[str, ...] = ()


def find_slots(asked: str, device: str = "auto", *, memory_limit_bytes: int | None = None) -> Slots:
    """The slots of this machine.

    Devices of another kind than most, or than `device` where that names one, are left out, and so is one whose memory others hold,
    or that the driver has lost.

    Args:
        asked: how many, or `all`, or their devices: `cuda:0,1`, or `cpu:2` for two parts of the CPU.
        device: as `open_device` takes it: what a number counts, and the kind that is used.
        memory_limit_bytes: what a probe may take; None for all that is free.

    Raises:
        DeviceError: the text names no slots, there are not so many, or no device has the memory.
    """
    named = re.fullmatch(r"(?:(cpu|cuda):(?=\d)|(?=\d+\Z))(\d+(?:,\d+)*)|all", asked)
    if named is None:
        raise DeviceError(f"{asked!r} names no slots; expected a number, all, cuda:0,1 or cpu:2")
    kind, numbers = named[1] or open_device(device).kind, named[2]
    if named[1] and device.partition(":")[0] not in ("auto", kind):
        raise DeviceError(f"--slots {asked} and --device {device} contradict each other; leave one of them out")
    if not capabilities_of(kind).own_processors:
        return _parts_of_cpu(asked, numbers)
    if named[1]:
        gpus, lost = [open_device(f"{kind}:{index}") for index in numbers.split(",")], []
    else:
        open_device(kind)  # says why, where torch cannot use it
        found = [gpu for gpu in available() if gpu.kind == kind]
        lost = [gpu.name for gpu in found if gpu.is_lost()]
        gpus = [gpu for gpu in found if gpu.name not in lost]
    infos = {gpu.name: gpu.info() for gpu in gpus}
    most = int(numbers) if numbers is not None and not named[1] else len(infos)
    fewer = nvml.why_fewer_gpus()
    if len(infos) < len(gpus) or not 0 < most <= len(infos):
        raise DeviceError(
            f"--slots {asked}: expected different GPUs, or a number from 1 to {len(infos)}: each slot has a GPU of its own"
            f"{fewer and f', and {fewer}'}"
        )
    used, notes = _alike(infos, device)
    used, full = _with_memory(used, memory_limit_bytes)
    gone = [f"{name} is no slot: it has fallen off the bus, as the driver says" for name in lost]
    hidden = [f"not every GPU has a slot: {fewer}"] if fewer and numbers is None else []
    return Slots(slots=_on_gpus([*used][:most]), notes=(*gone, *hidden, *notes, *full))


def _parts_of_cpu(asked: str, numbers: str | None) -> Slots:
    """Parts of the CPU with as many cores each."""
    whole = cores(device_named("cpu").near_processors())
    if numbers is None or not numbers.isdigit() or int(numbers) == 0:
        raise DeviceError(f"--slots {asked} names no parts of the CPU; say how many: --slots cpu:{max(1, len(whole))}")
    number = int(numbers)
    if number > len(whole):
        raise DeviceError(
            f"--slots {asked}: each slot needs a core, and this process may use {plural(len(whole), 'core')}; "
            f"expected at most {len(whole)}"
        )
    each = len(whole) // number
    notes = (
        ()
        if number == 1
        else (
            f"each of the {number} slots trains on {each} of {plural(len(whole), 'core')}, and the answer is for as many: run it with "
            f"OMP_NUM_THREADS={each}",
        )
    )
    slots = (
        SlotResources(name=f"cpu:{index}", device="cpu", processors=processors, num_sharing=number)
        for index, processors in enumerate(shares_of(whole, number))
    )
    return Slots(slots=tuple(slots), notes=notes)


def shares_of(whole: Sequence[tuple[int, ...]], number: int) -> list[frozenset[int]]:
    """As many equal, disjoint shares of cores, neighbours together; all of them for each where there are fewer cores than shares."""
    each = len(whole) // number
    parts = [whole[index * each : (index + 1) * each] for index in range(number)] if each else [whole] * number
    return [frozenset(processor for core in part for processor in core) for part in parts]


def _alike(infos: dict[str, DeviceInfo], device: str) -> tuple[dict[str, DeviceInfo], list[str]]:
    """The devices of the kind that was asked for, or that most of them are of; of two equally frequent kinds the first."""
    models = Counter(_model(info) for info in infos.values())
    asked = device_named(device).info() if ":" in device else None
    model = _model(asked) if asked is not None else max(models, key=lambda one: models[one])
    used = {name: info for name, info in infos.items() if _model(info) == model}
    if not used:
        raise DeviceError(
            f"no slot is of the kind of {device} ({model}); name others by --slots, or leave --device out"
        )
    others = [name for name in infos if name not in used]
    if not others:
        return used, []
    named = ", ".join(f"{name} ({infos[name].model})" for name in others)
    choose = (
        f"--device {others[0]} uses that kind" if asked is None else "measurements of unlike devices are not compared"
    )
    return used, [f"the slots are on {plural(len(used), model)}, and {named} left out; {choose}"]


def _model(info: DeviceInfo) -> str:
    return f"{info.model} of {format_bytes(info.total_bytes)}"


def _with_memory(
    infos: dict[str, DeviceInfo], memory_limit_bytes: int | None
) -> tuple[dict[str, DeviceInfo], list[str]]:
    """The devices whose memory is free, and why the others are left out."""
    most_bytes = max(info.free_bytes for info in infos.values())
    needed_bytes = NEARLY_FREE * most_bytes if memory_limit_bytes is None else memory_limit_bytes
    used = {name: info for name, info in infos.items() if info.free_bytes >= needed_bytes}
    if not used:
        raise DeviceError(
            f"no slot has the {format_bytes(int(needed_bytes))} of --memory-limit free (the most is {format_bytes(most_bytes)}); "
            "give a lower one, or end what holds the memory"
        )
    return used, [
        f"{name} is no slot: {format_bytes(info.free_bytes)} of its {format_bytes(info.total_bytes)} are free, and a probe may take "
        f"{format_bytes(int(needed_bytes))}"
        for name, info in infos.items()
        if name not in used
    ]


def _on_gpus(names: Sequence[str]) -> tuple[SlotResources, ...]:
    """A slot on each GPU, with an equal share of the cores of the NUMA node that it has in common with others."""
    near = {name: frozenset(device_named(name).near_processors()) for name in names}
    sharing = Counter(near.values())
    whole = {processors: cores(processors) for processors in sharing}
    each = min(len(whole[processors]) // number for processors, number in sharing.items())
    waiting = {processors: shares_of(whole[processors], number) for processors, number in sharing.items()}
    slots = []
    for name in names:
        processors = waiting[near[name]].pop(0)
        if each:  # another node may have more cores for each of its GPUs
            processors = frozenset(number for core in cores(processors)[:each] for number in core)
        slots.append(SlotResources(name=name, device=name, processors=processors, num_sharing=len(names)))
    return tuple(slots)
