"""A study as JSON: the plain figures, not formatted for reading."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.records.study import Trial
from autotune.report.sections import document
from autotune.study.reading import Study


def render(study: Study) -> str:
    """The whole study as one JSON document: its facts, every probe with all that was measured, front and answer.

    Keys: `study`, `storage`, the study's facts (`task`, `objective`, `memory_limit_bytes`, ...), `num_running`,
    `num_lost`, `probes`, `front`, and `result` (null without an answer).
    """
    return document(
        {
            "study": study.name,
            "storage": study.storage,
            **study.facts.to_dict(),
            "num_running": study.num_running,
            "num_lost": study.num_lost,
            "probes": [_probe(probe) for probe in study.probes],
            "front": [asdict(measured) for measured in study.front_configs()],
            "result": study.result.to_dict() if study.result else None,
        }
    )


def _probe(probe: Trial) -> dict[str, Any]:
    started = probe.started.isoformat() if probe.started else None
    return {**asdict(probe), "config": probe.config.as_dict(), "started": started, "wall_s": probe.wall_s}
