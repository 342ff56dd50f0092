"""What a command that failed says of it: its exit code, its message, and the JSON document that stands in place of an answer."""

from __future__ import annotations

import errno
import json

from autotune.cli.parser import INTERRUPTED, USAGE
from autotune.errors import AutotuneError

_NEXT_STEPS = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space within your quota",
    errno.EACCES: "change its permissions",
    errno.EROFS: "choose a place that can be written",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}


def verdict(error: BaseException) -> tuple[int, str]:
    """The exit code and the message of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, AutotuneError):
        return error.exit_code, str(error)
    if isinstance(error, OSError):
        what = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        next_step = _NEXT_STEPS.get(error.errno or 0, "fix that (--debug shows where it happened)")
        return USAGE, f"{what}; {next_step}, and run the same command again: a study continues where it stopped"
    what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    return USAGE, f"{what}; this is a fault of autotune itself: please report it with the traceback above"


def failure_document(error: BaseException) -> str:
    """The JSON document of an exception."""
    code, message = verdict(error)
    return json.dumps({"error": message, "exit_code": code})
