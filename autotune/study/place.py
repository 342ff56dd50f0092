"""Where a study is kept, and which searches may write there: one of this machine at a time, or several where the storage lets them
share it; and only if their measurements are comparable.

Also tells whether the controller that owns a running trial is still alive: by its process on this machine, by its signs of life on
another.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import filelock
import psutil
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from autotune.devices.linux import PROC
from autotune.errors import StudyError
from autotune.records.config import Choice
from autotune.records.device import same_memory
from autotune.records.study import BegunTrial, Fingerprint, Owner, StudyFacts
from autotune.study.backends import shared_backend_of, ways_to_share
from autotune.study.backends.base import scheme_of, without_password
from autotune.techniques import Techniques
from autotune.units import format_bytes, format_exact_bytes

DEFAULT_FOLDER = "studies"
SQLITE_FILE = "sqlite:///"
ESCAPES = {ord(character): quote(character) for character in "%?{}"}
PLAY_OFF_OF = "play_off_of"  # attribute of the play-off's own study: the name of the search's study
BEAT_S = 30.0  # between two signs of life of a controller: each write takes a disk 20 ms
# so long after its last sign of life a controller on another machine counts as gone: 20 beats, since a write may wait for a busy
# database, and the clocks of two machines differ
GONE_AFTER_S = 600.0
TASK = "task"  # of a fingerprint: the hash of its source
MOST_SHOWN = 100  # characters of a value in a message
MEMORIES = {"memory_limit_bytes": "memory limit", "total_bytes": "memory of the device"}  # of a fingerprint, in words


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study is kept.

    Attributes:
        storage: a URL without a password, as it is shown and kept.
        url: the URL to open it with, which may hold a password.
        name: name of the study in which the task's own baseline is trained.
        file: the file of an SQLite database; None for other storages.
        trained: what is trained, where it differs from what the task's own baseline trains.
        beside: name of an earlier study of the task with another memory limit; empty where there is none.
    """

    storage: str
    name: str
    file: Path | None
    url: str = field(repr=False)
    trained: Mapping[str, Choice] = field(default_factory=dict)
    beside: str = ""

    @property
    def study(self) -> str:
        """Name of the study."""
        said = (f"{name}={choice}" for name, choice in self.trained.items())
        return " ".join([self.name, *said])

    @property
    def play_off(self) -> str:
        """Name of the separate study for the play-off; so the best trial of `study` is the best of the search."""
        return f"{self.study} play-off"

    def training(self, choices: Mapping[str, Choice], techniques: Techniques) -> Place:
        """The place, in the same storage, of a study that trains what `choices` say. Its measurements compare with no other study's.

        Args:
            choices: choices of techniques; those that do not say what is trained are ignored.
        """
        both = {**self.trained, **choices}
        return replace(self, trained={name: both[name] for name in techniques.trained({}) if name in both})

    def within(self, memory_limit_bytes: int) -> Place:
        """The place, in the same storage, of a further study with this memory limit instead."""
        name = f"{self.name} memory_limit={format_exact_bytes(memory_limit_bytes)}"
        return replace(self, name=name, beside=self.name)

    @property
    def logs(self) -> Path:
        """Folder for the output of the user's code, one file per probe; of searches that share a study, each has its own."""
        folder = self._beside.with_suffix(".logs")
        return folder / f"{socket.gethostname()}-{os.getpid()}" if self.is_shared else folder

    @property
    def compiled(self) -> Path:
        """Folder for what probes of this study compile. Studies of one file have one each, since a new study begins without one."""
        key = hashlib.sha256(self.study.encode()).hexdigest()[:16]
        return self._beside.with_suffix(".compiled") / key

    @property
    def _beside(self) -> Path:
        """The file of a database, or where it would be."""
        return self.file or Path(DEFAULT_FOLDER) / self.study

    @property
    def is_shared(self) -> bool:
        """Whether several searches may write to the study at once."""
        return shared_backend_of(self.url) is not None

    @property
    def note(self) -> str:
        """What the user should know of the kind of storage; empty for nothing."""
        backend = shared_backend_of(self.url)
        return backend.note if backend is not None else ""

    @property
    def lock(self) -> Path:
        """File that a search locks. With a database server that searches cannot share, it keeps apart only those of this machine."""
        if self.file is not None:
            return self.file.with_name(self.file.name + ".lock")
        name = hashlib.sha256(f"{self.storage} {self.study}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"autotune-{name}.lock"

    @property
    def folder(self) -> Path:
        """Folder of what several studies share."""
        return self.file.parent if self.file else Path(DEFAULT_FOLDER)


def place_of(storage: str | None, study: str | None, task: str, version: str = "") -> Place:
    """The place of a task's study: `studies/<task>.db` by default.

    Args:
        storage: a URL or a database file.
        version: tells the task from others of the same name; added to the study's name unless the user gives that.

    Raises:
        StudyError: the study's name is a path.
    """
    if study and storage is None and (Path(study).name != study or study.endswith(".db")):
        raise StudyError(
            f"study: {study!r} is a path; expected a name such as {Path(study).stem!r}, which is kept in "
            f"{DEFAULT_FOLDER}/{Path(study).stem}.db, or a file as --storage FILE"
        )
    name = study or " ".join(filter(None, (task, version)))
    if storage is None:
        storage = str(Path(DEFAULT_FOLDER) / f"{study or task}.db")
    if "://" not in storage:
        storage = url_of(Path(storage).absolute())
    return Place(storage=without_password(storage), name=name, file=file_of(storage), url=storage)


def file_of(url: str) -> Path | None:
    """The file of an SQLite database, whatever driver and options its URL names; None for what is in memory, and for other storages."""
    try:
        database = make_url(url).database if scheme_of(url) == "sqlite" else None
    except (ArgumentError, ValueError):  # whoever opens it says so
        return None
    return Path(database) if database and ":memory:" not in database else None


def url_of(file: Path) -> str:
    """The URL of an SQLite file. Characters that SQLAlchemy or Optuna would take for something else are escaped."""
    url = f"{SQLITE_FILE}{file}"
    is_plain = file_of(url) == file and not set("{}") & set(url)
    return url if is_plain else f"{SQLITE_FILE}{str(file).translate(ESCAPES)}"


def shown_of(url: str) -> str:
    """A storage as a command takes it: the file of an SQLite database, else the URL."""
    return str(file_of(url) or url)


@contextlib.contextmanager
def lock_study(place: Place) -> Iterator[None]:
    """Hold the study's lock: one search writes to a study at a time, unless its storage lets several share it.

    Raises:
        StudyError: another search holds it, or the file or its folder cannot be written.
    """
    if ":memory:" in place.storage or place.is_shared:  # nobody else's, or everybody's
        yield
        return
    lock, folder = filelock.FileLock(place.lock), place.lock.parent
    is_new = not folder.exists()
    where = place.file or f"{place.study} in {place.storage}"
    try:
        if place.file is not None and place.file.exists() and not os.access(place.file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place.file))
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StudyError(
            f"the study {where} is in use by another search (lock {place.lock.name}); wait for it to end, give this search a study of "
            f"its own with --study NAME (study=NAME in a script), or have several searches share a study elsewhere, with {ways_to_share()}"
        ) from None
    except OSError as error:
        raise StudyError(f"the storage {where} cannot be opened: {error}; choose another with --storage") from None
    try:
        yield
    finally:
        place.lock.unlink(missing_ok=True)  # while it is held: another search that opens this name now makes a new file
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # the folder is not empty where anything was kept
                folder.rmdir()


