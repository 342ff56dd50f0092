"""What a study keeps beside its trials, for whoever has not opened it to search: read, agreed on before a search, added to after one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import optuna

from autotune.records.formats import require_readable
from autotune.records.recheck import Recheck
from autotune.records.study import StudyFacts
from autotune.study.backends import shared_backend_of
from autotune.study.backends.base import without_password
from autotune.study.place import GONE_AFTER_S, Place
from autotune.study.storage import borrow, opening_errors, place_errors

# Format 1 called a prediction a forecast; up to format 2 the play-off was in the search's study, and an infeasible trial had the
# worst feasible value. Both can be opened.
FORMAT = 3
SHARED_FORMAT = 4  # several searches write to it, and an earlier version would end the others' trials
AGREED = "limit_agreed_at_s"  # attribute: when searches agreed on the memory limit, in seconds since 1970


def facts_of(study: str, attributes: Mapping[str, Any]) -> StudyFacts:
    """What a study keeps beside its trials.

    Args:
        study: the study's name and where it is kept, for messages.
        attributes: the study's user attributes in Optuna.

    Raises:
        StudyError: a later version wrote it.
    """
    require_readable(f"the study {study}", attributes.get("format", 1), SHARED_FORMAT)
    return StudyFacts.from_dict(attributes)


def keep_recheck(url: str, study: str, recheck: Recheck) -> None:
    """Add what a later run of the answer saw to what a study keeps. It may be written while a search writes.

    Args:
        url: the storage's.

    Raises:
        StudyError: the storage cannot be written.
    """
    expected = "a database that this user may write to"
    with opening_errors(without_password(url), "written", expected), borrow(url) as storage:
        kept = optuna.load_study(study_name=study, storage=storage)
        known = facts_of(study, kept.user_attrs).rechecks
        kept.set_user_attr("rechecks", [one.to_dict() for one in (*known, recheck)])


def stored_facts(place: Place) -> StudyFacts | None:
    """What an existing study keeps; None if no search has been there.

    Raises:
        StudyError: the storage cannot be opened; this call finds that out before the slow work begins.
    """
    if place.file is not None and not place.file.exists():
        return None
    with place_errors(place), borrow(place.url) as storage, contextlib.suppress(KeyError):  # no such study
        attributes = optuna.load_study(study_name=place.study, storage=storage).user_attrs
        if "fingerprint" in attributes:
            return facts_of(f"{place.study} in {place.storage}", attributes)
    return None


def limits_beside(place: Place) -> list[int]:
    """The memory limits of the studies that are kept beside one, in its storage.

    Raises:
        StudyError: the storage cannot be opened.
    """
    with place_errors(place), borrow(place.url) as storage:
        kept = [study.user_attrs for study in storage.get_all_studies()]
    return [attributes["memory_limit_bytes"] for attributes in kept if attributes.get("limited_beside") == place.name]


def agree_on_limit(place: Place, memory_limit_bytes: int) -> int:
    """The memory limit of a study that several searches may begin at the same instant: the first one's. It binds nobody any more once
    `GONE_AFTER_S` seconds have passed and no search has opened the study: a model file may have failed.

    Args:
        memory_limit_bytes: what this search would take.

    Raises:
        StudyError: the storage cannot be opened.
    """
    backend = shared_backend_of(place.url)
    if backend is None:
        return memory_limit_bytes
    with place_errors(place), borrow(place.url) as storage, backend.alone(storage, place.study):
        study = optuna.create_study(study_name=place.study, storage=storage, direction="maximize", load_if_exists=True)
        known, now_s = study.user_attrs, time.time()
        if "fingerprint" in known or now_s - known.get(AGREED, 0.0) < GONE_AFTER_S:
            agreed: int = known["memory_limit_bytes"]
            return agreed
        study.set_user_attr("memory_limit_bytes", memory_limit_bytes)
        study.set_user_attr(AGREED, now_s)  # last: a limit without it binds nobody
        return memory_limit_bytes


def is_only_agreed(attributes: Mapping[str, Any]) -> bool:
    """Whether a study, by its user attributes in Optuna, has a memory limit and nothing else: no search has opened it yet."""
    return "memory_limit_bytes" in attributes and "format" not in attributes
