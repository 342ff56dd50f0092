"""Sections on a terminal, or as text of a given width."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterable

from rich import table as rich_table
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.text import Text

from autotune.report.sections import Cell, Code, Paragraph, Section, Span, Table, Tone

INDENT, GAP = 2, 2  # columns before a table, and between its own
LEAST = 10  # columns that are left of a cell which is folded
MAX_CODE_WIDTH = 100  # columns; a wider terminal does not make wider code
STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.GOOD: "green",
    Tone.BEST: "bold green",
    Tone.BAD: "red",
    Tone.FAILED: "bold red",
    Tone.WARNING: "yellow",
    Tone.NOTE: "dim",
    Tone.BASELINE: "cyan",
}


def stdout_console() -> Console:
    """A console on standard output."""
    return Console(file=sys.stdout, highlight=False)


def render(sections: Iterable[Section], console: Console) -> None:
    """Print sections, wrapped to the console's width except for code that cannot be broken."""
    for section in sections:
        for part in _section(section, console.width):
            console.print(part, soft_wrap=isinstance(part, Text))  # texts are wrapped already


def as_text(sections: Iterable[Section], width: int = 80) -> str:
    """The same as text without colours."""
    stream = io.StringIO()
    plain = Console(file=stream, width=width, highlight=False, color_system=None, force_jupyter=False)
    render(sections, plain)
    return "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())


def style(cell: Cell) -> Text:
    """A cell in its colours. Nothing in it is taken for markup."""
    parts = cell if isinstance(cell, tuple) else (cell,)
    return Text.assemble(*((part.text, STYLES[part.tone]) if isinstance(part, Span) else part for part in parts))


def _section(section: Section, width: int) -> Iterable[RenderableType]:
    yield Text("")
    if section.title:
        yield style((Span(section.title, Tone.STRONG), Span(f"  {section.note}" if section.note else "", Tone.NOTE)))
    for block in section.blocks:
        match block:
            case Paragraph():
                yield from _paragraph(block, width)
            case Table():
                yield _table(block, width)
            case Code():
                yield from (Text(f"  {line}") for line in block.lines(min(width, MAX_CODE_WIDTH) - 2))


def _paragraph(paragraph: Paragraph, width: int) -> Iterable[Text]:
    mark = Text("  ").append_text(style(paragraph.mark)).append(" " if paragraph.mark else "")
    for number, line in enumerate(style(paragraph.text).wrap(_MEASURING, max(width - len(mark), 20))):
        line.rstrip()
        yield (mark if number == 0 else Text(" " * len(mark))) + line


def _table(table: Table, width: int) -> RenderableType:
    made = rich_table.Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False, expand=False)
    made.show_header = any(table.titles)
    folded = _folded(table, width - INDENT)
    for place, title in enumerate(table.titles):
        justify: JustifyMethod = "right" if title.startswith(">") else "left"
        made.add_column(title.removeprefix(">"), justify=justify, no_wrap=place not in folded, overflow="fold")
    for row in table.rows:
        made.add_row(*map(style, row))
    return Padding(made, (0, 0, 0, INDENT), expand=False)


def _folded(table: Table, width: int) -> Collection[int]:
    """The columns that are folded, the widest first: the last one; all text, where too little would be left of that; else every column."""
    titles = [title.removeprefix(">") for title in table.titles]
    widths = [max(style(cell).cell_len for cell in column) for column in zip(titles, *table.rows, strict=True)]
    columns = range(len(widths))
    text = [place for place in columns if not table.titles[place].startswith(">")]
    for folded in (text[-1:] if columns[-1] in text else [], text):
        least = sum(min(widths[place], LEAST) if place in folded else widths[place] for place in columns)
        if least + GAP * columns[-1] <= width:
            return folded
    return columns


_MEASURING = Console(file=io.StringIO(), highlight=False)
