"""How many probes run at once is what the baseline shows: it runs alone, then beside others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import Config, ProbeSettings
from autotune.records.inspection import Inspection, Support
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import Neighbours
from autotune.runners.runner import NoSlotLeft, SlotLost
from autotune.space import build_space
from autotune.study.reading import load_study
from autotune.tuning.at_once import AtOnce
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.search import answer
from autotune.tuning.state import Search
from tests.closed_form import ClosedFormRunner, inspection, make_search, techniques

FOUR = ("a", "b", "c", "d")
BASE = Config((("batch_size", 4),))


@dataclass
class Machine(ClosedFormRunner):
    """Slots that slow each other down by a share for each neighbour, on a clock on which a probe takes a second."""

    num_slots: int = 4
    loss: float = 0.0
    lost: tuple[str, ...] = ()  # slots that die at their second probe
    all_lost_at: int = 1000  # number of the probe at which all slots die
    gains_at: int = 1000  # number of the probe after which there is one more
    killer: Config | None = None  # the config that every slot dies of

    def __post_init__(self) -> None:
        super().__post_init__()
        self.widths: list[int] = []
        self.starts: list[tuple[Config, int]] = []  # a config, and how many ran beside it when it started
        self._served: list[str] = []
        self._gone: list[str] = []

    def now_s(self) -> float:
        return self.passed_s

    def takes_s(self, job: Any, result: Any) -> float:
        return 1.0

    def slots(self) -> Any:
        return tuple(slot for slot in super().slots() if slot.name not in self._gone)

    def new_slots(self) -> tuple[str, ...]:
        if len(self._served) < self.gains_at:
            return ()
        self.gains_at, self.num_slots = 1000, self.num_slots + 1
        return (f"slot {self.num_slots - 1}",)

    def submit(self, job: Any, slot: str = "") -> int:
        if len(self._served) >= self.all_lost_at:
            raise NoSlotLeft("there is no slot any more", ())
        if hasattr(job, "config"):
            if job.config == self.killer:
                self._gone.append(slot)
                raise SlotLost(f"the slot {slot} is taken out", slot)
            if slot in self.lost and self._served.count(slot):
                self._gone.append(slot)
                raise SlotLost(f"the slot {slot} is taken out", slot)
            self._served.append(slot)
            self.starts.append((job.config, len(self._finished)))
        ticket = super().submit(job, slot)
        self.widths.append(len(self._finished))
        return ticket

    def collect(self, timeout_s: float | None = None) -> Any:
        finished = super().collect(timeout_s)
        assert finished is not None
        result = finished.result
        if not isinstance(result, Outcome) or result.measurement is None:
            return finished
        num_beside = len({label.rpartition(" on ")[2] for label in result.beside})
        speed = result.measurement.samples_per_s * (1 - self.loss * num_beside)
        slower = replace(result.measurement, samples_per_s=speed)
        return replace(finished, result=replace(result, measurement=slower))


def explored(folder: Path, runner: Machine, found: Inspection | None = None, **changes: Any) -> Search:
    search = make_search(
        folder, runner, **{"inspection": found or inspection(), "num_trials": 16, "sampler": "random", **changes}
    )
    measure_baseline(search)
    explore(search, search.proposer())
    return search


def outcome(speed: float, beside: tuple[str, ...] = ()) -> Outcome:
    runner = ClosedFormRunner()
    config = make_config()
    found = runner.outcome_of(config, ProbeSettings(memory_limit_bytes=None)).measurement
    assert found is not None
    return Outcome(kind=Kind.OK, measurement=replace(found, samples_per_s=speed), beside=beside)


def make_config() -> Config:
    return techniques.complete({"batch_size": 4}, global_batch=96)


def test_the_baseline_runs_alone_and_then_beside_probes_on_all_slots(tmp_path: Path) -> None:
    search = explored(tmp_path, runner := Machine())
    baseline = search.history.space.baseline
    assert runner.starts[:2] == [(baseline, 0), (baseline, 0)]  # the others start right after it
    assert runner.widths[:5] == [1, 1, 2, 3, 4]
    alone, beside = [trial.outcome for trial in search.history.searched if trial.config == baseline]
    assert not alone.beside and len(beside.beside) == 3 and alone.slot == beside.slot == "slot 0"
    assert search.at_once.found == Neighbours(slots=tuple(f"slot {n}" for n in range(4)), most=4, losses=((4, 0.0),))


@pytest.mark.parametrize(("loss", "expected"), [(0.005, 4), (0.02, 2), (0.1, 1)])
def test_fewer_slots_are_used_where_probes_slow_each_other_down(tmp_path: Path, loss: float, expected: int) -> None:
    search = explored(tmp_path, runner := Machine(loss=loss), num_trials=24)
    assert search.at_once.width == expected
    assert runner.widths[-1] <= expected and max(runner.widths) == 4
    assert any("slow each other down" in text for text in search.warnings) == (expected < 4)
    assert load_study(tmp_path / "closed.db").facts.neighbours == search.at_once.found


def test_what_was_measured_beside_too_many_weighs_less(tmp_path: Path) -> None:
    search = explored(tmp_path, Machine(loss=0.1))
    crowded = [trial for trial in search.history.searched if len(trial.outcome.beside) >= 2]
    calm = [trial for trial in search.history.searched if not trial.outcome.beside]
    assert crowded and calm
    evidence = dict(search.history.evidence)
    assert not any(evidence[trial.config].disturbances for trial in calm)
    assert all(
        "slow each other down by" in evidence[trial.config].disturbances[0]
        for trial in crowded
        if trial.outcome.ok and trial.config != search.history.space.baseline
    )
    assert search.history.baseline == next(trial.outcome for trial in reversed(calm) if trial.stage == "baseline")


def test_a_later_search_of_the_study_knows_how_many_run_at_once(tmp_path: Path) -> None:
    explored(tmp_path, Machine(loss=0.02))
    search = make_search(tmp_path, Machine(loss=0.02), num_trials=4, sampler="random")
    assert search.at_once.width == 2 and search.at_once.wants() == ""


def test_one_lucky_run_alone_uses_no_fewer_slots() -> None:
    policy = AtOnce(FOUR)
    others = ("probe on b", "probe on c", "probe on d")
    assert policy.wants() == "alone" and policy.note_baseline(BASE, outcome(105.0)) == ""
    assert policy.wants() == "beside" and policy.note_baseline(BASE, outcome(100.0, others)) == ""
    assert policy.wants() == "beside" and policy.note_baseline(BASE, outcome(100.0, others)) == ""
    assert policy.wants() == "alone" and policy.note_baseline(BASE, outcome(100.0)) == ""
    assert policy.wants() == "" and policy.width == 4


def test_a_comparison_that_did_not_end_goes_on_in_the_next_search() -> None:
    others = ("probe on b", "probe on c", "probe on d")
    policy = AtOnce(FOUR)
    policy.note_baseline(BASE, outcome(100.0))
    later = AtOnce(FOUR, policy.found)
    assert later.wants() == "alone"
    for _ in range(2):
        later.note_baseline(BASE, outcome(100.0))
        later.note_baseline(BASE, outcome(70.0, others))
    assert later.width == 2
    last = AtOnce(FOUR, later.found)  # two at once were not compared yet
    assert last.width == 2 and last.wants() == "alone"


def test_a_baseline_whose_batch_was_halved_is_compared_with_itself() -> None:
    policy = AtOnce(FOUR)
    policy.note_baseline(BASE, outcome(110.0))
    smaller = Config((("batch_size", 2),))
    policy.note_baseline(smaller, outcome(100.0))
    policy.note_baseline(smaller, outcome(99.0, ("probe on b",)))
    assert policy.wants() == "" and policy.width == 4 and policy.found.losses == ((4, pytest.approx(0.01)),)


def test_a_baseline_that_fails_beside_others_is_not_compared_again() -> None:
    policy = AtOnce(FOUR)
    policy.note_baseline(BASE, outcome(100.0))
    policy.note_baseline(BASE, Outcome(kind=Kind.CRASHED, cause="it died"))
    assert policy.wants() == "" and policy.width == 4


def test_what_compiles_runs_alone(tmp_path: Path) -> None:
    found = inspection()
    found = replace(found, support={**found.support, "compile": Support(choices=("off", "default"))})
    search = explored(tmp_path, runner := Machine(), found)
    alone = [trial for trial in search.history.searched if trial.config["compile"] == "default"]
    assert alone and not any(trial.outcome.beside for trial in alone)
    assert max(runner.widths) > 1


def test_what_keeps_the_host_busier_than_the_baseline_does_runs_alone_beside_a_gpu() -> None:
    found = inspection()
    found = replace(found, support={**found.support, "num_workers": Support(choices=(0, 2))})
    space, _ = build_space(found, techniques)
    with_workers = space.complete({"num_workers": 2})
    policy = AtOnce(FOUR)
    assert policy.runs_alone(with_workers, space, "cuda:0") and not policy.runs_alone(space.baseline, space, "cuda:0")
    assert not policy.runs_alone(with_workers, space, "cpu")  # its workers run on the cores of its slot
    assert not policy.runs_alone(with_workers, replace(space, baseline=with_workers), "cuda:0")
    assert not AtOnce(("a",)).runs_alone(with_workers, space, "cuda:0")


def test_the_probe_of_a_slot_that_dies_goes_to_another(tmp_path: Path) -> None:
    search = explored(tmp_path, Machine(lost=("slot 2",)))
    assert search.at_once.slots == ["slot 0", "slot 1", "slot 3"] and search.num_faults == 0
    assert len(search.history.searched) == 16 and not search.history.running
    study = load_study(tmp_path / "closed.db")
    assert study.num_running == 0 and study.num_lost == 0
    assert search.at_once.found.left_out == ("the slot slot 2 is taken out",)
    assert "the slot slot 2 is taken out" in search.warnings


def test_a_config_that_two_slots_die_of_has_crashed_and_is_not_run_again(tmp_path: Path) -> None:
    baseline = build_space(inspection(), techniques)[0].baseline
    killer = baseline.replace(amp="bf16")
    search = explored(tmp_path, Machine(killer=killer), num_trials=64)
    assert len(search.at_once.slots) == 2
    [trial] = [trial for trial in search.history.searched if trial.config == killer]
    assert trial.outcome.kind is Kind.CRASHED and trial.outcome.cause.startswith("two slots were lost while it ran: ")


def test_a_slot_that_comes_later_is_used_at_once(tmp_path: Path) -> None:
    search = explored(tmp_path, runner := Machine(num_slots=2, gains_at=5))
    assert search.at_once.slots == ["slot 0", "slot 1", "slot 2"] and search.at_once.width == 3
    assert max(runner.widths[:6]) == 2 and max(runner.widths) == 3


def test_where_slots_slow_each_other_down_no_more_run_at_once_when_one_comes() -> None:
    policy = AtOnce(FOUR)
    policy.found = policy.found.at_most(2)
    policy.gain("e")
    assert policy.slots == [*FOUR, "e"] and policy.width == 2


def test_a_search_without_any_slot_left_ends_with_what_is_known(tmp_path: Path) -> None:
    search = make_search(tmp_path, Machine(all_lost_at=8), num_trials=16, sampler="random")
    result = answer(search)
    assert result.config and len(search.history.searched) == 8
    assert any("there is no slot any more; the search ended early" in text for text in result.warnings)
    assert load_study(tmp_path / "closed.db").num_running == 0


def test_without_anything_known_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(NoSlotLeft, match="there is no slot any more"):
        answer(make_search(tmp_path, Machine(all_lost_at=0)))
