"""A result survives JSON, and results of earlier versions open."""

from __future__ import annotations

import json
import pickle

import pytest

from autotune.errors import StudyError
from autotune.records.formats import encode
from autotune.records.measured import Dropped
from autotune.records.result import FORMAT, DeviceUse, Result
from tests.report.sample_study import answer, but

RESULT = answer("sqlite:///gpt.db")


def test_a_result_survives_json() -> None:
    use = DeviceUse(arithmetic="bf16", flops_per_s=3e11, flops_share=0.6, bytes_per_s=9e9, bandwidth_share=0.2)
    for result in (RESULT, but(RESULT, use=use, tokens_per_s=1e4)):
        assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_fields_of_groups_lie_flat_and_are_attributes_as_well() -> None:
    data = RESULT.to_dict()
    assert not {"goal", "play_off", "reasons", "compiling", "cost", "subject"} & data.keys()
    for name, value in data.items():
        assert encode(getattr(RESULT, name)) == value
    assert (data["wall_s"], data["objective"], RESULT.wall_s) == (118.3, "throughput", RESULT.cost.wall_s)
    assert pickle.loads(pickle.dumps(RESULT)) == RESULT
    with pytest.raises(AttributeError, match="'Result' has no attribute 'wall'"):
        RESULT.wall  # noqa: B018


def test_a_finalist_that_was_dropped_stays_one() -> None:
    data = RESULT.to_dict()
    data["finalists"] = [{**data["finalists"][0], "dropped": "crashed: SIGSEGV"}]
    (finalist,) = Result.from_dict(data).finalists
    assert isinstance(finalist, Dropped)
    assert finalist.dropped == "crashed: SIGSEGV"


def test_a_result_of_an_earlier_format_opens() -> None:
    data = {
        name: value for name, value in RESULT.to_dict().items() if name not in ("format", "first_probe_s", "split_s")
    }
    data["num_retired"] = 3
    assert Result.from_dict(data) == RESULT


def test_a_result_of_a_later_format_is_refused_with_the_way_out() -> None:
    with pytest.raises(StudyError, match=f"format {FORMAT + 1}, this autotune reads up to {FORMAT}.*pip install"):
        Result.from_dict({**RESULT.to_dict(), "format": FORMAT + 1})
