"""A recorded table in the place of a device: inspection, probes, traces and clock come from it, and nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.api import search
from autotune.prediction.traces import Traces, UpdateTrace
from autotune.records.config import Config, ProbeSettings
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind
from autotune.runners import table
from autotune.runners.jobs import CheckJob, InspectJob, NotCompared
from autotune.runners.replay import ReplayRunner
from autotune.runners.table import Header, Row, Table, TableError
from autotune.space import Space, build_space
from autotune.techniques import find_techniques
from tests.runners.test_table import HEADER, config, ok, written

STUDIES = Path(__file__).parent.parent.parent / "studies"

SETTINGS = ProbeSettings(memory_limit_bytes=None)
SPEEDS = (90.0, 100.0, 110.0)


@pytest.fixture
def recorded(tmp_path: Path) -> Table:
    rows = [Row(config=config(), repeat=i, outcome=ok(config(), speed)) for i, speed in enumerate(SPEEDS)]
    return table.read(written(tmp_path, *rows), find_techniques())


def speeds(runner: ReplayRunner, which: Config, number: int) -> list[float]:
    found = [runner.probe(which, SETTINGS).measurement for _ in range(number)]
    return [measured.samples_per_s for measured in found if measured is not None]


def test_every_repeat_is_drawn_once_before_any_is_drawn_again(recorded: Table) -> None:
    drawn = speeds(ReplayRunner(recorded, seed=1), config(), 6)
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == list(SPEEDS)


def test_the_order_depends_on_the_seed_alone(recorded: Table) -> None:
    orders = {tuple(speeds(ReplayRunner(recorded, seed=seed), config(), 3)) for seed in range(20)}
    assert speeds(ReplayRunner(recorded, seed=3), config(), 3) == speeds(ReplayRunner(recorded, seed=3), config(), 3)
    assert len(orders) > 2


def test_a_limit_below_the_recorded_peak_is_out_of_memory(recorded: Table) -> None:
    runner = ReplayRunner(recorded)
    outcome = runner.probe(config(), SETTINGS.replace(memory_limit_bytes=10**9 - 1))
    assert (outcome.kind, outcome.peak_bytes, outcome.wall_s) == (Kind.OOM, 10**9 - 1, 1.5)
    assert runner.probe(config(), SETTINGS.replace(memory_limit_bytes=10**9)).ok


def test_a_choice_that_was_not_swept_is_named(recorded: Table) -> None:
    with pytest.raises(TableError, match="checkpoint_segments was swept over 0"):
        ReplayRunner(recorded).probe(config(checkpoint_segments=2), SETTINGS)


def test_a_combination_that_was_not_swept_is_an_error(recorded: Table) -> None:
    with pytest.raises(TableError, match="combination"):
        ReplayRunner(recorded).probe(config(batch_size=8), SETTINGS)


def test_a_runner_may_have_less_memory_than_the_device_that_was_recorded(recorded: Table) -> None:
    runner = ReplayRunner(recorded, memory_limit_bytes=10**9 - 1)
    assert runner.slots()[0].device.free_bytes == 10**9 - 1
    assert runner.probe(config(), SETTINGS).kind is Kind.OOM


def test_the_clock_counts_recorded_seconds(recorded: Table) -> None:
    runner = ReplayRunner(recorded)
    for number in range(3):
        assert runner.now_s() == number * 1.5
        runner.probe(config(), SETTINGS)


def test_a_study_of_replays_has_a_name_of_its_own(recorded: Table) -> None:
    assert (ReplayRunner(recorded).task_name, ReplayRunner(recorded).default_study) == ("closed", "closed-replay")


def test_gradients_are_not_compared(recorded: Table) -> None:
    found = ReplayRunner(recorded).run(CheckJob(config=config(), settings=SETTINGS, batch_size=4))
    assert isinstance(found, NotCompared) and "recorded table" in found.reason


@pytest.mark.parametrize("path", [*sorted(STUDIES.glob("*/cpu.csv")), STUDIES / "gpt" / "cpu.2.csv"], ids=str)
def test_the_space_of_a_recorded_study_is_what_was_swept(path: Path) -> None:
    with ReplayRunner(path) as runner:
        found = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=1.0))
    assert isinstance(found, Inspection)
    space, notes = build_space(found, find_techniques())
    swept = table.read(path, find_techniques())
    assert set(space) == set(swept.figures) and notes == []
    assert found.device == replace(swept.header.device_info(), no_energy=swept.no_energy)
    assert "holds no energy" in swept.no_energy  # it was recorded before that was measured
    assert swept.header.baseline.items() <= found.baseline.items()  # a technique that is younger than the table is off


def test_reasons_notes_and_facts_of_the_inspection_come_back(tmp_path: Path) -> None:
    facts = replace(HEADER.inspection(find_techniques()).facts, has_batchnorm=True)
    header = replace(HEADER, reasons={"pin_memory": "no GPU"}, notes={"amp": "mind the scale"}, facts=facts)
    table.start(tmp_path / "some.csv", header)
    found = ReplayRunner(tmp_path / "some.csv").run(InspectJob(memory_limit_bytes=None, timeout_s=1.0))
    assert isinstance(found, Inspection)
    assert (found.support["pin_memory"].reason, found.support["amp"].note) == ("no GPU", "mind the scale")
    assert found.facts == facts and facts.num_parameters == HEADER.num_parameters


def test_a_choice_that_acts_in_every_config_is_in_the_space_of_its_table_too(tmp_path: Path) -> None:
    which = config(attention="cudnn")  # without amp: only a model that is in a short type itself gains by it
    header = replace(HEADER, choices={**HEADER.choices, "attention": ("default", "cudnn")})

    def swept(name: str, header: Header) -> Space:
        table.start(tmp_path / name, header)
        table.append(tmp_path / name, header, Row(config=which, repeat=0, outcome=ok(which, 90.0)))
        found = ReplayRunner(tmp_path / name).run(InspectJob(memory_limit_bytes=None, timeout_s=1.0))
        assert isinstance(found, Inspection)
        return build_space(found, find_techniques())[0]

    assert which in set(swept("short.csv", replace(header, always={"attention": ("cudnn",)})))
    assert which not in set(swept("fp32.csv", header))


def test_traces_come_from_the_file_beside_the_table(tmp_path: Path) -> None:
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=ok(config(), 90.0)))
    update = UpdateTrace(state_bytes=8.0, first=(0.0,) * 5, later=(0.0,) * 5)
    table.write_traces(path, Traces(target="cpu", updates={(): update}))
    found = ReplayRunner(path).trace([config()], "cpu", 1.0)
    assert found.updates == {(): update}
    assert found.failures == {"model: nothing switched on": "closed.traces.json holds no trace of it"}


def test_a_table_without_traces_says_so(recorded: Table) -> None:
    found = ReplayRunner(recorded).trace([config()], "cpu", 1.0)
    assert not found.models and set(found.failures.values()) == {
        "there is no closed.traces.json with traces beside the table"
    }


def test_a_replayed_answer_names_the_file_that_runs_it(tmp_path: Path) -> None:
    gpt = STUDIES / "gpt"
    runner = ReplayRunner(gpt / "cpu.csv")
    found = search(gpt / "model.py", runner=runner, budget="15s", trials=1, storage=str(tmp_path / "gpt.db"))
    assert Path(found.model).samefile(gpt / "model.py")


def test_a_table_of_two_processes_is_searched_as_two_processes(tmp_path: Path) -> None:
    gpt = STUDIES / "gpt"
    runner = ReplayRunner(gpt / "cpu.2.csv")
    found = search(gpt / "model.py", runner=runner, budget="5m", storage=str(tmp_path / "gpt.db"))
    swept = table.read(gpt / "cpu.2.csv", find_techniques())
    assert swept.header.world.size == found.subject.num_processes == 2
    answer = Config(tuple(found.config.items()))
    assert answer.plan_in(swept.header.world).samples_per_step == swept.header.global_batch
    assert answer in swept.figures
