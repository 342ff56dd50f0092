"""Sections as HTML. Whatever comes from a model, a log or a study is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from autotune.report.sections import Block, Cell, Code, Paragraph, Section, Span, Table, Tone

CODE_WIDTH = 88  # columns

STYLE = """
.autotune { --paper: #fff; --ink: #1b1f24; --dim: #66707b; --line: #d8dee4; --box: #f3f5f7; --good: #116329; --bad: #b3261e;
  --warning: #8a5a00; --baseline: #0b5cad; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
@media screen and (prefers-color-scheme: dark) {
  .autotune { --paper: #15191e; --ink: #e6e9ed; --dim: #9aa4af; --line: #3a424c; --box: #20262d;
    --good: #6fd08c; --bad: #ff8a80; --warning: #f0b95a; --baseline: #79b8ff; } }
div.autotune { padding: .5em 1em; }
.autotune h2 { font-size: 1.15em; margin: 2em 0 .4em; } .autotune h2 small { color: var(--dim); font-weight: normal; }
.autotune p { margin: .4em 0; max-width: 46em; } .autotune .wide { overflow-x: auto; }
.autotune table { border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums; margin: .4em 0; }
.autotune th { color: var(--dim); font-weight: normal; }
.autotune :is(th, td):not(.number) { text-align: left; }  /* `:not` outweighs Jupyter's own rule, which sets all to the right */
.autotune th, .autotune td { border-bottom: 1px solid var(--line); padding: .25em 1.2em .25em 0; vertical-align: top; }
.autotune td:not(:last-child), .autotune .whole { white-space: nowrap; }
.autotune .number { text-align: right; }
.autotune pre { background: var(--box); border-radius: 6px; margin: .4em 0; padding: .7em 1em;
  font-family: ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
.autotune .strong, .autotune .best, .autotune .failed { font-weight: 600; } .autotune .good, .autotune .best { color: var(--good); }
.autotune .bad, .autotune .failed { color: var(--bad); } .autotune .warning { color: var(--warning); }
.autotune .note { color: var(--dim); } .autotune .baseline { color: var(--baseline); }
@media screen and (max-width: 40em) {  /* the last column, of text, is a line of its own under its row */
  .autotune .deep, .autotune .deep tr { display: grid; grid-template-columns: repeat(var(--columns), auto); }
  .autotune .deep tbody { display: contents; }
  .autotune .deep tr { border-bottom: 1px solid var(--line); grid-column: 1 / -1; grid-template-columns: subgrid; }
  .autotune .deep :is(th, td) { border: 0; padding-right: .8em; } .autotune .deep :is(th, td):last-child { grid-column: 1 / -1; }
  .autotune pre { font-size: .8em; } }
"""


def fragment(sections: Iterable[Section]) -> str:
    """The sections as a `<div>` with its own style, for a page or a notebook's cell."""
    return f'<style>{STYLE}</style>\n<div class="autotune">\n{body(sections)}\n</div>'


def body(sections: Iterable[Section]) -> str:
    """The sections alone."""
    return "\n".join(line for section in sections for line in _section(section))


def cell(content: Cell) -> str:
    """A cell with its tones as classes."""
    parts = content if isinstance(content, tuple) else (content,)
    return "".join(_span(part) if isinstance(part, Span) else _text(part) for part in parts)


def _span(span: Span) -> str:
    text = _text(span.text)
    return text if span.tone is Tone.PLAIN else f'<span class="{span.tone}">{text}</span>'


def _text(text: str) -> str:
    """The text escaped, and its arrows kept from being broken across lines."""
    return escape(text).replace("-&gt;", '<span class="whole">-&gt;</span>')


def _section(section: Section) -> Iterator[str]:
    if section.title:
        note = f" <small>{escape(section.note)}</small>" if section.note else ""
        yield f"<h2>{escape(section.title)}{note}</h2>"
    code: list[str] = []
    for block in section.blocks:
        if isinstance(block, Code):
            code += block.lines(CODE_WIDTH)
            continue
        yield from _pre(code)
        code = []
        yield _block(block)
    yield from _pre(code)


def _pre(lines: list[str]) -> Iterator[str]:
    """Consecutive lines of code in one box."""
    if lines:
        yield f"<pre>{escape(chr(10).join(lines))}</pre>"


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return f'<div class="wide">{_table(block)}</div>'
    assert isinstance(block, Paragraph)
    return f"<p>{cell(block.mark)}{' ' if block.mark else ''}{cell(block.text)}</p>"


def _table(table: Table) -> str:
    sides = [' class="number"' if title.startswith(">") else "" for title in table.titles]

    def row(kind: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{kind}{side}>{text}</{kind}>' for side, text in zip(sides, cells, strict=True))}</tr>"

    head = row("th", (escape(title.removeprefix(">")) for title in table.titles)) if any(table.titles) else ""
    wide = len(table.titles) - 1
    deep = f' class="deep" style="--columns: {wide}"' if wide > 2 else ""
    return f"<table{deep}>{head}{''.join(row('td', map(cell, cells)) for cells in table.rows)}</table>"
