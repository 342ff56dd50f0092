"""Optuna's journal: one file that several machines see, where there is no server. It keeps no heartbeats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from autotune.errors import StudyError
from autotune.study.backends.base import Freed, SharedBackend


class _Journal(JournalStorage):
    """Optuna's storage, and where its file is."""

    def __init__(self, file: Path) -> None:
        super().__init__(JournalFileBackend(str(file)))
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
        lock.acquire()
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # taken over from a search that held it for half a minute
                lock.release()
