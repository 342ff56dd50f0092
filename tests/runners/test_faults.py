"""Whatever happens in the user's code, a probe ends with a recorded outcome, and the next one works."""

import subprocess
import time
from pathlib import Path

import pytest

from autotune import techniques
from autotune.records.outcome import Kind
from autotune.records.settings import ProbeSettings
from autotune.runners.local import ProcessProber
from autotune.task.source import TaskSource

MODEL = Path(__file__).parent.parent / "models" / "faulty.py"
SETTINGS = ProbeSettings(device="cpu", memory_limit_bytes=2**30, max_timed_s=0.3, max_warmup_s=0.3, timeout_s=30)


@pytest.fixture(scope="module")
def prober(tmp_path_factory):
    with ProcessProber(TaskSource.of(MODEL), logs=tmp_path_factory.mktemp("logs")) as prober:
        yield prober


def run(prober, batch_size, *, amp="off", **changes):
    return prober.run(techniques.complete({"batch_size": batch_size, "amp": amp}), SETTINGS.replace(**changes))


@pytest.fixture(autouse=True)
def the_next_probe_still_works(prober):
    yield
    outcome = run(prober, 4)
    assert outcome.kind is Kind.OK, outcome


def test_a_model_without_faults_is_measured(prober):
    outcome = run(prober, 8)
    assert outcome.kind is Kind.OK
    measured = outcome.measurement
    assert measured.samples_per_s_low <= measured.samples_per_s <= measured.samples_per_s_high
    assert measured.peak_bytes > 10 * 2**20
    assert measured.num_steps >= 4
    assert set(measured.phases_s) == {"data", "forward", "backward", "optimizer"}


def test_a_segmentation_fault_is_a_crash_with_its_signal(prober):
    outcome = run(prober, 10)
    assert outcome.kind is Kind.CRASHED
    assert "SIGSEGV" in outcome.cause


def test_os_exit_with_status_zero_is_a_crash(prober):
    outcome = run(prober, 11)
    assert outcome.kind is Kind.CRASHED
    assert "status 0" in outcome.cause


def test_sys_exit_with_status_zero_is_a_crash(prober):
    outcome = run(prober, 12)
    assert outcome.kind is Kind.CRASHED
    assert "sys.exit" in outcome.cause


def test_a_hang_that_ignores_sigterm_is_killed_at_the_time_out(prober):
    outcome = run(prober, 13, timeout_s=2)
    assert outcome.kind is Kind.TIMEOUT
    assert "2 s" in outcome.cause


def test_a_real_failed_allocation_is_out_of_memory(prober):
    outcome = run(prober, 14)
    assert outcome.kind is Kind.OOM
    assert outcome.attempted_bytes == 2**40


def test_a_failed_allocation_wrapped_in_another_exception_is_out_of_memory(prober):
    assert run(prober, 15).kind is Kind.OOM


def test_an_exception_that_only_speaks_of_memory_is_an_error(prober):
    outcome = run(prober, 16)
    assert outcome.kind is Kind.ERROR
    assert "just kidding" in outcome.cause


def test_pythons_memory_error_is_out_of_memory(prober):
    assert run(prober, 17).kind is Kind.OOM


def test_the_memory_limit_is_enforced_and_told_from_the_batch_that_fits(prober):
    assert run(prober, 100_000, memory_limit_bytes=400 * 2**20).kind is Kind.OOM
    assert run(prober, 100_000, memory_limit_bytes=2**31).kind is Kind.OK


def test_megabytes_and_fake_results_on_stdout_reach_the_log_alone(prober, capfd):
    outcome = run(prober, 18)
    assert outcome.kind is Kind.OK
    assert outcome.measurement is not None
    assert capfd.readouterr().out == ""
    log = Path(outcome.log)
    assert 2**19 < log.stat().st_size < 2**21


def test_closing_every_descriptor_does_not_cut_the_result_off(prober):
    assert run(prober, 19).kind is Kind.OK


def test_changing_the_directory_does_no_harm(prober):
    assert run(prober, 20).kind is Kind.OK


def test_no_child_of_the_users_code_is_left(prober):
    assert run(prober, 21).kind is Kind.OK
    found = subprocess.run(["pgrep", "-f", "autotune-orphan"], capture_output=True, text=True)
    assert found.stdout == ""


def test_threads_that_still_run_do_not_keep_the_probe_from_ending(prober):
    started = time.monotonic()
    assert run(prober, 22).kind is Kind.OK
    assert time.monotonic() - started < SETTINGS.timeout_s


def test_a_leak_is_measured_in_bytes_per_step(prober):
    outcome = run(prober, 23, num_steps=350, memory_limit_bytes=2**32)
    assert outcome.kind is Kind.OK
    assert outcome.measurement.growth_bytes_per_step == pytest.approx(2 * 2**20, rel=0.5)


def test_training_without_a_leak_shows_no_growth(prober):
    assert run(prober, 8, max_timed_s=1.0, interval=0.0001).measurement.growth_bytes_per_step == 0


def test_an_error_of_the_users_code_is_recorded_with_its_frames(prober):
    outcome = run(prober, 24)
    assert outcome.kind is Kind.ERROR
    assert "no such word" in outcome.cause
    assert "user_error" in outcome.detail


def test_a_sigkill_that_the_kernel_did_not_send_for_memory_is_a_crash(prober):
    outcome = run(prober, 25)
    assert outcome.kind is Kind.CRASHED
    assert "SIGKILL" in outcome.cause


def test_a_loss_that_is_nan_in_fp16_only_is_nonfinite_there_only(prober):
    assert run(prober, 8, amp="fp16").kind is Kind.NONFINITE
    assert run(prober, 8, amp="off").kind is Kind.OK


def test_a_config_too_slow_to_be_worth_timing_is_measured_by_its_warm_up(prober):
    outcome = run(prober, 8, slowest_samples_per_s=1e12)
    assert outcome.kind is Kind.OK
    assert outcome.measurement.cut_short
    assert 0 < outcome.measurement.samples_per_s < 1e12
    assert not run(prober, 8, slowest_samples_per_s=1e-3).measurement.cut_short
