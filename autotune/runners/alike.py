"""Which of the slots that other machines offer a search may use: those like most. Measurements of unlike machines are not compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.devices import capabilities_of
from autotune.devices.slots import NEARLY_FREE
from autotune.records.device import DeviceInfo, same_memory
from autotune.runners.remote import Described
from autotune.units import format_bytes, plural
from autotune.version import __version__


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A slot of another machine.

    Attributes:
        num: slots that share the machine.
    """

    described: Described
    num: int

    def why_not(self, reference: DeviceInfo) -> str:
        """Why it is not used beside slots like `reference`, in words; empty where it is."""
        if self.described.autotune != __version__:
            return f"it has autotune {self.described.autotune}, and {__version__} is needed"
        if self.described.num_cores < self.num:
            return f"it has {plural(self.described.num_cores, 'core')} for {plural(self.num, 'slot')}"
        if unlike := differences(self.described.device, reference):
            return _left_out(unlike)
        return ""


def choose(offers: Sequence[Offer], here: DeviceInfo | None) -> tuple[DeviceInfo, list[str]]:
    """The device that most offers are like, with the most memory free of these, and why each offer is left out; empty where it is used.

    Args:
        offers: at least one.
        here: this machine's own device, which decides between two kinds of which there are as many; None where it has none.
    """
    infos = [offer.described.device for offer in offers]

    def rank(info: DeviceInfo) -> tuple[int, bool, int]:
        is_like_here = here is not None and not differences(info, here)
        return sum(not differences(info, other) for other in infos), is_like_here, info.free_bytes

    reference = max(infos, key=rank)
    whys = [offer.why_not(reference) for offer in offers]
    if capabilities_of(reference.name).own_memory:
        for place, info in enumerate(infos):
            if not whys[place] and info.free_bytes < NEARLY_FREE * reference.free_bytes:
                whys[place] = _left_out(
                    f"{format_bytes(info.free_bytes)} of memory free, where another has {format_bytes(reference.free_bytes)}"
                )
    return reference, whys


def differences(one: DeviceInfo, other: DeviceInfo) -> str:
    """What one device has and another has not, in words, as far as measurements depend on it; empty where they are alike."""
    said = []
    if one.model != other.model:
        said.append(one.model)
    if not same_memory(one.total_bytes, other.total_bytes):
        said.append(f"{format_bytes(one.total_bytes)} of memory")
    if one.num_threads != other.num_threads:
        said.append(plural(one.num_threads, "thread"))
    if one.driver != other.driver:
        said.append(f"the driver {one.driver}")
    if one.torch_version != other.torch_version:
        said.append(f"torch {one.torch_version}")
    return " and ".join(said)


def _left_out(has: str) -> str:
    return f"it has {has}; measurements of unlike machines are not compared"
