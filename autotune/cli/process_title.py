"""What `ps` shows of this process: anybody on the machine may read it, so passwords in it are written over, as database clients do."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

STAT = Path("/proc/self/stat")
ARG_START, ARG_END = 48, 49  # fields of it, counted from 1: where the arguments lie in memory (proc_pid_stat(5))

_URL = re.compile(r"[\w+.-]+://\S+")
_IN_QUERY = re.compile(r"[?&](?:ssl)?password=([^&#]+)")


def hide_passwords(arguments: Iterable[str]) -> None:
    """Write over the passwords of storage URLs among the arguments, in the kernel's view of them alone. Linux only."""
    found = [secret for argument in arguments for secret in _secrets(argument)]
    if not found:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        # the second field, the program's name, may hold spaces
        fields = STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = (int(fields[number - 3]) for number in (ARG_START, ARG_END))
        shown = ctypes.string_at(start, end - start) if start else b""
        for secret in found:
            place = shown.find(secret)
            while place >= 0:
                ctypes.memset(start + place, ord("*"), len(secret))
                place = shown.find(secret, place + len(secret))


def _secrets(argument: str) -> list[bytes]:
    """The passwords in an argument, as they are written there."""
    written: list[str | None] = []
    for url in _URL.findall(argument):
        with contextlib.suppress(ValueError):  # no URL after all
            written += [urlsplit(url).password, *_IN_QUERY.findall(url)]
    return [text.encode(errors="surrogateescape") for text in written if text]
