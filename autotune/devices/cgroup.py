"""The memory and processor time that this process's control groups (v1 and v2) allow, and their count of OOM kills.

A limit may sit on any ancestor, so every directory from this process's group up to the mount is read. In a container
the path in `/proc/self/cgroup` may be the host's while only the container's part is mounted; then the mount itself is
the group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path("/")
_UNLIMITED = 2**62  # v1 writes the largest multiple of the page size for "no limit"


@dataclass(frozen=True)
class MemoryAllowance:
    """A group's memory limit and what is left of it. Reclaimable file cache counts as free."""

    limit_bytes: int
    free_bytes: int


def memory_allowance(root: Path = ROOT) -> MemoryAllowance | None:
    """The tightest memory limit and the smallest remainder over all groups; None without a limit."""
    limits: list[int] = []
    free: list[int] = []
    for directory, names in _directories(root, "memory", _V1_MEMORY, _V2_MEMORY):
        bounds = [value for name in names.limits if (value := _number(directory / name)) is not None]
        used = _number(directory / names.used)
        if not bounds or used is None or min(bounds) >= _UNLIMITED:
            continue
        statistics = _table(directory / "memory.stat")
        reclaimable = sum(statistics.get(name, 0) for name in names.reclaimable)
        limits.append(min(bounds))
        free.append(max(0, min(bounds) - max(0, used - reclaimable)))
    return MemoryAllowance(min(limits), min(free)) if limits else None


def num_processors(root: Path = ROOT) -> float | None:
    """Number of processors that the groups allow (`docker --cpus`); None without a quota."""
    quotas = []
    for directory, is_v2 in _directories(root, "cpu", False, True):
        if is_v2:
            quota, _, period = _text(directory / "cpu.max").partition(" ")
        else:
            quota, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # not "max" or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def num_oom_kills(root: Path = ROOT) -> int | None:
    """Number of processes in this group (v2: and below it) that the kernel's OOM killer has killed; None if not counted."""
    for directory, name in _directories(root, "memory", "memory.oom_control", "memory.events"):
        kills = _table(directory / name).get("oom_kill")
        if kills is not None:
            return kills
    return None


@dataclass(frozen=True)
class _MemoryFiles:
    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]  # keys of memory.stat, descendants included


_V1_MEMORY = _MemoryFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2_MEMORY = _MemoryFiles(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
)


def _directories(root: Path, controller: str, v1: T, v2: T) -> Iterator[tuple[Path, T]]:
    """This process's group and its ancestors, innermost first, in each hierarchy that may hold `controller`."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        for name in names.split(",") if names else (["v2"] if number == "0" else []):
            paths[name] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" and "v2" in paths:
            path, value = paths["v2"], v2
        elif kind == "cgroup" and controller in options.split(",") and controller in paths:
            path, value = paths[controller], v1
        else:
            continue
        mount_root, mount_point = (_unescape(field) for field in mount.split(" ")[3:5])
        top = root / mount_point.lstrip("/")
        below = os.path.relpath(path, mount_root)
        group = top if below.startswith("..") else top / below
        while True:
            yield group, value
            if group == top:
                break
            group = group.parent


def _unescape(field: str) -> str:
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, character)
    return field


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # no such controller, version or permission here
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
