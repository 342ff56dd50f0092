"""Jobs in processes of their own: they can be followed and ended, and whatever happens in the user's code, a probe ends with
a recorded outcome and the next one works.
"""

import re
import subprocess
import time
from pathlib import Path

import pytest
import torch

from autotune.errors import TaskError
from autotune.probe.timing import MIN_BLOCKS
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Overflow
from autotune.runners import logs
from autotune.runners.jobs import ProbeJob
from autotune.runners.local import LocalRunner
from autotune.runners.portable import PortableRunner
from autotune.runners.runner import ProbeFault
from autotune.runners.worker import Channel
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

techniques = find_techniques()

MODEL = Path(__file__).parent.parent / "models" / "faulty.py"
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.3, max_warmup_s=0.3, timeout_s=30)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with LocalRunner(TaskSource.of(MODEL), device="cpu", logs=tmp_path_factory.mktemp("logs")) as runner:
        yield runner


def run(runner, batch_size, *, amp="off", **changes):
    return runner.probe(techniques.complete({"batch_size": batch_size, "amp": amp}), SETTINGS.replace(**changes))


@pytest.fixture(autouse=True)
def the_next_probe_still_works(runner):
    yield
    if runner._running is not None:  # of a test that failed
        runner.cancel(runner._running.ticket)
        runner.collect()
    outcome = run(runner, 4)
    assert outcome.kind is Kind.OK, outcome


def test_a_model_without_faults_is_measured(runner):
    outcome = run(runner, 8)
    assert outcome.kind is Kind.OK
    measured = outcome.measurement
    assert measured.samples_per_s_low <= measured.samples_per_s <= measured.samples_per_s_high
    assert measured.peak_bytes > 10 * 2**20
    assert measured.num_steps >= 4
    assert set(measured.phases_s) == {"data", "forward", "backward", "optimizer"}


def test_a_segmentation_fault_is_a_crash_with_its_signal(runner):
    outcome = run(runner, 10)
    assert outcome.kind is Kind.CRASHED
    assert "SIGSEGV" in outcome.cause


def test_os_exit_with_status_zero_is_a_crash(runner):
    outcome = run(runner, 11)
    assert outcome.kind is Kind.CRASHED
    assert "status 0" in outcome.cause


def test_sys_exit_with_status_zero_is_a_crash(runner):
    outcome = run(runner, 12)
    assert outcome.kind is Kind.CRASHED
    assert "sys.exit" in outcome.cause


def test_a_hang_that_ignores_sigterm_is_killed_at_the_time_out(runner):
    outcome = run(runner, 13, timeout_s=2)
    assert outcome.kind is Kind.TIMEOUT
    assert "2 s" in outcome.cause


def test_a_real_failed_allocation_is_out_of_memory(runner):
    outcome = run(runner, 14)
    assert outcome.kind is Kind.OOM
    assert outcome.attempted_bytes == 2**40


def test_a_failed_allocation_wrapped_in_another_exception_is_out_of_memory(runner):
    assert run(runner, 15).kind is Kind.OOM


def test_an_exception_that_only_speaks_of_memory_is_an_error(runner):
    outcome = run(runner, 16)
    assert outcome.kind is Kind.ERROR
    assert "just kidding" in outcome.cause


def test_pythons_memory_error_is_out_of_memory(runner):
    assert run(runner, 17).kind is Kind.OOM


def test_the_memory_limit_is_enforced_and_told_from_the_batch_that_fits(runner):
    assert run(runner, 100_000, memory_limit_bytes=limit_bytes(180)).kind is Kind.OOM
    assert run(runner, 100_000, memory_limit_bytes=limit_bytes(1800)).kind is Kind.OK


def test_megabytes_and_fake_results_on_stdout_reach_the_log_alone(runner, capfd):
    outcome = run(runner, 18)
    assert outcome.kind is Kind.OK
    assert outcome.measurement is not None
    assert capfd.readouterr().out == ""
    log = Path(outcome.log)
    assert 2**19 < log.stat().st_size < 2**21


def test_closing_every_descriptor_does_not_cut_the_result_off(runner):
    assert run(runner, 19).kind is Kind.OK


def test_changing_the_directory_does_no_harm(runner):
    assert run(runner, 20).kind is Kind.OK


def test_no_child_of_the_users_code_is_left(runner):
    assert run(runner, 21).kind is Kind.OK
    found = subprocess.run(["pgrep", "-f", "autotune-orphan"], capture_output=True, text=True)
    assert found.stdout == ""


def test_threads_that_still_run_do_not_keep_the_probe_from_ending(runner):
    started = time.monotonic()
    assert run(runner, 22).kind is Kind.OK
    assert time.monotonic() - started < SETTINGS.timeout_s


