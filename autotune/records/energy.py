"""The energy of a config: what the counters of its devices told while it was timed, and the joules of a sample that follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.records.formats import Record

OTHERS = 0.1  # share of the work that others may do: they make the energy at most as much too high
ONE_COUNTED = "of a command's processes only the first one's energy is counted; search a MODEL on several devices"


@dataclass(frozen=True, kw_only=True)
class Counted(Record):
    """What one counter told in one process.

    Attributes:
        counter: its name. Several devices may share a counter, as a CPU's processes do.
        power_w: mean power while the process was timed, whoever used it.
        own_work: share of the work there that was this process's.
    """

    counter: str
    power_w: float
    own_work: float = 1.0


def power_w(counted: Iterable[Counted]) -> tuple[float | None, str]:
    """The power of all devices that train together, each counter once, and why it is not known, else an empty text.

    It is not known where others worked there, too: the counters do not tell whose energy it was.

    Args:
        counted: of all processes that train together; a counter that they share comes once from each.
    """
    by_counter: dict[str, list[Counted]] = {}
    for one in counted:
        by_counter.setdefault(one.counter, []).append(one)
    others = 1 - min((sum(one.own_work for one in same) for same in by_counter.values()), default=1.0)
    if others > OTHERS:
        quiet = "measure it on a machine that has nothing else to do"
        return None, f"others did {others:.0%} of the work that the counter of energy counts; {quiet}"
    if not by_counter:
        return None, ""
    return sum(sum(one.power_w for one in same) / len(same) for same in by_counter.values()), ""
