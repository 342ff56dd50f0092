"""`autotune devices`: what is shown, with and without a GPU."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from autotune.devices import open_device
from autotune.devices.calibration import holds_for
from autotune.records.device import Calibration, Rate
from autotune.report.devices import render_devices
from autotune.study.caches import CalibrationCache
from tests.devices.fake_nvml import GIB, FakeGpu, FakeNvml, install


def show_busy_gpu(monkeypatch, **arguments):
    install(monkeypatch, FakeGpu("GPU-1", reasons=0x20, processes=[(7, 3 * GIB)]))
    return render_devices(**arguments)


def test_a_gpu_is_shown_with_memory_load_temperature_power_slowdown_and_processes(monkeypatch):
    text = show_busy_gpu(monkeypatch)
    gpu = next(line for line in text.splitlines() if line.startswith("cuda:0"))
    for shown in ("NVIDIA H200", "2.00 GiB of 140 GiB", "37 %", "51 °C", "312 W of 700 W", "temperature (driver)"):
        assert shown in gpu
    assert any(line.split() == ["cuda:0", "7", "3.00", "GiB", "python3"] for line in text.splitlines())
    assert any(line.startswith("cpu ") for line in text.splitlines())


def test_without_a_driver_one_line_says_so_and_the_cpu_is_shown(monkeypatch):
    install(monkeypatch, error=FakeNvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found"))
    text = render_devices()
    assert "no GPU: no NVIDIA driver is installed" in text.splitlines()
    assert "thread" in next(line for line in text.splitlines() if line.startswith("cpu "))
    assert "temperature" not in text


def test_the_json_holds_every_figure(monkeypatch):
    document = json.loads(show_busy_gpu(monkeypatch, as_json=True))
    gpu, cpu = document["devices"]
    assert document["no_gpu"] is None
    assert gpu["total_bytes"] == 140 * GIB
    assert gpu["telemetry"]["values"]["temperature_c"] == 51
    assert gpu["telemetry"]["throttle_reasons"] == ["temperature (driver)"]
    assert gpu["telemetry"]["processes"] == [{"pid": 7, "used_bytes": 3 * GIB, "name": "python3"}]
    assert cpu["name"] == "cpu"
    assert cpu["num_threads"] >= 1


def test_what_was_measured_of_a_device_is_shown_with_the_way_to_measure_it_again(monkeypatch, tmp_path):
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert "cpu, as it is now, was not measured yet: the next search measures it." in render_devices()
    assert json.loads(render_devices(as_json=True))["devices"][0]["calibration"] is None
    rates = (
        Rate(work="matmul", arithmetic="fp32", sizes=(64, 512), flops_per_s=(8e10, 1e11)),
        Rate(work="matmul", arithmetic="bf16", sizes=(64,), flops_per_s=(4e9,), failure="no answer within 300 ms"),
        Rate(work="convolution", arithmetic="fp16", failure="no answer within 300 ms"),
    )
    of = holds_for(open_device("cpu").info())
    cache = CalibrationCache(Path("studies"), of)
    cache.write(Calibration(rates=rates, bytes_per_s=3.6e10, launch_s=1.8e-6, of=of, measured_at="2026-01-02T03:04:05"))
    text = render_devices()
    for shown in ("80 GFLOP/s (64)", "100 GFLOP/s (512)", "0.05x", "no answer within 300 ms", "36 GB/s", "1.8 us"):
        assert shown in text
    assert "Measured 2026-01-02T03:04:05" in text and f"delete {cache.path} and search" in text
    shown = json.loads(render_devices(as_json=True))["devices"][0]["calibration"]
    assert shown["bytes_per_s"] == 3.6e10 and shown["kept"] == str(cache.path)


def test_the_json_says_why_there_is_no_gpu(monkeypatch):
    install(monkeypatch)
    assert json.loads(render_devices(as_json=True))["no_gpu"] == "the NVIDIA driver finds no GPU"


def test_watching_reads_again_until_it_is_interrupted():
    code = "import sys; from autotune.report.devices import watch_devices; watch_devices(sys.stdout, interval_s=0.05)"
    watcher = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    assert watcher.stdout is not None
    num_readings = 0
    while num_readings < 3:
        num_readings += watcher.stdout.readline().startswith("cpu ")
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=30)
    assert watcher.returncode == 0