@pytest.mark.slow  # `cli/test_search.py` and `probe/test_leaks.py` hold it
def test_a_leak_is_measured_in_bytes_per_step_and_named_by_its_line(runner):
    outcome = run(runner, 23, num_steps=350, memory_limit_bytes=2**32)
    assert outcome.kind is Kind.OK
    assert outcome.measurement.growth_bytes_per_step == pytest.approx(2 * 2**20, rel=0.5)
    lines = MODEL.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "LEAKED.append" in line)
    (leak,) = outcome.measurement.leaks
    assert (leak.num_tensors, leak.shape, leak.dtype, leak.in_graph) == (1, (512 * 1024,), "float32", False)
    assert leak.place.startswith(f"faulty.py, line {number} ")


def test_training_without_a_leak_shows_no_growth(runner):
    measured = run(runner, 8, max_timed_s=1.0, interval=0.0001).measurement
    assert (measured.growth_bytes_per_step, measured.leaks) == (0, ())


def test_an_error_of_the_users_code_is_recorded_with_its_frames(runner):
    outcome = run(runner, 24)
    assert outcome.kind is Kind.ERROR
    assert "no such word" in outcome.cause
    assert "user_error" in outcome.detail


def test_a_sigkill_that_the_kernel_did_not_send_for_memory_is_a_crash(runner):
    outcome = run(runner, 25)
    assert outcome.kind is Kind.CRASHED
    assert "SIGKILL" in outcome.cause


def test_a_loss_that_is_nan_in_fp16_only_is_nonfinite_there_only(runner):
    outcome = run(runner, 8, amp="fp16")
    assert outcome.kind is Kind.NONFINITE and not outcome.detail  # no line of the user's raised it
    assert outcome.overflow == Overflow(phase="loss", value="nan")
    assert "nan was first in the loss, outside of the model's modules: compute it in fp32" in outcome.cause
    assert run(runner, 8, amp="off").kind is Kind.OK


def test_a_config_too_slow_to_be_worth_timing_is_measured_by_its_warm_up(runner):
    outcome = run(runner, 8, slowest_samples_per_s=1e12)
    assert outcome.kind is Kind.OK
    assert outcome.measurement.cut_short
    assert 0 < outcome.measurement.samples_per_s < 1e12
    assert not run(runner, 8, slowest_samples_per_s=1e-3).measurement.cut_short


def job(batch_size, **changes):
    config = techniques.complete({"batch_size": batch_size})
    return ProbeJob(config=config, settings=SETTINGS.replace(**changes))


