"""The energy of this machine's processors and their memory, by the counters that Linux shows (RAPL; AMD's processors have it, too).

They count whole sockets, whoever computes on them. Since Linux 5.10 only root may read them
(https://docs.kernel.org/power/powercap/powercap.html; CVE-2020-8694).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autotune.devices import linux

FOLDER = Path("/sys/class/powercap")
_ZONES = "intel-rapl:*"  # what lies in `intel-rapl-mmio` counts the same energy once more


class EnergyWatch:
    """Counts joules from its creation on.

    Args:
        folder: where the kernel shows its zones; by default `FOLDER`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._zones = {zone.name: zone for zone in _zones(folder or FOLDER)}
        self._read_uj = {
            name: counted for name, zone in self._zones.items() if (counted := _counted_uj(zone)) is not None
        }
        self._used_uj = dict.fromkeys(self._read_uj, 0)

    def energy_j(self) -> dict[str, float]:
        """Joules so far by zone. A counter goes round after some minutes of hard work, so it has to be read once a minute or so."""
        for name, before_uj in self._read_uj.items():
            now_uj = _counted_uj(self._zones[name])
            if now_uj is None:  # it was taken away
                return {}
            if now_uj < before_uj:
                self._used_uj[name] += linux.read_number(self._zones[name] / "max_energy_range_uj") or 0
            self._used_uj[name] += now_uj - before_uj
            self._read_uj[name] = now_uj
        return {name: used_uj / 1e6 for name, used_uj in self._used_uj.items()}


def why_unreadable(folder: Path | None = None) -> str:
    """Why no energy can be read, and what would help; empty where it can."""
    zones = list(_zones(folder or FOLDER))
    if not zones:
        return (
            f"this machine shows no counter of its processors' energy (no {_ZONES} in {folder or FOLDER}), as most virtual machines "
            "do not; a machine of its own may"
        )
    if unreadable := [zone for zone in zones if _counted_uj(zone) is None]:
        return f"{unreadable[0]}/energy_uj may not be read; let root allow it: chmod a+r {folder or FOLDER}/{_ZONES}/energy_uj"
    return ""


def _zones(folder: Path) -> Iterator[Path]:
    """The zones that count the sockets and, beside them, memory. Others are parts of a socket, or the whole machine."""
    for zone in sorted(folder.glob(_ZONES)):
        if linux.read(zone / "name").startswith(("package", "dram")):
            yield zone


def _counted_uj(zone: Path) -> int | None:
    return linux.read_number(zone / "energy_uj")
