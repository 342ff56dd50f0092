"""What is kept on disk across versions: what is older opens, what is newer is refused with the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotune.errors import StudyError


def require_readable(what: str, found: int, newest: int) -> None:
    """Refuse what a later version wrote.

    Raises:
        StudyError: `found` is above `newest`.
    """
    if found > newest:
        raise StudyError(
            f"{what} has format {found}, this autotune reads up to {newest}; "
            "upgrade it: pip install --upgrade autotune-torch"
        )


def known_fields(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The items that a record has a field for: other versions may have written others."""
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in data.items() if name in names}
