"""Optuna's storage at a URL, and its failures in words."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError, first_line
from autotune.study.backends import shared_backend_of
from autotune.study.place import Place


def connect(url: str, **options: Any) -> BaseStorage:
    """Optuna's storage at a URL; `options` are those of `SharedBackend.connect`, or of `RDBStorage` where searches do not share it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    backend = shared_backend_of(url)
    return RDBStorage(url, **options) if backend is None else backend.connect(url, **options)


@contextlib.contextmanager
def borrow(url: str) -> Iterator[BaseStorage]:
    """The storage for a moment."""
    backend, storage = shared_backend_of(url), connect(url)
    try:
        yield storage
    finally:
        if backend is not None:
            backend.close(storage)


@contextlib.contextmanager
def opening_errors(storage: str, cannot: str, expected: str) -> Iterator[None]:
    """Explain why a storage cannot be opened.

    Args:
        storage: the storage as the user gave it.
        cannot: what cannot be done with it, as a participle: `opened`, `read`.
        expected: what a storage looks like.

    Raises:
        StudyError: in place of any other exception.
    """
    try:
        yield
    except StudyError:
        raise
    except Exception as error:  # one of SQLAlchemy's many, a missing driver, a file that is no database
        raise StudyError(f"the storage {storage} cannot be {cannot}: {_cause(error)}; expected {expected}") from None


def place_errors(place: Place) -> contextlib.AbstractContextManager[None]:
    """Explain why the storage of a place cannot be opened, as `opening_errors`."""
    expected = "a database file that nothing else locks, or a URL such as sqlite:///studies/gpt.db"
    return opening_errors(place.storage, "opened", expected)


@contextlib.contextmanager
def storage_errors(place: Place) -> Iterator[None]:
    """Explain a failure of the storage while a study is in use: a lock, a full disk, a server that is gone.

    Raises:
        StudyError: in place of the storage's own exception.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        raise StudyError(
            f"the study {place.study} in {place.storage} can no longer be read or written: {_cause(error)}; "
            "check that its disk has room and that nothing else locks it, then run the same command again: it continues where it stopped"
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of the database's own message; Optuna's message around it speaks of invalid data."""
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(getattr(error, "orig", None) or error)
