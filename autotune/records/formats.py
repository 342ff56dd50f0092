"""Format numbers of what is kept on disk: what is older opens, what is newer is refused with the way out."""

from __future__ import annotations

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
