"""Searching for the least energy: over a closed form in which the fastest config is not the thriftiest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.devices import rapl
from autotune.errors import ConfigError
from autotune.records.config import Config, ProbeSettings
from autotune.records.device import Slot
from autotune.records.objective import OBJECTIVES, Objective
from autotune.records.options import SearchOptions
from autotune.records.outcome import Measurement, Outcome
from autotune.records.result import Result
from autotune.runners import table
from autotune.runners.local import LocalRunner
from autotune.runners.replay import ReplayRunner
from autotune.runners.table import Row, Table
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.budget import AHEAD_S
from autotune.tuning.recommend import NothingFeasible
from autotune.tuning.search import search
from tests.closed_form import ClosedFormRunner, make_search

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


@dataclass
class CrowdedLater(Counted):
    """Others work beside each process of the baseline but the first, or of all the others."""

    of_baseline: bool = True

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        is_baseline = config.batch_size == 4 and config["amp"] == "off" and not config["checkpoint_segments"]
        is_baseline &= config["optimizer_impl"] == "default"
        if outcome.measurement is None or is_baseline != self.of_baseline or self.configs.count(config) == 1:
            return outcome
        return replace(outcome, measurement=replace(outcome.measurement, joules_per_sample=None, no_energy=OTHERS))


@pytest.mark.parametrize("of_baseline", [True, False])
def test_where_the_play_off_knows_no_energy_to_compare_the_answer_is_undecided(
    tmp_path: Path, short_play_off: None, of_baseline: bool
) -> None:
    result = found(tmp_path, CrowdedLater(of_baseline=of_baseline), objective="energy")
    assert result.verdict == "undecided" and not result.play_off.confirmed


def test_a_baseline_whose_energy_was_not_known_is_probed_again_by_the_next_search(
    tmp_path: Path, short_play_off: None
) -> None:
    with pytest.raises(NothingFeasible):
        found(tmp_path, Counted(crowded=tuple(range(8))), objective="energy")
    assert found(tmp_path, Counted(), objective="energy").verdict == "thriftier"


@pytest.mark.parametrize("objective", ["throughput", "energy"])
def test_a_share_of_the_energy_ahead_is_worth_as_much_search_as_the_same_share_of_the_time(
    tmp_path: Path, objective: str
) -> None:
    """The power is that of training on both sides, whatever it is."""
    made = make_search(tmp_path, Counted(), objective=objective)
    made.budget.is_auto = True
    assert made.budget.is_worth(0.01, 0.009 * AHEAD_S, made.history)
    assert not made.budget.is_worth(0.01, 0.011 * AHEAD_S, made.history)


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


class Heat(Objective):
    """An objective by what else an observer tells: all that it takes is this class and the observer's figure."""

    name, unit, better, worse, help = "heat", "temperature_c", "cooler", "hotter", "heat: the coolest device"
    less_is_better = observed = True
    rests_on_speed = False

    def figure(self, measured: Measurement) -> float:
        return measured.telemetry.get("temperature_c", math.inf)

    def worst(self) -> float:
        return -1000.0


class Warm(ClosedFormRunner):
    """Each sample of a micro batch heats the device, and short types do."""

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        heat_c = 20.0 + 5 * config.batch_size + (0 if config["amp"] == "off" else 30)
        if (found := outcome.measurement) is None:
            return outcome
        return replace(outcome, measurement=replace(found, telemetry={"temperature_c": heat_c}))


def test_an_objective_by_another_observed_figure_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_play_off: None
) -> None:
    monkeypatch.setitem(OBJECTIVES, "heat", Heat)
    options = SearchOptions.of({"budget": "30s", "trials": 12, "storage": str(tmp_path / "closed.db")})
    object.__setattr__(options, "objective", "heat")  # the option's words were read when it was made
    result = search(None, options, runner=Warm())
    assert result.config["amp"] == "off" and int(result.config["batch_size"]) < 4
    assert result.verdict == "cooler" and "Cooler." in result.summary()


FILES = """
import time
from pathlib import Path
import torch
from autotune.devices import rapl
from autotune.devices.cpu import CpuDevice

rapl.FOLDER = Path(__file__).parent
CpuDevice.own_work = lambda device: 1.0  # the machine of the tests has other work
COUNTER = rapl.FOLDER / "intel-rapl:0" / "energy_uj"
counted_to_s = time.monotonic()


def build_model():
    return torch.nn.Linear(64, 10)


def make_batch(n):
    return torch.randn(n, 64), torch.randint(10, (n,))


def training_step(model, batch):
    global counted_to_s
    began_s, counted_to_s = counted_to_s, time.monotonic()
    used_j = (10 + len(batch[0])) * (counted_to_s - began_s)  # so the processor draws 10 watts, and one for each sample
    COUNTER.write_text(str(int(COUNTER.read_text()) + round(used_j * 1e6)))
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_on_a_cpu_the_counters_of_its_sockets_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in {"name": "package-0", "max_energy_range_uj": "262143328850", "energy_uj": "0"}.items():
        (zone / name).write_text(text)
    (tmp_path / "net.py").write_text(FILES)
    monkeypatch.setattr(rapl, "FOLDER", tmp_path)
    settings = ProbeSettings(memory_limit_bytes=None, min_timed_s=1.0, max_timed_s=1.0, phases=False)
    with LocalRunner(TaskSource.of(tmp_path / "net.py"), device="cpu", logs=tmp_path / "logs") as runner:
        assert runner.slots()[0].device.no_energy == ""
        for size in (10, 40):
            measured = runner.probe(find_techniques().complete({"batch_size": size}), settings).measurement
            assert measured is not None and measured.counted[0].counter == "intel-rapl:0"
            assert measured.joules_per_sample == pytest.approx((10 + size) / measured.samples_per_s, rel=0.1)


def test_on_a_machine_that_is_never_alone_it_gives_up_soon_and_says_why(tmp_path: Path) -> None:
    runner = Counted(crowded=tuple(range(100)))
    with pytest.raises(NothingFeasible, match=r"2 probes ran .* their energy is not known: others did 40% of the work"):
        found(tmp_path, runner, objective="energy")
    assert len(runner.configs) == 4  # each of two was run again


def test_a_million_samples_cost_what_their_time_costs(tmp_path: Path, short_play_off: None) -> None:
    result = found(tmp_path, Counted(), price="$3.60/h")
    assert result.money is not None and result.baseline is not None
    assert result.money.per_million_samples == pytest.approx(1000 / result.samples_per_s)
    assert result.money.baseline_per_million_samples == pytest.approx(1000 / result.baseline.samples_per_s)
    data = result.to_dict()
    assert data["price"] == {"per_hour": 3.6, "before": "$", "after": ""}
    assert Result.from_dict(data) == result
    assert "A million samples cost $" in " ".join(result.summary().split())
