"""Searching for the least energy: over a closed form in which the fastest config is not the thriftiest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.records.config import Config, ProbeSettings
from autotune.records.device import Slot
from autotune.records.options import SearchOptions
from autotune.records.outcome import Outcome
from autotune.records.result import Result
from autotune.runners import table
from autotune.runners.replay import ReplayRunner
from autotune.runners.table import Row, Table
from autotune.techniques import find_techniques
from autotune.tuning.search import search
from tests.closed_form import ClosedFormRunner

GPT = Path(__file__).parent.parent.parent / "studies" / "gpt"
OTHERS = "others did 40% of the work that the counter of energy counts"


@dataclass
class Counted(ClosedFormRunner):
    """bf16 is 1.4 times as fast and draws 2.5 times the power; a larger batch draws a little more.

    Attributes:
        crowded: numbers of the probes beside which others worked, so that their energy is not known.
    """

    no_energy: str = ""
    crowded: tuple[int, ...] = ()

    def slots(self) -> tuple[Slot, ...]:
        return tuple(replace(slot, device=replace(slot.device, no_energy=self.no_energy)) for slot in super().slots())

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        if (found := outcome.measurement) is None:
            return outcome
        if len(self.configs) - 1 in self.crowded:
            return replace(outcome, measurement=replace(found, no_energy=OTHERS))
        joules = self.power_w(config) / found.samples_per_s
        return replace(outcome, measurement=replace(found, joules_per_sample=joules))

    def power_w(self, config: Config) -> float:
        return {"off": 100.0, "bf16": 250.0, "fp16": 200.0}[str(config["amp"])] + 0.2 * config.batch_size


def found(tmp_path: Path, runner: ClosedFormRunner, **options: Any) -> Result:
    asked = {"budget": "30s", "trials": 8, "sampler": "random", "storage": str(tmp_path / "closed.db"), **options}
    return search(None, SearchOptions.of(asked), runner=runner)


@pytest.mark.parametrize("sampler", ["cost-model", "gp"])
def test_the_same_search_by_both_objectives_ends_with_different_answers(
    tmp_path: Path, sampler: str, short_play_off: None
) -> None:
    fastest = found(tmp_path, Counted(noise=0.01), sampler=sampler, study="speed")
    thriftiest = found(tmp_path, Counted(noise=0.01), sampler=sampler, study="energy", objective="energy")
    assert (fastest.config["amp"], thriftiest.config["amp"]) == ("bf16", "off")
    assert thriftiest.verdict == "thriftier" and fastest.verdict == "faster"
    assert thriftiest.joules_per_sample < fastest.joules_per_sample
    assert thriftiest.samples_per_s < fastest.samples_per_s


def test_the_answers_energy_has_the_interval_of_paired_processes(tmp_path: Path, short_play_off: None) -> None:
    result = found(tmp_path, Counted(noise=0.01), objective="energy")
    assert result.baseline is not None and result.energy.energy_ratio_ci is not None
    low, high = result.energy.energy_ratio_ci
    assert low < result.energy_ratio < high < 1
    assert result.energy_ratio == pytest.approx(result.joules_per_sample / result.baseline.joules_per_sample)


def test_energy_is_measured_beside_the_speed_and_is_an_axis_of_the_front(tmp_path: Path, short_play_off: None) -> None:
    result = found(tmp_path, Counted())
    assert result.goal.objective == "throughput" and result.energy.energy_ratio is not None
    assert {config.config["amp"] for config in result.front} >= {"off", "bf16"}  # none is best in all three
    assert all(config.joules_per_sample is not None for config in result.front)


def test_where_nothing_counts_energy_the_objective_is_refused_before_the_search_and_speed_is_not(
    tmp_path: Path, short_play_off: None
) -> None:
    runner = Counted(no_energy="nothing counts it here; let root allow it")
    with pytest.raises(ConfigError, match=r"^--objective energy: nothing counts it here; let root allow it; or take"):
        found(tmp_path, runner, objective="energy")
    assert not runner.configs and not (tmp_path / "closed.db").exists()
    assert found(tmp_path, ClosedFormRunner()).energy.joules_per_sample is None


def test_what_compiling_takes_is_not_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_steps cannot be given with --objective energy"):
        found(tmp_path, Counted(), objective="energy", train_steps=1000)


def test_a_probe_beside_others_is_run_again_and_a_process_of_the_play_off_left_out(
    tmp_path: Path, short_play_off: None
) -> None:
    first = Counted(crowded=(0, 3))
    assert found(tmp_path, first, objective="energy", study="first").verdict == "thriftier"
    assert first.configs[0] == first.configs[1] and first.configs[3] == first.configs[4]
    last = len(first.configs) - 1
    crowded = Counted(crowded=(0, 3, last - 1, last))
    assert found(tmp_path, crowded, objective="energy", study="second").verdict == "thriftier"


def power_w(config: Config) -> float:
    """Short types and large batches draw more."""
    return (100.0 if config["amp"] == "off" else 220.0) * config.batch_size**0.1


def with_energy(recorded: Table) -> Table:
    """A recorded table as if the energy of each probe had been counted."""

    def counted(row: Row) -> Row:
        if (found := row.outcome.measurement) is None:
            return row
        found = replace(found, joules_per_sample=power_w(row.config) / found.samples_per_s)
        return replace(row, outcome=replace(row.outcome, measurement=found))

    return replace(recorded, rows=tuple(map(counted, recorded.rows)))


def test_over_a_recorded_table_it_finds_the_least_energy(tmp_path: Path) -> None:
    recorded = with_energy(table.read(GPT / "cpu.csv", find_techniques()))
    options = {"objective": "energy", "budget": "2m", "storage": str(tmp_path / "gpt.db")}
    result = search(None, SearchOptions.of(options), runner=ReplayRunner(recorded))
    usable_bytes = (1 - result.goal.headroom) * result.goal.memory_limit_bytes
    joules = {
        config: power_w(config) / figure.samples_per_s
        for config, figure in recorded.figures.items()
        if figure.samples_per_s and figure.peak_bytes <= usable_bytes
    }
    fastest = max(joules, key=lambda config: recorded.figures[config].samples_per_s)
    assert joules[Config(tuple(result.config.items()))] < 1.02 * min(joules.values()) < joules[fastest]
    assert result.cost.probes < 60


def test_a_table_without_energy_is_not_searched_for_it() -> None:
    with pytest.raises(ConfigError, match=r"^--objective energy: the table .* holds no energy .* record it again"):
        search(None, SearchOptions.of({"objective": "energy"}), runner=ReplayRunner(GPT / "cpu.csv"))


def test_a_million_samples_cost_what_their_time_costs(tmp_path: Path, short_play_off: None) -> None:
    result = found(tmp_path, Counted(), price="$3.60/h")
    assert result.money is not None and result.baseline is not None
    assert result.money.per_million_samples == pytest.approx(1000 / result.samples_per_s)
    assert result.money.baseline_per_million_samples == pytest.approx(1000 / result.baseline.samples_per_s)
    data = result.to_dict()
    assert data["price"] == {"per_hour": 3.6, "before": "$", "after": ""}
    assert Result.from_dict(data) == result
    assert "A million samples cost $" in " ".join(result.summary().split())
