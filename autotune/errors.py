"""The errors that a user can act on, and any error in one line.

Each message names the value, what was expected and the next step.
"""

from __future__ import annotations

import re
import signal

# as NCCL, gloo and torch say it of a group whose process has gone or whose group was ended
_LOST_PEER = re.compile(
    r"remote process exited|[Cc]onnection (?:closed|reset) by peer|pair closure|Broken pipe|NCCL communicator was aborted"
    r"|process group has not been initialized|Invalid process group specified"
)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def without_digits(cause: str) -> str:
    """What an error says without its digits: the same error may name other shapes in another config."""
    return re.sub(r"\d+", "", cause)


def in_one_line(error: BaseException) -> str:
    """`ValueError: bad shape`: an error's type and first line."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def tells_of_lost_peer(text: str) -> bool:
    """Whether an error's words say that another process of the group is gone."""
    return _LOST_PEER.search(text) is not None


class AutotuneError(Exception):
    """Something the user can put right; the command line shows the message alone and exits with `exit_code`.

    Args:
        message: one paragraph: the value, what was expected, the next step.
        frames: the frames of the user's own code, formatted, when the error arose there.
    """

    frames_of = "your code"
    exit_code = 2

    def __init__(self, message: str, *, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class TaskError(AutotuneError):
    """The model file, or what one of its functions returned, is not what the task needs."""


class ConfigError(AutotuneError):
    """A config, a technique's name or a technique's choice is not valid for this task."""


class DeviceError(AutotuneError):
    """The device asked for does not exist or cannot be used here."""


class PeerError(AutotuneError):
    """Another process that trains the same model has failed, and this one cannot go on without it."""


class StudyError(AutotuneError):
    """The study cannot be opened, is in use, or belongs to another task or machine."""


class OwnFault(AutotuneError):
    """A fault of autotune itself; `frames` hold its traceback."""

    frames_of = "autotune itself"


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words: `died of SIGSEGV (segmentation fault)`, `exited with status 1`."""
    if exit_code < 0:
        number = signal.Signals(-exit_code)
        return f"died of {number.name} ({signal.strsignal(number)})"
    return f"exited with status {exit_code}"
