"""Calibrations of devices, kept beside the studies: a file for each device as it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from autotune.files import write_whole
from autotune.records.calibration import Calibration

FOLDER = ".calibration"


def path_of(folder: Path, of: Mapping[str, str]) -> Path:
    """Where the calibration that holds for `of` (`autotune.devices.calibration.holds_for`) is kept, beside the studies of a folder."""
    key = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    return folder / FOLDER / f"{key}.json"


def kept(path: Path) -> Calibration | None:
    """The calibration in a file; None where there is none that can be read."""
    try:
        return Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def keep(path: Path, calibration: Calibration) -> None:
    """Keep a calibration. A folder that cannot be written costs nothing but the time to measure again."""
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(calibration.to_dict()))
