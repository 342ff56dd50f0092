"""Sweeping a space into a table, and searching over the table instead of the device."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.records.config import Config, ProbeSettings
from autotune.records.options import SweepOptions
from autotune.records.outcome import Kind, Outcome
from autotune.runners import table
from autotune.runners.table import TableError
from autotune.space import build_space
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.sweep import Progress, _header, _run, sweep
from tests.arithmetic import has_arithmetic
from tests.closed_form import ClosedFormRunner

complete = find_techniques().complete

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
GRID = {
    "batch_size": (4, 12),
    "amp": ("off", "bf16"),
    "optimizer_impl": ("default",),
    "checkpoint_segments": (0,),
    "inplace_activations": (False,),
    "keep_heap": (False,),
}


def options(folder: Path, **changes: object) -> SweepOptions:
    small = SweepOptions(
        out=folder / "tiny.csv",
        device="cpu",
        grid=GRID,
        include=("amp",),  # a processor may only emulate bf16
        max_repeats=2,
        max_timed_s=0.05,
        max_warmup_s=0.05,
    )
    return replace(small, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def swept(folder: Path) -> list[Progress]:
    seen: list[Progress] = []
    sweep(TaskSource.of(TINY), options(folder), seen.append)
    return seen


@pytest.fixture
def measured(folder: Path, swept: list[Progress], tmp_path: Path) -> None:
    """Another sweep finds this machine measured, which takes 3 s."""
    kept = folder / ".calibration"
    if kept.exists():  # what was measured beside other work is not kept
        shutil.copytree(kept, tmp_path / ".calibration")


def test_every_config_is_measured_once_a_round_in_shuffled_order(swept: list[Progress]) -> None:
    rounds = [[p.row.config for p in swept if p.round == number] for number in range(2)]
    assert len(rounds[0]) == 4 and set(rounds[0]) == set(rounds[1]) and rounds[0] != rounds[1]
    assert [progress.left for progress in swept] == [3, 2, 1, 0] * 2


def test_the_table_holds_what_was_measured_and_on_what(folder: Path, swept: list[Progress]) -> None:
    found = table.read(folder / "tiny.csv", find_techniques())
    assert len(found.rows) == len(swept) and {figure.num_repeats for figure in found.figures.values()} == {2}
    assert all(row.outcome.measurement and row.outcome.measurement.peak_bytes > 10**8 for row in found.rows)
    header = found.header
    assert (header.task, header.global_batch, header.choices["batch_size"]) == ("tiny", 48, (4, 12))
    assert header.choices["accumulation_steps"] == (4, 12) and header.outside_bytes > 10**8


def test_the_tables_space_is_what_was_swept(folder: Path, swept: list[Progress]) -> None:
    found = table.read(folder / "tiny.csv", find_techniques())
    space, _ = build_space(found.header.inspection(find_techniques()), find_techniques())
    assert set(space) == set(found.figures)


def test_the_tables_inspection_is_the_tasks(folder: Path, swept: list[Progress]) -> None:
    found = table.read(folder / "tiny.csv", find_techniques()).header.inspection(find_techniques())
    assert found.facts.num_trainable == found.facts.num_parameters and not found.facts.has_batchnorm
    assert found.baseline_given and found.support["pin_memory"].reason


def test_the_table_holds_what_acts_in_every_config(folder: Path, swept: list[Progress]) -> None:
    found = table.read(folder / "tiny.csv", find_techniques()).header.inspection(find_techniques())
    support = {**found.support, "attention": replace(found.support["attention"], always=("cudnn",))}
    space, _ = build_space(found, find_techniques())
    settings = ProbeSettings(memory_limit_bytes=2**33)
    assert _header(replace(found, support=support), space, settings).inspection(find_techniques()).support == support


def test_traces_of_the_space_are_written_beside_the_table(folder: Path, swept: list[Progress]) -> None:
    found = table.read(folder / "tiny.csv", find_techniques())
    traceable = [
        c for c in found.figures if c["amp"] == "off" or has_arithmetic(str(c["amp"]))
    ]  # what is emulated is not
    assert found.traces is not None and all(
        found.traces.peak(config, find_techniques()) is not None for config in traceable
    )


@pytest.mark.usefixtures("measured")
def test_a_table_that_is_there_is_carried_on(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny.csv"
    copy.write_text("".join((folder / "tiny.csv").read_text().splitlines(keepends=True)[:-3]))
    seen: list[Progress] = []
    assert len(sweep(TaskSource.of(TINY), options(tmp_path), seen.append).rows) == 8
    assert [progress.round for progress in seen] == [1, 1, 1]


@pytest.mark.slow  # a process; what is missing at the end is recorded above
@pytest.mark.usefixtures("measured")
def test_a_round_that_was_taken_out_of_a_table_is_recorded_again(folder: Path, tmp_path: Path) -> None:
    head, rows = (lines := (folder / "tiny.csv").read_text().splitlines(keepends=True))[:3], lines[3:]
    (tmp_path / "tiny.csv").write_text("".join(head + rows[4:]))  # all but the first round
    seen: list[Progress] = []
    found = sweep(TaskSource.of(TINY), options(tmp_path), seen.append)
    assert [progress.round for progress in seen] == [0, 0, 0, 0]
    repeats = [sorted(row.repeat for row in measured) for measured in found.repeats.values()]
    assert repeats == [[0, 1]] * 4


def test_a_table_of_something_else_is_not_carried_on(folder: Path, swept: list[Progress]) -> None:
    with pytest.raises(TableError, match="choices was"):
        sweep(TaskSource.of(TINY), options(folder, grid={**GRID, "batch_size": (4, 24)}), lambda progress: None)


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_text("mine\n")
    with pytest.raises(TableError, match="is not a recorded table"):
        sweep(TaskSource.of(TINY), options(tmp_path), lambda progress: None)
    assert (tmp_path / "tiny.csv").read_text() == "mine\n"


@pytest.mark.usefixtures("measured")
def test_a_choice_outside_the_space_is_refused_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=5 cannot be swept.*possible: 1, 2, 3, 4"):
        sweep(TaskSource.of(TINY), options(tmp_path, grid={"batch_size": (5,)}), lambda progress: None)


class Crowded(ClosedFormRunner):
    """Others hold the memory of its first probe."""

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        return Outcome(kind=Kind.OOM, crowded=True) if len(self.configs) == 1 else outcome


def test_a_probe_whose_memory_others_held_is_run_once_more() -> None:
    runner = Crowded()
    config = complete({"batch_size": 4}, global_batch=96)
    assert _run(runner, config, ProbeSettings(memory_limit_bytes=None)).ok
    assert runner.configs == [config, config]
