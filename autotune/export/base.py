"""The protocol of exporters: each says an answer in other words, and lists the keys that cannot be said there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from autotune.records.config import Choice
from autotune.records.result import Result


@dataclass(frozen=True)
class Export:
    """An answer in other words.

    Attributes:
        text: as it goes into a file, without a newline at its end.
        unsaid: key of the config, or what else the answer was trained with -> why it is not in the text.
    """

    text: str
    unsaid: Mapping[str, str] = field(default_factory=dict)


class Exporter(ABC):
    """Says an answer in the words of something else. Stateless.

    Attributes:
        name: the NAME of `--to NAME`.
        summary: one line for the help.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def export(self, result: Result, *, space: Mapping[str, Sequence[Choice]]) -> Export:
        """Say the answer.

        Args:
            space: technique -> choices that were searched; may lack some or all.
        """