def this_process() -> Owner:
    """This process as a controller."""
    namespace = ""  # process numbers are unique only within a namespace, and containers may share a host's name
    with contextlib.suppress(OSError):
        namespace = os.readlink(PROC / "self/ns/pid")
    return Owner(host=f"{socket.gethostname()} {namespace}".strip(), pid=os.getpid(), started=_started(os.getpid()))


_numbers = itertools.count(1)  # of this process's searches
_begun: set[int] = set()  # those that have not ended


def begin_search() -> int:
    """The number of a search that begins in this process. What it runs counts as run until `end_search`."""
    number = next(_numbers)
    _begun.add(number)
    return number


def end_search(number: int) -> None:
    """Nobody runs any more what this search of the process has left running."""
    _begun.discard(number)


def is_gone(trial: BegunTrial, *, is_shared: bool = False, by_clock: bool = True) -> bool:
    """Whether a trial that is marked as running is no longer run by anybody.

    A trial of this very process is run as long as its search has not ended. In a study that is not shared it is from an earlier search,
    since a process runs one search of it at a time. A trial without an owner is from an older study; as this search holds the lock,
    nobody runs it.

    Args:
        is_shared: whether several searches write to the study, also of one process.
        by_clock: whether signs of life tell it of other machines' trials; else those count as run.
    """
    owner, here = trial.owner, this_process()
    if owner is None:
        return True
    if replace(owner, search=here.search) == here:
        return not (is_shared and owner.search in _begun)
    if owner.host == here.host:
        return _started(owner.pid) != owner.started
    return by_clock and time.time() - trial.seen_at_s > GONE_AFTER_S