def until(runner, ticket, is_there):
    """Follows a probe until its progress is what a test waits for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        progress = runner.progress(ticket)
        if progress is None or is_there(progress):
            return progress
        time.sleep(0.02)
    raise AssertionError(f"the probe only came to {progress}")


def test_a_probe_is_followed_while_it_runs_and_cancelled(runner):
    ticket = runner.submit(job(8, num_steps=10**6))
    progress = until(runner, ticket, lambda progress: progress.stage == "timing")
    assert progress.num_micro_steps >= 3 and progress.train_s > 0 and progress.peak_bytes > 10 * 2**20
    assert runner.collect(timeout_s=0.01) is None
    runner.cancel(ticket)
    outcome = runner.collect().result
    assert (outcome.kind, outcome.stage) == (Kind.TIMEOUT, "timing")
    assert "ended early" in outcome.cause
    assert outcome.bound.samples_per_s_high > 0 and outcome.bound.peak_bytes_low >= progress.peak_bytes
    assert runner.progress(ticket) is None


def test_a_job_that_is_cancelled_before_it_began_ends_too(runner):
    ticket = runner.submit(job(8, num_steps=10**6))
    runner.cancel(ticket)
    assert runner.collect().result.kind is Kind.TIMEOUT


def test_cancelling_what_has_ended_does_no_harm_to_the_next(runner):
    ticket = runner.submit(job(8))
    until(runner, ticket, lambda progress: runner._running._result is not None)
    runner.cancel(ticket)
    assert runner.collect().result.ok
    assert run(runner, 8).ok


def test_whatever_uses_the_device_waits_for_what_its_predecessor_still_holds(runner, monkeypatch):
    waits = []
    monkeypatch.setattr(runner._device, "settle", lambda: waits.append(1))
    run(runner, 8)
    assert waits
    waits.clear()
    runner.trace([techniques.complete({"batch_size": 8})], "cpu", 60)
    assert not waits


def test_there_is_one_slot(runner):
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        runner.collect()
    ticket = runner.submit(job(8))
    with pytest.raises(RuntimeError, match="the slot is taken; collect a job first"):
        runner.submit(job(8))
    finished = runner.collect()
    assert finished.ticket == ticket and finished.result.ok


def test_a_probe_killed_after_some_micro_steps_leaves_a_bound(runner):
    measured = run(runner, 8).measurement
    outcome = run(runner, 8, num_steps=10**6, timeout_s=3)
    assert outcome.kind is Kind.TIMEOUT and outcome.train_s > 0
    assert outcome.bound.samples_per_s_high >= 0.5 * measured.samples_per_s  # its fastest step was no slower than usual
    assert 0.5 * measured.peak_bytes < outcome.bound.peak_bytes_low < 2 * measured.peak_bytes


def test_a_probe_killed_before_its_first_micro_step_leaves_none(runner):
    assert run(runner, 13, timeout_s=2).bound is None


def test_a_supervisor_that_dies_is_a_fault_and_the_next_probe_gets_another(runner):
    runner.submit(job(8, num_steps=10**6))
    runner._connection._process.kill()
    with pytest.raises(ProbeFault, match="SIGKILL"):
        runner.collect()
    assert run(runner, 8).ok


def test_an_unread_pipe_does_not_hold_a_probe_up(runner):
    ticket = runner.submit(job(8, num_steps=10**6))
    until(runner, ticket, lambda progress: progress.stage == "timing")
    for _ in range(2000):  # more than a pipe holds
        Channel(runner._channel).offer({"progress": {"stage": "timing", "num_micro_steps": 1}})
    runner.cancel(ticket)
    assert runner.collect().result.kind is Kind.TIMEOUT


def test_what_the_author_states_and_how_to_name_the_task_are_known(runner):
    assert runner.task_name == runner.default_study == "faulty"
    assert runner.stated.model.endswith("tests/models/faulty.py")
    assert runner.notes == () and runner.slots()[0].device.name == "cpu"


def test_a_task_that_was_found_by_itself_is_named_with_what_holds_it(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(
        "import autotune, torch\ntask = autotune.Task(build_model=lambda: torch.nn.Linear(2, 2), make_batch=torch.rand)\n"
    )
    monkeypatch.chdir(tmp_path)
    for make in (LocalRunner, PortableRunner):
        with make(TaskSource.of("model.py"), device="cpu", logs=tmp_path / "logs") as runner:
            assert runner.stated.model == "model.py:task"


def test_a_probe_of_a_task_built_in_python_begins_with_the_weights_and_batches_that_were_handed_over(tmp_path):
    vectors, rows = torch.ones(50, 30), torch.ones(64, 30)

    def build_model():
        model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(vectors, freeze=False))
        print("begins with", model[0].weight.mean().item())
        return model

    def training_step(model, batch):
        print("trains on", batch.mean().item())
        return (model[0].weight.mean() - batch.mul_(0.5)).square().mean()

    task = Task(build_model=build_model, make_batch=lambda n: rows[:n], training_step=training_step)
    with LocalRunner(TaskSource.of(task), device="cpu", logs=tmp_path) as runner:
        for _ in range(2):
            outcome = run(runner, 4)
            assert outcome.kind is Kind.OK, outcome
            log = Path(outcome.log).read_text()
            assert set(re.findall("begins with (.*)", log)) == {"1.0"} and re.findall("trains on (.*)", log)[0] == "1.0"


def test_a_new_interpreter_for_each_probe_does_the_same(tmp_path):
    with LocalRunner(TaskSource.of(MODEL), device="cpu", logs=tmp_path, fork=False) as runner:
        assert "every probe starts a new interpreter" in runner.notes[0]
        assert run(runner, 8).ok


def test_an_import_that_takes_too_long_is_ended_at_once_and_nothing_of_ours_is_shown_as_the_users(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n" + MODEL.read_text() + "\nprint('reading the data', flush=True)\ntime.sleep(6)\n")
    started_s = time.monotonic()
    runner = LocalRunner(TaskSource.of(slow), device="cpu", logs=tmp_path / "logs", import_timeout_s=0.5)
    with pytest.raises(TaskError, match="did not end within 500 ms") as caught, runner:
        pass
    assert "BrokenPipe" not in caught.value.frames
    assert time.monotonic() - started_s < 6  # of the sleep alone


def test_a_module_that_cannot_be_imported_leaves_no_logs_behind(tmp_path):
    (tmp_path / "broken.py").write_text("print('about to fail')\nraise ValueError('not today')\n")
    with (
        pytest.raises(TaskError, match="not today"),
        LocalRunner(TaskSource.of(tmp_path / "broken.py"), device="cpu", logs=tmp_path / "logs"),
    ):
        pass
    assert not (tmp_path / "logs").exists()


def test_the_oldest_logs_go_and_none_is_kept_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "KEPT_LOGS", 3)
    for number in range(9998, 10003):
        (tmp_path / f"{number}-probe.log").write_text("printed")
    with LocalRunner(TaskSource.of(MODEL), device="cpu", logs=tmp_path) as runner:
        outcome = run(runner, 18)
    assert Path(outcome.log).name == "10003-probe.log"
    kept = sorted(log.name for log in tmp_path.iterdir())
    assert kept == ["10000-probe.log", "10001-probe.log", "10002-probe.log", "10003-probe.log"]


def test_a_probe_that_is_far_from_the_front_is_not_timed_unless_it_takes_less_memory(runner):
    patient = {"interval": 1e-6, "max_timed_s": 3.0}
    assert run(runner, 8, front=((1.0, 1e12),), **patient).measurement.cut_short
    leaner = run(runner, 8, front=((1e15, 1e12),), **patient).measurement  # less memory than what is faster
    assert len(leaner.block_samples_per_s) > MIN_BLOCKS
