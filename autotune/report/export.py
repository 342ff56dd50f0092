"""A study or an answer as JSON and CSV, for other programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from autotune.study.reading import ProbeRecord, Study


def to_json(study: Study) -> str:
    """The whole study as one JSON document: its attributes, every probe with all that was measured, front and answer.

    Keys: `study`, `storage`, the study's attributes (`task`, `objective`, `memory_limit_bytes`, ...), `num_running`,
    `num_lost`, `probes`, `front`, and `result` (null without an answer).
    """
    return document(
        {
            "study": study.name,
            "storage": study.storage,
            **study.attributes,
            "num_running": study.num_running,
            "num_lost": study.num_lost,
            "probes": [_probe(probe) for probe in study.probes],
            "front": [asdict(measured) for measured in study.front_configs()],
            "result": study.result.to_dict() if study.result else None,
        }
    )


def to_csv(study: Study) -> str:
    """Every probe as a line of CSV with a header: the columns of `autotune.report.frame.probe_frame`."""
    return study.frame().to_csv(index=False)


def document(data: dict[str, Any]) -> str:
    """Plain data as a JSON document that every parser takes: what JSON has no word for (infinity) becomes null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def _probe(probe: ProbeRecord) -> dict[str, Any]:
    return {**asdict(probe), "outcome": probe.outcome.to_dict(), "started": probe.started.isoformat()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
