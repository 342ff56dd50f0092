"""A study as pandas frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from autotune.records.config import Choice
from autotune.records.measured import Measured
from autotune.records.outcome import Measurement
from autotune.records.study import Prediction, Trial
from autotune.techniques import Techniques
from autotune.units import MIB


def _numbers(record: type) -> dict[str, str]:
    """The fields of a record that are single numbers, with their pandas types: missing values are allowed."""
    kinds = {"int": "Int64", "float": "float64"}
    found = {item.name: str(item.type).removesuffix(" | None") for item in fields(record)}
    return {name: kinds[kind] for name, kind in found.items() if kind in kinds}


_FIGURES = {**_numbers(Measurement), "peak_mib": "float64"}
_PREDICTED = {f"predicted_{name}": kind for name, kind in _numbers(Prediction).items()}
JOULES = ("joules_per_sample", "joules_per_sample_low", "joules_per_sample_high")
_BEFORE = {"number": "int64", "stage": "str", "round": "Int64"}
_FOUND = {"outcome": "str", "cause": "str", "feasible": "bool", "score": "float64"}
_AFTER = {
    "train_s": "float64",
    "wall_s": "float64",
    "disturbed": "bool",
    "started": "datetime64[us]",
    "reason": "str",
    "log": "str",
}


def probe_frame(probes: Sequence[Trial], baseline: Mapping[str, Choice]) -> pd.DataFrame:
    """One row per finished probe. Without probes, the frame has the columns of the baseline's config.

    Columns: `number`, `stage`, `round`; every key of a config by its name; `outcome`, `cause`, `feasible`, `score`; the
    figures of a `Measurement` under the same names with `peak_mib` beside `peak_bytes`, missing where the probe did not
    end `ok`; the phases of a step as `phase_data_s`, `phase_forward_s`, ...; the prediction as
    `predicted_samples_per_s`, ..., missing where there was none; `train_s`, `wall_s`, `disturbed`, `started`, `reason`,
    `log`. Times are seconds, memory is bytes except for `peak_mib`.
    """
    keys = _in_order(probe.config for probe in probes) or list(baseline)
    phases = _in_order(probe.outcome.measurement.phases_s for probe in probes if probe.outcome.measurement)
    phase_columns = {f"phase_{name}_s": "float64" for name in phases}
    types = {**_BEFORE, **dict.fromkeys(keys, "object"), **_FOUND, **_FIGURES, **phase_columns, **_PREDICTED, **_AFTER}
    frame = pd.DataFrame([_row(probe) for probe in probes], columns=list(types)).astype(types)
    frame[keys] = frame[keys].infer_objects()
    return frame


def front_frame(front: Sequence[Measured], baseline: Mapping[str, Choice], techniques: Techniques) -> pd.DataFrame:
    """One row for each config of the memory/throughput front, by increasing memory.

    Columns: `description`, every key of a config by its name, `samples_per_s` with its 95 % interval `samples_per_s_low`
    and `samples_per_s_high`, `step_s`, `peak_bytes`, `peak_mib`, `joules_per_sample` with its interval (missing where it is not
    known), `num_processes` (fresh processes behind the figures).
    """
    keys = _in_order(measured.config for measured in front) or list(baseline)
    bounds = ("samples_per_s_low", "samples_per_s_high")
    figures = ["samples_per_s", *bounds, "step_s", "peak_bytes", "peak_mib", *JOULES, "num_processes"]
    rows = [_front_row(measured, bounds, techniques) for measured in front]
    return pd.DataFrame(rows, columns=["description", *keys, *figures]).astype(dict.fromkeys(JOULES, "float64"))


def _front_row(measured: Measured, bounds: tuple[str, str], techniques: Techniques) -> dict[str, Any]:
    interval = dict(zip(bounds, measured.samples_per_s_ci, strict=True))
    joules = (measured.joules_per_sample, *(measured.joules_per_sample_ci or (None, None)))
    more = {"description": techniques.describe(measured.config), "peak_mib": measured.peak_bytes / MIB}
    return {**measured.config, **asdict(measured), **interval, **dict(zip(JOULES, joules, strict=True)), **more}


def _row(probe: Trial) -> dict[str, Any]:
    outcome, found = probe.outcome, probe.outcome.measurement
    row = {**probe.config.as_dict(), **vars(probe), "outcome": str(outcome.kind), "wall_s": probe.wall_s}
    row |= {"cause": outcome.cause, "log": outcome.log, "train_s": found.train_s if found else outcome.train_s}
    if probe.prediction:
        row |= {f"predicted_{name}": value for name, value in vars(probe.prediction).items()}
    if found:
        phases = {f"phase_{name}_s": seconds for name, seconds in found.phases_s.items()}
        row |= {**vars(found), **phases, "peak_mib": found.peak_bytes / MIB}
    return row


def _in_order(mappings: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in mappings for name in names))
