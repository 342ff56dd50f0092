"""A study or an answer as JSON, for other programs: figures and not their words."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from autotune.records.trial import Trial
from autotune.study.reading import Study


def study_json(study: Study) -> str:
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


def document(data: dict[str, Any]) -> str:
    """Plain data as a JSON document that every parser takes. Infinity and NaN, which JSON lacks, become null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def _probe(probe: Trial) -> dict[str, Any]:
    started = probe.started.isoformat() if probe.started else None
    return {**asdict(probe), "config": probe.config.as_dict(), "started": started, "wall_s": probe.wall_s}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
