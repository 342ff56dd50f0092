"""The names that a task gives its architectures, and which of them is built."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autotune import prepare
from autotune.errors import ConfigError, TaskError
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.variant import Variant

narrow_task = find_techniques().narrow_task
trained_by = find_techniques().trained_by

WIDTHS = {"base": 16, "small": 4}


def build_model(variant: str) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTHS[variant]), nn.ReLU(), nn.Linear(WIDTHS[variant], 4))


@pytest.fixture
def task(make_task: Any) -> Task:
    made: Task = make_task(build_model, variants=["base", "small"], baseline={"batch_size": 4})
    return made


@pytest.mark.parametrize(("config", "width"), [({}, 16), ({"variant": "base"}, 16), ({"variant": "small"}, 4)])
def test_the_first_is_built_unless_a_config_names_another(task: Task, config: dict[str, Any], width: int) -> None:
    session = prepare(task, config, device="cpu")
    assert session.model.get_parameter("0.weight").shape[0] == width
    assert session.step(task.batch(4)).isfinite()


def test_all_are_offered_and_the_narrower_task_trains_one(make_setting: Any, task: Task) -> None:
    assert Variant().support(make_setting(task)).choices == ("base", "small")
    small = narrow_task(task, {"variant": "small"})
    assert small.model().get_parameter("0.weight").shape[0] == 4
    assert trained_by(small, {}) == {"variant": "small", "freeze": "none"}


def test_a_task_without_names_has_none_to_offer(make_setting: Any, make_task: Any) -> None:
    plain = make_task(lambda: nn.Linear(8, 4))
    assert "VARIANTS" in Variant().support(make_setting(plain)).reason
    with pytest.raises(ConfigError, match="the task names none"):
        prepare(plain, {"variant": "small"}, device="cpu")


def test_a_name_that_the_task_does_not_give_is_refused(task: Task) -> None:
    with pytest.raises(ConfigError, match="variant=tiny is no architecture of the task; expected one of base, small"):
        prepare(task, {"variant": "tiny"}, device="cpu")


def test_build_model_must_take_a_name_and_the_names_must_be_a_list(make_task: Any) -> None:
    with pytest.raises(TaskError, match=r"cannot be called as build_model\(variant_name\)"):
        make_task(lambda: nn.Linear(8, 4), variants=["base"])
    with pytest.raises(TaskError, match=r"variants \(VARIANTS in a model file\) is 'base'; expected a list"):
        make_task(build_model, variants="base")
