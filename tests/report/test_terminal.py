"""Sections on a terminal: colours, wrapping, and code that can be copied."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autotune.report.sections import Code, Paragraph, Section, Span, Tone, pairs, plain, table
from autotune.report.terminal import as_text, render

SECTIONS = [
    Section(
        "Probes",
        (
            table((">#", "outcome", "why"), [("1", Span("ok", Tone.BEST), "first"), ("12", "oom", ("too ", "large"))]),
            Paragraph("one two three four five six", mark=Span("!", Tone.WARNING)),
            pairs({"log": "probe.log"}),
            Code("f(", ("first=1", "second=2"), ")"),
        ),
        "a note",
    )
]


def test_a_section_is_its_title_its_note_and_its_blocks_indented() -> None:
    assert as_text(SECTIONS, 24).splitlines() == [
        "Probes  a note",
        "   #  outcome  why",
        "   1  ok       first",
        "  12  oom      too large",
        "  ! one two three four",
        "    five six",
        "  log  probe.log",
        "  f(first=1, second=2)",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_column_of_a_wide_table_vanishes(width: int) -> None:
    name, verdict = "gpt-medium-on-the-second-machine", "faster in one round"
    row = (name, verdict, "at least 1.31x", "84.1 ±1.2%", "42.0 ±0.9%", "1.46 GiB")
    titles = ("study", "verdict", ">gain", ">samples/s", ">baseline", ">peak")
    lines = as_text([Section("", (table(titles, [row]),))], width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert width < 80 or all(any(figure in line for line in lines) for figure in row[2:])
    told = "".join((*titles, *row)).replace(">", "").replace(" ", "")
    assert sorted("".join("".join(lines).split())) == sorted(told)


@pytest.mark.parametrize("width", [8, 12, 40])
def test_code_is_broken_between_its_items_alone(width: int) -> None:
    code = Code("f(", ("first=1", "second=2"), ")")
    assert code.lines(width) == (["f(first=1, second=2)"] if width == 40 else ["f(first=1,", "  second=2)"])
    assert " ".join(line.strip() for line in code.lines(width)) == str(code)


def test_code_that_cannot_be_broken_is_one_line_however_narrow_the_terminal() -> None:
    command = "autotune verify model.py --config '{}'"
    assert as_text([Section("", (Code("", tail=command),))], 20) == f"  {command}"


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    assert "use [bold]this[/bold]" in as_text([Section("[x]", (Paragraph("use [bold]this[/bold]"),))])


def test_no_color_leaves_out_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        stream = io.StringIO()
        render(SECTIONS, Console(file=stream, width=80, force_terminal=True, highlight=False))
        return stream.getvalue()

    assert "\x1b[1;32mok" in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in drawn()


def test_a_cell_is_its_text_without_its_tones() -> None:
    assert plain(("too ", Span("large", Tone.BAD))) == "too large"
    assert plain(Span("ok", Tone.GOOD)) == plain("ok") == "ok"
