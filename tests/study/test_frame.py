"""A study as pandas frames."""

from __future__ import annotations

import pandas as pd
import pytest
from pandas.api import types

from autotune.errors import ConfigError
from autotune.runners.command import Command
from autotune.study.reading import Study
from tests.report.sample_study import ANSWER, BASELINE, measured


def test_there_is_a_row_for_each_probe_and_a_column_for_each_technique(study: Study) -> None:
    frame = study.frame()
    assert list(frame["number"]) == [probe.number for probe in study.probes]
    assert set(BASELINE) <= set(frame.columns)


def test_no_column_of_a_probe_is_hidden_by_a_choice_of_a_command(study: Study) -> None:
    for column in {*study.frame().columns, *study.front().columns} - {*BASELINE}:
        with pytest.raises(ConfigError, match=f"a study tells {column} of each probe"):
            Command(f"python train.py {{batch_size}} {{{column}}}", {column: {"off": ""}})


def test_the_figures_are_those_of_the_measurement(study: Study) -> None:
    first, found = study.frame().iloc[0], measured(BASELINE).measurement
    assert found is not None
    assert first["samples_per_s"] == found.samples_per_s
    assert (first["peak_bytes"], first["peak_mib"]) == (found.peak_bytes, found.peak_bytes / 2**20)
    assert first["phase_backward_s"] == found.phases_s["backward"]


def test_columns_have_plain_types(study: Study) -> None:
    frame = study.frame()
    assert all(
        types.is_integer_dtype(frame[name]) for name in ("number", "round", "batch_size", "peak_bytes", "num_steps")
    )
    assert all(
        types.is_float_dtype(frame[name]) for name in ("samples_per_s", "step_s", "wall_s", "score", "phase_data_s")
    )
    assert all(types.is_string_dtype(frame[name]) for name in ("stage", "amp", "outcome", "cause", "reason"))
    assert all(types.is_bool_dtype(frame[name]) for name in ("feasible", "disturbed", "channels_last"))
    assert types.is_datetime64_any_dtype(frame["started"])


def test_a_failed_probe_has_a_cause_and_no_figures(study: Study) -> None:
    frame = study.frame()
    oom = frame[frame["outcome"] == "oom"]
    assert len(oom) == 5 and oom["cause"].str.contains("MiB").all()
    assert oom[["samples_per_s", "peak_bytes", "step_s"]].isna().all(axis=None) and not oom["feasible"].any()


def test_a_study_without_probes_has_an_empty_frame_with_all_columns(study: Study, empty: Study) -> None:
    frame = empty.frame()
    assert frame.empty
    assert set(study.frame().columns) - set(frame.columns) == {
        f"phase_{name}_s" for name in ("data", "forward", "backward", "optimizer")
    }
    assert empty.front().empty


def test_the_front_has_a_row_for_each_config_in_words_and_in_choices(study: Study) -> None:
    front = study.front()
    last = front.iloc[-1]
    assert last["description"] == "batch 24 x2, bf16, fused"
    assert {name: last[name] for name in ANSWER} == ANSWER.as_dict()
    assert front[["joules_per_sample", "joules_per_sample_low", "joules_per_sample_high"]].isna().all(axis=None)
    assert last["samples_per_s_low"] < last["samples_per_s"] < last["samples_per_s_high"]
    pd.testing.assert_series_equal(front["peak_mib"] * 2**20, front["peak_bytes"].astype(float), check_names=False)


def test_the_probes_can_be_grouped_and_pivoted_at_once(study: Study) -> None:
    frame = study.frame()
    table = frame[frame["feasible"]].pivot_table(
        index="batch_size", columns="amp", values="samples_per_s", aggfunc="max"
    )
    assert table.loc[16, "bf16"] > table.loc[16, "off"]
    assert table.loc[16, "off"] == pytest.approx(
        frame[(frame["batch_size"] == 16) & (frame["amp"] == "off")]["samples_per_s"].max()
    )
