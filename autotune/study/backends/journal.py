"""Optuna's journal: one file that several machines see, where there is no server. It keeps no heartbeats."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalFileSymlinkLock

from autotune.errors import StudyError
from autotune.files import mend
from autotune.study.backends.base import Freed, SharedBackend


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise an error of the file system, such as a full disk, as an error of the storage."""
    try:
        yield
    except OSError as error:
        raise StorageInternalError(str(error)) from error


class _Lock(JournalFileSymlinkLock):
    """Optuna's lock of the file. Whoever has it appends to a whole line: a full disk may have cut the last one short."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file

    def acquire(self) -> bool:
        super().acquire()
        try:
            mend(self._file)
        except BaseException:
            self.release()
            raise
        return True


class _File(JournalFileBackend):
    """Optuna's file, in which every line is whole."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file), _Lock(file))

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        with _storage_errors():
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with _storage_errors():
            super().append_logs(logs)


class _Journal(JournalStorage):
    """Optuna's storage, and where its file is."""

    def __init__(self, file: Path) -> None:
        super().__init__(_File(file))
        self.file = file


class Journal(SharedBackend):
    """Studies in a journal: `journal:///studies/gpt.log` below the working folder, `journal:////shared/gpt.log` from the root."""

    name = "journal"
    example = "journal:////FOLDER/FILE.log"
    purpose = "a file that all machines see, where there is no server"
    note = (
        "a journal keeps no heartbeats: a probe of a search that died on another machine stays taken for 10 minutes, by the clocks of both "
        "machines, which have to agree"
    )

    def connect(self, url: str, *, freed: Freed | None = None, must_exist: bool = False) -> BaseStorage:
        file = Path(url.partition("://")[2].removeprefix("/")).absolute()
        if must_exist and not file.is_file():
            raise StudyError(f"there is no journal {file}; `autotune search --storage {url}` makes it")
        file.parent.mkdir(parents=True, exist_ok=True)
        return _Journal(file)

    @contextlib.contextmanager
    def alone(self, storage: BaseStorage, study: str) -> Iterator[None]:
        assert isinstance(storage, _Journal)
        lock = JournalFileOpenLock(f"{storage.file}.search")  # the journal's own lock is taken for each line
        with _storage_errors():
            lock.acquire()
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # taken over from a search that held it for half a minute
                lock.release()
