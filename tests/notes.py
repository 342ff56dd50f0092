"""A listener of a search that keeps what it is told in words."""

from __future__ import annotations

from autotune.tuning.events import Event, Listener, Note


class Notes(Listener):
    """The texts of a search's notes, in order; those of its warnings once more by themselves."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.warnings: list[str] = []

    def on(self, event: Event) -> None:
        """Keep the text of a note."""
        if isinstance(event, Note):
            self.texts.append(event.text)
            self.warnings += [event.text] if event.warning else []
