"""What probes have compiled, kept beside the study: the next process takes it from there in seconds.

A process that is killed while it compiles leaves half a library under its final name, which torch would load ever after. So
each works in a view of its own, and what it made is kept once it has ended well. Views are hard links: no bytes are copied. A
search holds a lock beside each view that it uses, since process numbers mean nothing to another container or host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import filelock

from autotune.files import drop_oldest

MOST_FILES, MOST_BYTES = 20_000, 2**30  # that are kept: the oldest go
KEPT = "kept"  # folder in a cache
_VIEW = "view-"
_PASSING = (".lock", ".tmp", ".part")  # suffixes of what nobody needs later


class CompileCache:
    """A folder of compiled code in the form of torch's inductor (`TORCHINDUCTOR_CACHE_DIR`).

    Attributes:
        folder: an absolute path; it is made when the first view is opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._kept = self.folder / KEPT
        self._locks: dict[Path, filelock.BaseFileLock] = {}  # of the open views

    def open(self) -> Path:
        """A view of all that is kept, for one process to work in. Raises OSError."""
        self._kept.mkdir(parents=True, exist_ok=True)
        for view in self.folder.glob(f"{_VIEW}*/"):
            with contextlib.suppress(filelock.Timeout), _lock_of(view):  # of a search that was killed
                _delete(view)
        view = self.folder / f"{_VIEW}{uuid.uuid4().hex}"
        self._locks[view] = _lock_of(view)
        self._locks[view].acquire()
        view.mkdir()
        for file in _files(self._kept):
            _link(file, view / file.relative_to(self._kept))
        return view

    def close(self, view: Path, *, keep: bool) -> None:
        """Delete a view. What is new in it is kept if its process ended well, and the oldest beyond the bounds is not."""
        if keep:
            for file in _files(view):
                _link(file, self._kept / file.relative_to(view))
            newest_first = sorted(_files(self._kept), key=_changed_s, reverse=True)
            drop_oldest(newest_first, MOST_FILES, MOST_BYTES)
        _delete(view)
        self._locks.pop(view).release()


def forget(folder: Path) -> None:
    """Delete a cache, or a folder of caches, unless a process works in one of them."""
    views = (view for below in ("", "*/") for view in folder.glob(f"{below}{_VIEW}*/"))
    if not any(map(_is_open, views)):
        shutil.rmtree(folder, ignore_errors=True)


def _is_open(view: Path) -> bool:
    try:
        with _lock_of(view):
            return False
    except OSError:  # a time-out among them
        return True


def _lock_of(view: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(f"{view}.lock", timeout=0, thread_local=False)


def _delete(view: Path) -> None:
    shutil.rmtree(view, ignore_errors=True)
    Path(f"{view}.lock").unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if not name.endswith(_PASSING))


def _link(file: Path, as_file: Path) -> None:
    """Let a file appear elsewhere in one go; what is there stays. What cannot be linked or copied is compiled again."""
    with contextlib.suppress(OSError):
        as_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, as_file)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            part = as_file.with_name(f"{as_file.name}.{os.getpid()}.part")
            shutil.copy2(file, part)
            part.rename(as_file)


def _changed_s(file: Path) -> float:
    with contextlib.suppress(OSError):  # somebody else dropped it
        return file.stat().st_mtime
    return 0.0
