"""How a user, or a batch system, ends a search: Ctrl-C, SIGTERM."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interruption:
    """What asks a search to end.

    Attributes:
        tell: is given the acknowledgement.
        is_ready: whether there is a search that can end after its running probe; before that a signal ends it at once.
    """

    tell: Callable[[str], None]
    is_ready: bool = False
    is_asked: bool = False

    def __call__(self) -> bool:
        """Whether it was."""
        return self.is_asked

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note of the first signal; the second, which kills the running probe, raises KeyboardInterrupt."""
        if self.is_asked or not self.is_ready:
            raise KeyboardInterrupt
        self.is_asked = True
        again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.tell(f"ending after this probe; {again} again to end now")


@contextlib.contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[Interruption]:
    """Let Ctrl-C and SIGTERM end the search; in a thread other than the main one they are left as they are."""
    interruption = Interruption(tell)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.on_signal) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
