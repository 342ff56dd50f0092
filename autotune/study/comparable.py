"""Whether new measurements are comparable with those of a study: by its fingerprint, and in words where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import StudyError
from autotune.records.device import same_memory
from autotune.records.study import Fingerprint, StudyFacts
from autotune.study.place import Place
from autotune.units import format_bytes

MEMORIES = {"memory_limit_bytes": "memory limit", "total_bytes": "memory of the device"}  # of a fingerprint, in words


def require_comparable(place: Place, stored: StudyFacts | None, early: Fingerprint) -> None:
    """Refuse a study that cannot be resumed, by what of its fingerprint is known before anything takes seconds.

    Raises:
        StudyError: it has other values.
    """
    if stored is not None:
        known = vars(stored.fingerprint)
        in_both = {name: value for name, value in vars(early).items() if None not in (value, known[name])}
        require_equal(place, stored.fingerprint, replace(stored.fingerprint, **in_both))


def require_equal(place: Place, known: Fingerprint, wanted: Fingerprint) -> None:
    """Refuse a study of another fingerprint, and show what differs.

    Raises:
        StudyError: it has other values.
    """
    was, now = _flat(known), _flat(wanted)
    differences = []
    for key in sorted({*was, *now}):
        if was.get(key) == now.get(key) or (key == "total_bytes" and same_memory(was[key] or 0, now[key] or 0)):
            continue
        before, after = _shown(was, key), _shown(now, key)
        if before == after:  # a few bytes apart
            before, after = f"{was[key]} bytes", f"{now[key]} bytes"
        differences.append(f"{MEMORIES.get(key, key)} was {before} and is {after}")
    if differences:
        raise StudyError(
            f"the study {place.study} in {place.storage} cannot be resumed, because new measurements would not be comparable with it: "
            f"{'; '.join(differences)}. Start another with --study NAME, or move the file away"
        )


def _flat(fingerprint: Fingerprint) -> dict[str, Any]:
    """Each value by its name, variables of the environment among them."""
    found = vars(fingerprint)
    return {**{key: value for key, value in found.items() if key != "environment"}, **fingerprint.environment}


def _shown(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "")  # a variable of the environment that is not set
    if value is None:
        return "none" if key == "global_batch" else "not recorded"  # by another version
    if key in MEMORIES:
        return format_bytes(value)
    return repr(list(value) if isinstance(value, tuple) else value)
