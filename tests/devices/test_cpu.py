"""The CPU device, in real processes under real limits."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.devices import cpu, open_device
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import DeviceError
from autotune.task import Task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource
from tests.arithmetic import needs_bf16_arithmetic
from tests.devices.processes import in_process

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU device needs Linux's /proc")


def make_tensor():
    return torch.ones(16 * MIB, dtype=torch.uint8)


def make_array():
    return np.ones(16 * MIB, dtype=np.uint8)


def make_bytes():
    return bytearray(16 * MIB)


def fill(make, margin_bytes):
    """Allocate until it fails: is it an OOM, of how many bytes, and how many blocks went before."""
    device = open_device("cpu")
    device.limit_memory(device.current_bytes() + margin_bytes)
    held = []
    try:
        while len(held) < 1000:
            held.append(make())
    except Exception as error:
        return device.is_out_of_memory(error), attempted_bytes(error), len(held)
    return None


@pytest.mark.parametrize("make", [make_tensor, make_array, make_bytes])
def test_an_allocation_beyond_the_limit_is_out_of_memory(make):
    is_oom, _, num_blocks = in_process(fill, make, 200 * MIB)
    assert is_oom
    assert 11 <= num_blocks <= 12  # 12 x 16 MiB fit into 200 MiB


def test_the_size_that_failed_is_known_for_tensors_and_arrays():
    assert in_process(fill, make_tensor, 100 * MIB)[1] == 16 * MIB
    assert in_process(fill, make_array, 100 * MIB)[1] == 16 * MIB


def limit_below_use():
    device = open_device("cpu")
    try:
        device.limit_memory(5 * MIB)
    except DeviceError as error:
        return str(error), device.current_bytes()
    return None


def test_a_limit_below_what_the_process_holds_is_refused_naming_both():
    message, held_bytes = in_process(limit_below_use)
    limit_mib, named_mib = (float(number) for number in re.findall(r"([\d.]+) MiB", message))
    assert limit_mib == 5.0
    assert named_mib == pytest.approx(held_bytes / MIB, abs=1)
    assert "--memory-limit" in message


def limit_twice():
    device = open_device("cpu")
    held_bytes = device.current_bytes()
    device.limit_memory(held_bytes + 100 * MIB)
    device.limit_memory(held_bytes + 500 * MIB)
    try:
        torch.empty(300 * MIB, dtype=torch.uint8)
    except RuntimeError as error:
        return device.is_out_of_memory(error)
    return False


def test_a_limit_is_not_raised_by_a_later_one():
    assert in_process(limit_twice)


def compute_in_parallel_after_the_limit():
    torch.set_num_threads(4)
    device = open_device("cpu")
    cpu._start_compute_threads()
    device.limit_memory(device.current_bytes() + 4 * MIB)  # less than the stack of one thread
    return float(torch.ones(600_000).sum()), len(os.listdir("/proc/self/task"))


def test_compute_threads_exist_before_the_limit_so_that_parallel_work_runs_under_it():
    total, num_threads = in_process(compute_in_parallel_after_the_limit)
    assert total == 600_000
    assert num_threads >= 4


def memory_beside_what_was_handed_over(folder):
    """Of a task with 300 MiB: what it adds to memory, how many bytes fail that fit, and whether it can still be changed then."""
    vectors = {"all": torch.zeros(300 * MIB, dtype=torch.uint8)}
    task = Task(build_model=lambda: torch.nn.Linear(1, 1), make_batch=lambda n: vectors["all"].add_(1)[:n].clone())
    source = TaskSource.of(task).hand_over(folder)
    vectors.clear()
    device = open_device("cpu")
    before_bytes = device.current_bytes()
    task = load_source(source)
    added_bytes = device.current_bytes() - before_bytes
    device.limit_memory(device.current_bytes() + 100 * MIB)
    held = []
    try:
        while True:
            held.append(make_tensor())
    except RuntimeError as error:
        is_oom = device.is_out_of_memory(error)
    return added_bytes, len(held), is_oom, device.peak_bytes() - before_bytes, task.batch(2).tolist()


def test_what_a_task_built_in_python_hands_over_counts_for_no_limit_and_can_be_changed(tmp_path):
    added_bytes, num_blocks, is_oom, peak_bytes, changed = in_process(memory_beside_what_was_handed_over, tmp_path)
    assert abs(added_bytes) < 4 * MIB and num_blocks in (5, 6) and is_oom  # 6 x 16 MiB fit into 100 MiB
    assert peak_bytes < 110 * MIB and changed == [1, 1]


def peak_of_freed_memory(untouched_bytes):
    device = open_device("cpu")
    before_bytes = device.peak_bytes()
    blocks = [torch.ones(400 * MIB, dtype=torch.uint8), torch.empty(untouched_bytes, dtype=torch.uint8)]
    held_bytes = device.current_bytes()
    del blocks
    return before_bytes, held_bytes, device.peak_bytes(), device.current_bytes()


@pytest.mark.parametrize("untouched_bytes", [0, 200 * MIB])
def test_the_peak_counts_freed_memory_touched_or_not_as_the_limit_does(untouched_bytes):
    before_bytes, held_bytes, peak_bytes, after_bytes = in_process(peak_of_freed_memory, untouched_bytes)
    assert peak_bytes - before_bytes == pytest.approx(400 * MIB + untouched_bytes, rel=0.03)
    assert held_bytes - before_bytes == pytest.approx(400 * MIB + untouched_bytes, rel=0.03)
    assert after_bytes - before_bytes < 20 * MIB


def keep_between_what_is_freed():
    """What is kept of 100 blocks on the heap, of which every second one is freed, by what the device says; and what it holds."""
    device = open_device("cpu")
    before_bytes = device.kept_bytes()
    blocks = [bytearray(MIB // 16) for _ in range(1600)]
    del blocks[::2]
    gc.collect()
    return device.kept_bytes() - before_bytes, device.current_bytes() - before_bytes


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell what heaps hold free"
)
def test_what_a_heap_holds_free_is_not_kept():
    kept_bytes, held_bytes = in_process(keep_between_what_is_freed)
    assert kept_bytes == pytest.approx(50 * MIB, rel=0.1) and held_bytes > 90 * MIB


def run_out_after_a_peak():
    device = open_device("cpu")
    before_bytes = device.current_bytes()
    device.limit_memory(before_bytes + 400 * MIB)
    block = torch.ones(300 * MIB, dtype=torch.uint8)
    del block
    kept = torch.ones(50 * MIB, dtype=torch.uint8)
    held = []
    for asked_bytes in (500 * MIB, 360 * MIB):
        try:
            kept = (kept, torch.empty(asked_bytes, dtype=torch.uint8))
        except RuntimeError as error:
            held.append(device.held_bytes(attempted_bytes(error)) - before_bytes)
    del kept  # as unwinding does with what the failing operator held for itself
    return *held, device.held_bytes(360 * MIB) - before_bytes, device.peak_bytes() - before_bytes


def test_what_was_held_when_memory_ran_out_is_neither_an_earlier_peak_nor_less_than_the_limit_says():
    large, small, after_unwinding, peak = in_process(run_out_after_a_peak)
    assert large == pytest.approx(50 * MIB, abs=10 * MIB)
    assert small == pytest.approx(50 * MIB, abs=10 * MIB)
    assert after_unwinding == 40 * MIB
    assert peak >= 300 * MIB


def peak_after_a_file_was_mapped(path):
    device = open_device("cpu")
    before_bytes = device.peak_bytes()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0]
    return device.peak_bytes() - before_bytes


def test_a_large_file_mapped_for_a_while_is_not_memory(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(64 * 2**30)
    assert in_process(peak_after_a_file_was_mapped, path) < 200 * MIB


def train(limit_bytes):
    """A few steps whose memory is mostly activations: whether they were out of memory, and the peak."""
    import torch._dynamo  # as an optimizer does, which takes more than the steps where torch was built for CUDA

    device = open_device("cpu")
    if limit_bytes:
        device.limit_memory(limit_bytes)
    # pieces too large for the heap, whose holes differ between processes
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for _ in range(2):
            model(torch.randn(160_000, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return device.is_out_of_memory(error), device.peak_bytes()
    return False, device.peak_bytes()


def test_a_run_fits_into_its_own_peak_and_not_into_less():
    _, peak_bytes = in_process(train, 0)
    assert in_process(train, peak_bytes + 16 * MIB)[0] is False
    assert in_process(train, peak_bytes - 32 * MIB)[0] is True


class Hoarder(torch.utils.data.Dataset):
    """Keeps memory in the worker that reads it; optionally more than there is."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.kept = torch.ones(self.num_bytes, dtype=torch.uint8)
        return torch.zeros(1)


