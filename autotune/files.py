"""Files that several processes share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Replace a file in one go: whoever reads meanwhile gets all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def drop_oldest(files: Sequence[Path], most_files: int, most_bytes: int) -> None:
    """Delete the last of `files`, which come newest first, beyond so many and beyond so much in sum."""
    held_bytes = 0
    for place, file in enumerate(files):
        with contextlib.suppress(OSError):  # somebody else was quicker
            held_bytes += file.stat().st_size
            if place >= most_files or held_bytes > most_bytes:
                file.unlink()


def mend(path: Path) -> None:
    """Drop a last line that was cut short: what is appended next would go on in it. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_whole = file.read() in (b"\n", b"")
    if not is_whole:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
