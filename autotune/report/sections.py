"""Reports as plain data: sections of paragraphs, tables and code, or a JSON document. A renderer puts sections on a terminal or a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NUM_NAMED = 4


class Tone(StrEnum):
    """The meaning of a piece of text for its reader; a renderer chooses the look."""

    PLAIN = ""
    STRONG = "strong"
    GOOD = "good"
    BEST = "best"
    BAD = "bad"
    FAILED = "failed"
    WARNING = "warning"
    NOTE = "note"
    BASELINE = "baseline"


@dataclass(frozen=True)
class Span:
    """A piece of text in one tone."""

    text: str
    tone: Tone = Tone.PLAIN


Cell = str | Span | tuple[str | Span, ...]


@dataclass(frozen=True)
class Paragraph:
    """Text that is wrapped. `mark` stands before it, as a bullet does."""

    text: Cell
    mark: Cell = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under titles; there is no head where all titles are empty. The last column is wrapped, and others where
    that is not enough.

    Attributes:
        titles: a title that begins with `>` makes its column one of numbers, aligned to the right.
    """

    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Code:
    """Text to copy: `head`, `items`, `tail`. Lines are broken between items only."""

    head: str
    items: tuple[str, ...] = ()
    tail: str = ""

    def lines(self, width: int) -> list[str]:
        """The text in lines of at most `width`, as far as it can be broken."""
        lines, indent = [self.head], " " * len(self.head)
        for number, item in enumerate(self.items):
            piece = item + (self.tail if number == len(self.items) - 1 else ",")
            if number == 0:
                lines[-1] += piece
            elif len(lines[-1]) + 1 + len(piece) <= width:
                lines[-1] += f" {piece}"
            else:
                lines.append(indent + piece)
        return lines if self.items else [self.head + self.tail]

    def __str__(self) -> str:
        return f"{self.head}{', '.join(self.items)}{self.tail}"


Block = Paragraph | Table | Code


@dataclass(frozen=True)
class Section:
    """Blocks under a title, with a note beside it; both may be empty."""

    title: str
    blocks: tuple[Block, ...]
    note: str = ""


def table(titles: Iterable[str], rows: Iterable[Iterable[Cell]]) -> Table:
    """A table from any iterables."""
    return Table(tuple(titles), tuple(map(tuple, rows)))


def pairs(rows: Mapping[str, Cell]) -> Table:
    """A table of two columns without a head."""
    return table(("", ""), rows.items())


def by_reason(reasons: Mapping[str, str], most: int = NUM_NAMED) -> Iterator[Paragraph]:
    """Each reason once, after the names it holds for: at most so many, and how many more there are."""
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason, []).append(name)
    for reason, names in alike.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        yield Paragraph((f"{', '.join(names[:most])}{more}", Span(f"  {reason}", Tone.NOTE)))


def warnings_section(warnings: Iterable[str]) -> Section:
    """Warnings, each with a mark."""
    return Section("Warnings", tuple(Paragraph(warning, mark=Span("!", Tone.WARNING)) for warning in warnings))


def plain(cell: Cell) -> str:
    """A cell's text without its tones."""
    parts = cell if isinstance(cell, tuple) else (cell,)
    return "".join(part.text if isinstance(part, Span) else part for part in parts)


def document(data: dict[str, Any]) -> str:
    """Plain data as a JSON document that every parser takes, in ASCII, which every output can hold. Infinity and NaN, which JSON lacks,
    become null.
    """
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