def load_with_a_worker():
    device = open_device("cpu")
    before_bytes = device.current_bytes()
    batches = iter(torch.utils.data.DataLoader(Hoarder(200 * MIB), num_workers=1))
    next(batches)
    with_worker_bytes = device.current_bytes()
    del batches
    after_bytes = device.current_bytes()
    return before_bytes, with_worker_bytes, after_bytes, device.peak_bytes(), device.memory_detail()


def test_memory_of_data_loading_workers_counts():
    before_bytes, with_worker_bytes, after_bytes, peak_bytes, detail = in_process(load_with_a_worker)
    assert with_worker_bytes - before_bytes > 195 * MIB
    assert after_bytes - before_bytes < 100 * MIB
    assert peak_bytes >= with_worker_bytes
    assert detail["workers_bytes"] == pytest.approx(200 * MIB, rel=0.2)


def load_with_a_worker_beyond_the_limit():
    device = open_device("cpu")
    device.limit_memory(device.current_bytes() + 150 * MIB)
    try:
        list(torch.utils.data.DataLoader(Hoarder(400 * MIB), num_workers=1))
    except Exception as error:
        return device.is_out_of_memory(error), str(error)
    return None


def test_an_allocation_that_fails_in_a_worker_is_out_of_memory():
    is_oom, message = in_process(load_with_a_worker_beyond_the_limit)
    assert "DataLoader worker" in message
    assert is_oom


