"""Tracks a search in TensorBoard: curves over the probes, a table of configs, and the answer as text."""

from __future__ import annotations

from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any

from autotune.trackers import Answer, Point, Start, Tracker


class TensorBoard(Tracker):
    """Files that `tensorboard --logdir DIR` shows, written by tensorboardX, which needs no torch. WHERE is DIR."""

    name = "tensorboard"
    summary = "files for TensorBoard, below WHERE (default: runs)"
    package = "tensorboardX"
    install = "tensorboardX"
    _writer: Any = None

    def begin(self, start: Start) -> None:
        """Begin a folder for the study."""
        from tensorboardX import SummaryWriter

        self.finish()
        self._writer = SummaryWriter(logdir=str(Path(self.where or "runs") / start.study))
        self._writer.add_text("search", _table(start.facts))

    def point(self, point: Point) -> None:
        """Write a point of each curve, over the probe's number, and a row of the table under HPARAMS."""
        for name, figure in point.figures.items():
            self._writer.add_scalar(f"probe/{name}", figure, point.number)
        self._writer.add_text("probe/outcome", _table({**point.facts, **point.config}), point.number)
        figures = {f"probe/{name}": figure for name, figure in point.figures.items()}
        self._writer.add_hparams({**point.config, **point.facts}, figures, name=f"probe-{point.number}")

    def answer(self, answer: Answer) -> None:
        """Write the answer in its own words, and its figures."""
        self._writer.add_text("answer", indent(answer.text, " " * 4))  # in Markdown a text that stays as it is
        for name, figure in answer.figures.items():
            self._writer.add_scalar(f"answer/{name}", figure)

    def finish(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


def _table(cells: dict[str, Any]) -> str:
    """A table in Markdown. It is shown as HTML, so HTML in the cells is escaped."""
    rows = (
        f"| {name} | {escape(' '.join(str(value).split())).replace('|', '&#124;')} |" for name, value in cells.items()
    )
    return "\n".join(["| | |", "| --- | --- |", *rows])
