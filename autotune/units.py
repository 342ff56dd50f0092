"""Quantities as people write them (`1500MiB`, `80%`, `2m`) and back."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z%]*)\s*")


def _split(text: str) -> tuple[float, str] | None:
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), match[2].lower()) if match else None


def parse_bytes(text: str, *, total_bytes: int | None = None) -> int:
    """Read a memory size: `12GiB`, `1500MiB`, a plain number of bytes, or `80%` of `total_bytes`.

    Raises:
        ValueError: `text` is not a size of at least one byte, or is a percentage where there is no total.
    """
    parts = _split(text)
    found = 0.0
    if parts and parts[1] == "%" and total_bytes is not None and parts[0] <= 100:
        found = total_bytes * parts[0] / 100
    elif parts and parts[1] in _BYTES:
        found = parts[0] * _BYTES[parts[1]]
    if 1 <= found < math.inf:
        return int(found)
    expected = "more than 0 bytes, such as 12GiB, 1500MiB" + ("" if total_bytes is None else " or 80%")
    raise ValueError(f"{text!r} is not a memory size; expected {expected}")


def parse_seconds(text: str) -> float:
    """Read a duration: `90`, `90s`, `5m`, `1.5h`, `200ms`.

    Raises:
        ValueError: `text` is not a positive duration.
    """
    parts = _split(text)
    if parts and parts[1] in _SECONDS and parts[0] > 0:
        return parts[0] * _SECONDS[parts[1]]
    raise ValueError(f"{text!r} is not a duration; expected more than 0 seconds, such as 90s, 5m or 1.5h")


def parse_fraction(text: str) -> float:
    """Read a share: `5%` or `0.05`.

    Raises:
        ValueError: `text` is not a share in [0, 1).
    """
    parts = _split(text)
    if parts and parts[1] in ("", "%"):
        value = parts[0] / 100 if parts[1] == "%" else parts[0]
        if value < 1:
            return value
    raise ValueError(f"{text!r} is not a share; expected a value such as 5% or 0.05, below 100%")


def plural(number: int, noun: str) -> str:
    """`1 probe`, `3 probes`, `1,200 configs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(num_bytes: float) -> str:
    """`1572864000` -> `1.46 GiB`: binary units, three significant figures."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def format_per_s(number: float, unit: str) -> str:
    """`1.05e11, "FLOP"` -> `105 GFLOP/s`: decimal units, three significant figures."""
    return f"{_decimal(number)}{unit}/s"


def format_count(number: int) -> str:
    """`124439808` -> `124 M`: decimal units, three significant figures."""
    return _decimal(number).rstrip()


def _decimal(number: float) -> str:
    number = float(f"{number:.3g}")  # rounded first: 999.7 M is 1 G
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def format_chance(chance: float) -> str:
    """`97%`; no chance is told as none or as certain."""
    return f"{min(max(chance, 0.01), 0.99):.0%}"


def format_exact_bytes(num_bytes: int) -> str:
    """`1610612736` -> `1536MiB`: the shortest text that means exactly so many bytes."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def format_exact_seconds(seconds: float) -> str:
    """`300` -> `5m`: the shortest text that means exactly so many seconds."""
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds!r}s" if seconds % 1 else f"{seconds:.0f}s"


def format_seconds(seconds: float) -> str:
    """`0.0123` -> `12.3 ms`, `75` -> `1m15s`."""
    rounded = float(f"{seconds:.3g}")
    if rounded < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if rounded < 1:
        return f"{seconds * 1e3:.3g} ms"
    if rounded < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