def operator(name):
    if name == "convolution":
        return torch.nn.Conv2d(16, 32, 3, padding=1), torch.randn(16, 16, 32, 32)
    if name == "linear":
        return torch.nn.Linear(512, 512), torch.randn(512, 512)
    return torch.nn.LSTM(64, 64, batch_first=True), torch.randn(16, 32, 64)


def fail_within(margin_bytes, name, amp):
    """Run an operator for the first time, forward and backward: '' or whether what it raised is an OOM, and the error."""
    device = open_device("cpu")
    module, batch = operator(name)
    device.limit_memory(device.current_bytes() + margin_bytes)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            output = module(batch)
        (output[0] if isinstance(output, tuple) else output).float().sum().backward()
    except Exception as error:
        return f"{device.is_out_of_memory(error)} {error!r:.200}"
    return ""


def fail_at_many_limits(name, amp):
    """What an operator raised under ever looser limits, each in a process of its own."""
    failures = []
    for step in range(1 if amp else 2, 25, 2):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            try:
                os.write(writing, fail_within(MIB // 2 + step**2 * MIB // 16, name, amp).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            failures.append(pipe.read().decode())
        os.waitpid(pid, 0)
    return [failure for failure in failures if failure]


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("name", "amp"),
    [
        ("convolution", False),
        ("convolution", True),
        ("linear", False),
        ("linear", True),
        ("lstm", False),
        pytest.param("lstm", True, marks=needs_bf16_arithmetic),
    ],
)
def test_whatever_an_operator_raises_at_the_limit_is_out_of_memory(name, amp):
    failures = in_process(fail_at_many_limits, name, amp)
    assert failures
    assert [failure for failure in failures if not failure.startswith("True")] == []


def fail_far_from_the_limit(message):
    device = open_device("cpu")
    device.limit_memory(device.current_bytes() + 2**30)
    return device.is_out_of_memory(RuntimeError(message))


def test_a_message_with_other_causes_is_not_out_of_memory_far_from_the_limit():
    assert in_process(fail_far_from_the_limit, "could not create a primitive") is False
    assert in_process(fail_far_from_the_limit, "std::bad_alloc") is True


def test_details_are_bytes_of_this_process():
    detail = open_device("cpu").memory_detail()
    assert set(detail) == {"vm_data_bytes", "rss_anon_bytes", "rss_anon_peak_bytes", "shared_bytes", "workers_bytes"}
    assert 0 < detail["rss_anon_bytes"] <= detail["rss_anon_peak_bytes"]
    assert detail["rss_anon_bytes"] < detail["vm_data_bytes"]


def test_info_tells_what_the_machine_has():
    info = open_device("cpu").info()
    installed = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < info.free_bytes < info.total_bytes <= installed
    assert info.name == "cpu"
    assert info.model
    assert info.num_threads >= 1
    assert info.torch_version.split("+")[0] == torch.__version__.split("+")[0]


def test_telemetry_has_load_and_memory():
    values = open_device("cpu").telemetry().values
    assert values["load_1m"] >= 0
    assert 0 < values["used_bytes"] < values["total_bytes"]


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}])
def test_the_number_of_threads_is_known_before_torch_is_imported(variables):
    code = (
        "import sys; from autotune.devices import open_device; told = open_device('cpu').info().num_threads;"
        "assert 'torch' not in sys.modules; import torch; print(told, torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name} | variables
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    told, actual = run.stdout.split()
    assert told == actual


def test_an_allocation_of_more_than_is_free_fails_and_leaves_a_reserve() -> None:
    allowed_bytes, failed = in_process(_bounded)
    assert allowed_bytes > 0 and failed


def _bounded() -> tuple[int, bool]:
    allowed_bytes = cpu.bound_host_memory()
    try:
        torch.empty(allowed_bytes + cpu._RESERVE_BYTES, dtype=torch.uint8)
    except RuntimeError:
        return allowed_bytes, True
    return allowed_bytes, False
