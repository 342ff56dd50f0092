"""The protocol of exporters: each says an answer in other words, and lists the keys that cannot be said there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from autotune.records.config import Choice
from autotune.records.result import Result

Space = Mapping[str, Sequence[Choice]]  # technique -> choices that were searched; may lack some or all


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
    r"""Says an answer in the words of something else. Stateless.

    `export` is all that is called. A whole exporter:

        class Toml(Exporter):
            name = "toml"
            summary = "the config as a table of TOML"

            def export(self, result: Result, *, space: Space) -> Export:
                words = {"amp": "precision", "batch_size": "micro_batch"}  # its own, for what it knows
                said = {words[key]: choice for key, choice in result.config.items() if key in words}
                unsaid = {key: "this file has no word for it" for key in result.config if key not in words}
                return Export("\n".join(f"{word} = {json.dumps(choice)}" for word, choice in said.items()), unsaid)

    `autotune export --to NAME` exists because its file is there; another package offers one as an entry point in the group
    `autotune.exporters`. Where a framework has arguments of its own that several exporters or integrations share, they stand in
    the `frameworks` of each technique (`autotune.techniques.frameworks`), and `export/arguments.py` gathers them.

    Attributes:
        name: the NAME of `--to NAME`.
        summary: one line for the help.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def export(self, result: Result, *, space: Space) -> Export:
        """Say the answer."""
