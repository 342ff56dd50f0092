"""Plain data as the JSON document that a command prints."""

from __future__ import annotations

import json
import math
from typing import Any


def document(data: dict[str, Any]) -> str:
    """Plain data as a JSON document that every parser takes. Infinity and NaN, which JSON lacks, become null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