def _started(pid: int) -> str:
    """When a process was started, by the kernel's count, which does not follow the clock; empty where the process has ended."""
    try:
        if not PROC.exists():
            return str(psutil.Process(pid).create_time())
        stat = (PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, psutil.Error):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    boot = ""
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return "" if state in "ZX" else f"{fields[18]} ticks after boot {boot}".strip()


def require_comparable(place: Place, stored: StudyFacts | None, early: Fingerprint) -> None:
    """Refuse a study that cannot be resumed, by the part of the fingerprint that is known at once.

    Raises:
        StudyError: the study has other values.
    """
    if stored is not None:
        known = vars(stored.fingerprint)
        in_both = {name: value for name, value in vars(early).items() if None not in (value, known[name])}
        require_equal(place, stored.fingerprint, replace(stored.fingerprint, **in_both))


def require_equal(place: Place, known: Fingerprint, wanted: Fingerprint) -> None:
    """Refuse a study with another fingerprint, and show what differs.

    Raises:
        StudyError: the study has other values.
    """
    was, now = _flat(known), _flat(wanted)
    differences = [
        _difference(key, was.get(key, ""), now.get(key, ""))  # a variable of the environment that is not set is empty
        for key in sorted({*was, *now}, key=lambda key: (key != TASK, key))
        if was.get(key) != now.get(key) and not (key == "total_bytes" and same_memory(was[key] or 0, now[key] or 0))
    ]
    if differences:
        raise StudyError(
            f"the study {place.study} in {place.storage} cannot be resumed, because new measurements would not be comparable with it: "
            f"{'; '.join(differences)}. Start another study with --study NAME (study=NAME in a script), which begins with what this one "
            "taught, or move the file away"
        )


def _flat(fingerprint: Fingerprint) -> dict[str, Any]:
    """Each value by its name, environment variables included."""
    found = vars(fingerprint)
    return {**{key: value for key, value in found.items() if key != "environment"}, **fingerprint.environment}


def _difference(key: str, before: Any, after: Any) -> str:
    if key == TASK and None not in (before, after):
        return "it is of another task, or of other code"
    if isinstance(before, tuple) and isinstance(after, tuple):
        lacks, has = [one for one in before if one not in after], [one for one in after if one not in before]
        if not lacks and not has:
            return f"{key} differ in order or number"
        if not lacks:
            return f"{key} now has {_shown(key, has)} too"
        if not has:
            return f"{key} no longer has {_shown(key, lacks)}"
        before, after = lacks, has
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        before, after = ({name: list(of.get(name, ())) for name in names} for of in (before, after))
    was, now = _shown(key, before), _shown(key, after)
    if was == now and key in MEMORIES:  # a few bytes apart
        was, now = f"{before} bytes", f"{after} bytes"
    return f"{MEMORIES.get(key, key)} was {was} and is {now}"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "none" if key == "global_batch" else "not recorded"  # by another version
    if key in MEMORIES:
        return format_bytes(value)
    shown = repr(list(value) if isinstance(value, tuple) else value)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
