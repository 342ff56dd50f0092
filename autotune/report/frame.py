"""A study as pandas frames."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pandas as pd

from autotune.records.outcome import Measurement
from autotune.report.words import describe
from autotune.study.reading import ProbeRecord, Study
from autotune.units import MIB

_FIGURES = {
    "samples_per_s": "float64",
    "samples_per_s_low": "float64",
    "samples_per_s_high": "float64",
    "step_s": "float64",
    "peak_bytes": "Int64",
    "peak_mib": "float64",
    "setup_s": "float64",
    "compile_s": "float64",
    "warmup_s": "float64",
    "timed_s": "float64",
    "num_steps": "Int64",
    "final_loss": "float64",
    "skipped_steps": "Int64",
    "growth_bytes_per_step": "float64",
    "num_alloc_retries": "Int64",
    "contention": "float64",
}
_BEFORE = {"number": "int64", "stage": "str", "round": "Int64"}
_BETWEEN = {"outcome": "str", "cause": "str", "feasible": "bool", "score": "float64"}
_FORECAST = {
    "samples_per_s": "float64",
    "samples_per_s_low": "float64",
    "samples_per_s_high": "float64",
    "peak_bytes": "Int64",
    "peak_low_bytes": "Int64",
    "peak_high_bytes": "Int64",
    "chance_to_win": "float64",
    "chance_to_fit": "float64",
}
_PREDICTED = {f"predicted_{name}": kind for name, kind in _FORECAST.items()}
_AFTER = {
    "train_s": "float64",
    "wall_s": "float64",
    "disturbed": "bool",
    "started": "datetime64[us]",
    "reason": "str",
    "log": "str",
}


def probe_frame(study: Study) -> pd.DataFrame:
    """One row a finished probe.

    Columns: `number`, `stage`, `round`; every technique by its name; `outcome`, `cause`, `feasible`, `score`; the
    figures of a `Measurement` under the same names with `peak_mib` beside `peak_bytes`, missing where the probe did not
    end `ok`; the parts of a step as `phase_data_s`, `phase_forward_s`, ...; the figures of a `Forecast` as
    `predicted_samples_per_s`, ..., missing where nothing was predicted; `train_s`, `wall_s`, `disturbed`, `started`,
    `reason`, `log`.
    Times are seconds, memory is bytes except for `peak_mib`.
    """
    techniques = _in_order(probe.config for probe in study.probes) or list(study.baseline_config)
    phases = _in_order(probe.outcome.measurement.phases_s for probe in study.probes if probe.outcome.measurement)
    phase_columns = {f"phase_{name}_s": "float64" for name in phases}
    known = {**_BETWEEN, **_FIGURES, **phase_columns, **_PREDICTED}
    types = {**_BEFORE, **dict.fromkeys(techniques, "object"), **known, **_AFTER}
    frame = pd.DataFrame([_row(probe) for probe in study.probes], columns=list(types)).astype(types)
    frame[techniques] = frame[techniques].infer_objects()
    return frame


def front_frame(study: Study) -> pd.DataFrame:
    """One row for each config of the memory/throughput front, by increasing memory.

    Columns: `description`, every technique by its name, `samples_per_s` with its 95 % interval `samples_per_s_low` and
    `samples_per_s_high`, `step_s`, `peak_bytes`, `peak_mib`, `num_processes` (fresh processes behind the figures).
    """
    front = study.front_configs()
    techniques = _in_order(measured.config for measured in front) or list(study.baseline_config)
    figures = (
        "samples_per_s",
        "samples_per_s_low",
        "samples_per_s_high",
        "step_s",
        "peak_bytes",
        "peak_mib",
        "num_processes",
    )
    rows = [
        {
            "description": describe(measured.config),
            **measured.config,
            **asdict(measured),
            "samples_per_s_low": measured.samples_per_s_ci[0],
            "samples_per_s_high": measured.samples_per_s_ci[1],
            "peak_mib": measured.peak_bytes / MIB,
        }
        for measured in front
    ]
    return pd.DataFrame(rows, columns=["description", *techniques, *figures])


def _row(probe: ProbeRecord) -> dict[str, Any]:
    outcome = probe.outcome
    return {
        **probe.config,
        **(_figures(outcome.measurement) if outcome.measurement else {}),
        **{f"predicted_{name}": getattr(probe.forecast, name, None) for name in _FORECAST},
        **{name: getattr(probe, name) for name in ("number", "stage", "round", "feasible", "score")},
        **{name: getattr(probe, name) for name in ("wall_s", "disturbed", "started", "reason")},
        "outcome": str(outcome.kind),
        "cause": outcome.cause,
        "train_s": outcome.measurement.train_s if outcome.measurement else outcome.train_s,
        "log": outcome.log,
    }


def _figures(measurement: Measurement) -> dict[str, Any]:
    figures = {name: getattr(measurement, name) for name in _FIGURES if name != "peak_mib"}
    phases = {f"phase_{name}_s": seconds for name, seconds in measurement.phases_s.items()}
    return {**figures, **phases, "peak_mib": measurement.peak_bytes / MIB}


def _in_order(mappings: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in mappings for name in names))
