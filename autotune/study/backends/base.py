"""What a kind of storage has to do so that several searches may write to it at once; and its URL without a password."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

SECRETS = ("password", "sslpassword")  # in the query of a URL

Freed = Callable[[optuna.Study, FrozenTrial], None]


def scheme_of(url: str) -> str:
    """The kind of storage in a URL: `sqlite` of `sqlite:///studies/gpt.db`. A driver's name behind a plus does not count."""
    return url.partition("://")[0].partition("+")[0]


def without_password(url: str) -> str:
    """A storage URL as it may be shown and kept: whoever uses it again gives the password in another way."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # it may still hold one
        return f"{scheme_of(url)}://..."
    if not secrets_of(url):
        return url
    plain = parsed.difference_update_query(SECRETS)
    return URL.create(
        plain.drivername, plain.username, None, plain.host, plain.port, plain.database, plain.query
    ).render_as_string()


def secrets_of(url: str) -> list[str]:
    """The passwords in a storage URL, as they are written there."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return []
    named = [parsed.query[name] for name in SECRETS if name in parsed.query]
    return [text for text in (parsed.password, *named) if isinstance(text, str) and text]


class SharedBackend(ABC):
    """A kind of storage that several searches may write to at once. A file of its own here, with a whole example in `journal.py`.

    `connect` is called first. `alone` is held for a moment, while a search looks at the study and writes what follows from that.
    `beat` comes from a thread of its own.

    Attributes:
        name: the scheme of its URLs.
        example: a URL of its own.
        purpose: when to use it, in a few words.
        keeps_heartbeats: whether a search that has died is known by its heartbeats; else by its process, on its own machine.
        beat_s: seconds between two heartbeats.
        gone_after_s: so many seconds after its last heartbeat a search counts as dead.
        note: what the user should know of it.
    """

    name: str
    example: str
    purpose: str
    keeps_heartbeats = False
    beat_s = 5
    gone_after_s = 30
    note = ""

    @abstractmethod
    def connect(self, url: str, *, freed: Freed | None = None, must_exist: bool = False) -> BaseStorage:
        """Optuna's storage.

        Args:
            freed: called with each trial whose search has died, once it is free.
            must_exist: nothing is created: a reader's storage.

        Raises:
            StudyError: what it needs is not installed, or there is no such storage.
        """

    @abstractmethod
    def alone(self, storage: BaseStorage, study: str) -> contextlib.AbstractContextManager[None]:
        """Keep every other search of the study waiting. It ends by itself where this process dies or loses the storage."""

    @contextlib.contextmanager
    def alone_to_begin(self, storage: BaseStorage, study: str, what: str) -> Iterator[bool]:
        """As `alone`, to begin `what`. False, at once and without being alone, where another search is waiting to begin just that: of many
        that want the same, each would find it taken once its turn has come, and queue again for the next.
        """
        with self.alone(storage, study):
            yield True

    def may_pass(self, error: BaseException) -> bool:
        """Whether an error of the storage may go away by itself: a server that starts anew, a network that is gone for seconds."""
        return False

    def beat(self, storage: BaseStorage, trial_ids: Collection[int]) -> None:  # noqa: B027  # a journal has none
        """Show that the search of these running trials is alive."""

    def all_are_heard(self, storage: BaseStorage, study_ids: Collection[int]) -> bool:
        """Whether every running trial of these studies shows signs of life, so that nobody need be looked after. A journal cannot tell."""
        return False

    def close(self, storage: BaseStorage) -> None:  # noqa: B027  # a journal has none
        """Let the storage's connections go."""
