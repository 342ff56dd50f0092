"""Where a study is kept, and the lock that admits one search of this machine at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import filelock

from autotune.errors import StudyError
from autotune.records.config import Choice
from autotune.techniques import Techniques
from autotune.units import format_exact_bytes

DEFAULT_FOLDER = "studies"
PLAY_OFF_OF = "play_off_of"  # attribute of the play-off's own study: the name of its search's


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study is kept.

    Attributes:
        storage: a URL.
        name: of the study in which the task's own baseline is trained.
        file: of an SQLite database.
        trained: what is trained, as far as the task's own baseline does not train it.
        beside: name of the study that was there before, with another memory limit; empty where this is the first.
    """

    storage: str
    name: str
    file: Path | None
    trained: Mapping[str, Choice] = field(default_factory=dict)
    beside: str = ""

    @property
    def study(self) -> str:
        """Name of the study."""
        said = (f"{name}={choice}" for name, choice in self.trained.items())
        return " ".join([self.name, *said])

    @property
    def play_off(self) -> str:
        """Name of the study that keeps the play-off, so that the best trial of `study` is the best of the search."""
        return f"{self.study} play-off"

    def training(self, choices: Mapping[str, Choice], techniques: Techniques) -> Place:
        """The place, in the same storage, of the study in which that is trained. Its measurements compare with no other's.

        Args:
            choices: whatever else they choose, too.
        """
        both = {**self.trained, **choices}
        return replace(self, trained={name: both[name] for name in techniques.trained({}) if name in both})

    def within(self, memory_limit_bytes: int) -> Place:
        """The place, in the same storage, of the study with that memory limit, where this place's has another."""
        name = f"{self.name} memory_limit={format_exact_bytes(memory_limit_bytes)}"
        return replace(self, name=name, beside=self.name)

    @property
    def logs(self) -> Path:
        """Folder for the output of the user's code, one file per probe."""
        return (self.file or Path(DEFAULT_FOLDER) / self.study).with_suffix(".logs")

    @property
    def compiled(self) -> Path:
        """Folder for what probes compile."""
        return self.logs.with_suffix(".compiled")

    @property
    def lock(self) -> Path:
        """File that a search locks. For a database server it separates only the searches of this machine."""
        if self.file is not None:
            return self.file.with_name(self.file.name + ".lock")
        name = hashlib.sha256(f"{self.storage} {self.study}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"autotune-{name}.lock"

    @property
    def folder(self) -> Path:
        """What studies in one folder share lies there."""
        return self.file.parent if self.file else Path(DEFAULT_FOLDER)


def place_of(storage: str | None, study: str | None, task: str, version: str = "") -> Place:
    """The place of a task's study: `studies/<task>.db` by default.

    Args:
        storage: a URL or a database file.
        version: tells the task from others of its name; in the study's name unless the user gives one.

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
        file = Path(storage).absolute()
        return Place(storage=f"sqlite:///{file}", name=name, file=file)
    file_url = storage.startswith("sqlite:///") and ":memory:" not in storage
    return Place(storage=storage, name=name, file=Path(storage.removeprefix("sqlite:///")) if file_url else None)


@contextlib.contextmanager
def lock_study(place: Place) -> Iterator[None]:
    """Hold the study's lock: one search writes to a study at a time.

    Raises:
        StudyError: another search holds it, or the file or its folder cannot be written.
    """
    if ":memory:" in place.storage:  # nobody else's
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
            f"the study {where} is in use by another search (lock {place.lock.name}); wait for it to end, "
            "or give this one its own with --study NAME"
        ) from None
    except OSError as error:
        raise StudyError(f"the storage {where} cannot be opened: {error}; choose another with --storage") from None
    try:
        yield
    finally:
        place.lock.unlink(missing_ok=True)  # while it is held: whoever opens the name now makes a file of its own
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty where anything was kept
                folder.rmdir()
