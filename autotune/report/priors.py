"""What earlier studies taught, as sections and as plain data: of what, on what, and how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.records.inspection import ModelSignature
from autotune.records.outcome import Kind
from autotune.records.priors import PriorStudy
from autotune.report.figures import times
from autotune.report.sections import Cell, Paragraph, Section, table
from autotune.units import format_bytes

MOST_KINDS = 3  # of layers that are named
ANSWER = "answer: its one probe in the search, over the baseline's"


def sections(studies: Sequence[PriorStudy], files: Sequence[Path]) -> list[Section]:
    """A row for each study, the newest first."""
    if files and not studies:
        return [Section("", (Paragraph(f"Nothing could be read of {', '.join(map(str, files))}."),))]
    if not studies:
        return [Section("", (Paragraph("Nothing is remembered: no search of a model has ended here."),))]
    head = ("study", ">configs", ">answer", "of")
    size = format_bytes(sum(file.stat().st_size for file in files))
    studies_in_all = "1 study" if len(studies) == 1 else f"{len(studies)} studies"
    held = f"{studies_in_all} in {size}: {', '.join(map(str, files))}"
    return [Section("What earlier studies taught", (table(head, list(map(_row, studies))), Paragraph(held)), ANSWER)]


def plain(studies: Sequence[PriorStudy], files: Sequence[Path]) -> dict[str, Any]:
    """The same for `--json`, with every trial."""
    sizes = {str(file): file.stat().st_size for file in files}
    return {"studies": [study.to_dict() for study in studies], "files_bytes": sizes}


def _row(study: PriorStudy) -> tuple[Cell, ...]:
    about = study.circumstances
    failed = sum(trial.kind is not Kind.OK for trial in study.trials)
    searched = f"searched {study.searched_at.partition('T')[0]}"
    return (
        study.name,
        f"{len(study.trials)}" + (f" ({failed} failed)" if failed else ""),
        next((times(trial.speed) for trial in study.trials if trial.config == study.answer), "none"),
        "; ".join(filter(None, (_model(about.signature), about.device, f"torch {about.torch}", searched))),
    )


def _model(signature: ModelSignature | None) -> str:
    """`0.86 M parameters: 18 Linear, 9 LayerNorm`."""
    if signature is None:
        return ""
    kinds: Counter[str] = Counter()
    for layer in signature.layers:
        kinds[layer.kind] += layer.count if layer.shapes else 0
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(MOST_KINDS) if count)
    return f"{signature.num_parameters / 1e6:.3g} M parameters: {named}"
