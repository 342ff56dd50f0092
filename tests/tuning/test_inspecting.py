"""A device is measured before the first search on it, and again only when what the figures depend on has changed. What the inspection
tells of the length of the training.
"""

from dataclasses import dataclass, replace
from typing import Any

from autotune.records.config import World
from autotune.records.device import NOT_MEASURED, Calibration, Rate
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import CalibrateJob, Job
from autotune.runners.runner import ProbeFault
from autotune.tuning.inspecting import calibrate_device, count_train_samples
from tests.closed_form import ClosedFormRunner, inspection

PLAIN = tuple(Rate(work=work, arithmetic="fp32", sizes=(64,), flops_per_s=(1e9,)) for work in ("matmul", "convolution"))
MEASURED = Calibration(rates=PLAIN)


@dataclass
class Measuring(ClosedFormRunner):
    """Counts how often its device is measured."""

    found: Any | ProbeFault = MEASURED
    num_measured: int = 0

    def result_of(self, job: Job[Any]) -> Any:
        if not isinstance(job, CalibrateJob):
            return super().result_of(job)
        self.num_measured += 1
        if isinstance(self.found, ProbeFault):
            raise self.found
        return self.found


def test_the_first_search_on_a_device_measures_it_and_others_read_that(tmp_path):
    for runner, times in ((Measuring(), 1), (Measuring(), 0)):
        assert calibrate_device(runner, runner.slots()[0].device, tmp_path) == (MEASURED, "")
        assert runner.num_measured == times


def test_other_arithmetic_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    runner = Measuring()
    calibrate_device(runner, runner.slots()[0].device, tmp_path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    calibrate_device(runner, runner.slots()[0].device, tmp_path)
    assert runner.num_measured == 2


def test_a_device_that_cannot_be_measured_is_searched_with_the_reason_and_tried_again(tmp_path):
    for found, why in ((Outcome(kind=Kind.CRASHED, cause="SIGILL"), "SIGILL"), (ProbeFault("gone"), "gone")):
        runner = Measuring(found=found)
        assert calibrate_device(runner, runner.slots()[0].device, tmp_path) == (NOT_MEASURED, why)
        assert runner.num_measured == 1


def test_figures_that_something_disturbed_are_not_kept(tmp_path):
    runner = Measuring(found=Calibration(rates=PLAIN[:1]))
    for _ in range(2):
        calibrate_device(runner, runner.slots()[0].device, tmp_path)
    assert runner.num_measured == 2


def test_what_stands_for_another_device_neither_keeps_nor_reads_calibrations(tmp_path):
    here, elsewhere = Measuring(), Measuring(found=NOT_MEASURED)
    calibrate_device(here, here.slots()[0].device, tmp_path)
    elsewhere.keeps_traces = False
    assert calibrate_device(elsewhere, elsewhere.slots()[0].device, tmp_path) == (NOT_MEASURED, "")


def test_what_was_measured_beside_other_work_is_measured_again_by_the_next_search(tmp_path):
    busy, calm = Measuring(found=replace(MEASURED, contention=0.4)), Measuring()
    assert calibrate_device(busy, busy.slots()[0].device, tmp_path)[0].contention == 0.4
    for _ in range(2):
        assert calibrate_device(calm, calm.slots()[0].device, tmp_path) == (MEASURED, "")
    assert calm.num_measured == 1


def test_the_steps_of_a_command_of_several_processes_take_the_samples_of_all() -> None:
    found = inspection(world=World(size=2))
    alone = inspection()
    options = SearchOptions(train_steps=10)
    assert count_train_samples(options, found) == 2 * count_train_samples(options, alone)
