"""The CUDA device on a real GPU, each scenario in a process of its own."""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from autotune import prepare
from autotune.devices import device_named, nvml, open_device
from autotune.devices.instruments import Instruments
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import DeviceError
from autotune.runners.failure import outcome_of_failure
from autotune.task import Task
from tests.devices.processes import CONTEXT, in_process
from tests.driver.cards import A100
from tests.driver.played import Played
from tests.driver.run import variables

pytestmark = pytest.mark.gpu
MIB, GIB = 2**20, 2**30
STATE = "PLAYED_STATE"  # conftest.py gives each worker its own, and is not to be run again in a process of a test


def played():
    """A hand on the played cards that this process sees."""
    return Played(Path(os.environ[STATE]))


@pytest.fixture
def no_neighbour():
    """Lets a neighbour that a test brings go."""
    yield
    if STATE in os.environ:
        played().set_neighbour(0)


# prints what the driver books on this process while it has asked for everything that needs no context
WITHOUT_CONTEXT = """
import os, sys
from autotune.devices import available, nvml, open_device
device = open_device("auto")
assert device.name == "cuda:0", device.name
info, telemetry = device.info(), device.telemetry()
assert [opened.name for opened in available()][-1] == "cpu"
assert "torch" not in sys.modules
connection = nvml.connect()
booked = [pid for gpu in connection.boards() for pid in connection.used_by_process(gpu)]
import torch
print(os.getpid() in booked, torch.cuda.is_initialized(), info.total_bytes, telemetry.values["used_bytes"])
"""


def test_info_and_telemetry_create_no_context_and_import_no_torch():
    run = subprocess.run([sys.executable, "-c", WITHOUT_CONTEXT], capture_output=True, text=True, check=True)
    booked, initialized, total_bytes, used_bytes = run.stdout.split()
    assert (booked, initialized) == ("False", "False")
    assert 0 <= float(used_bytes) < int(total_bytes)


def test_info_agrees_with_cuda():
    info = open_device("cuda").info()
    told = in_process(properties)
    assert info.model == told["name"]
    assert info.capability == told["capability"]
    assert info.total_bytes == pytest.approx(told["total_bytes"], rel=0.05)
    assert info.driver


def properties():
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": (properties.major, properties.minor),
        "total_bytes": properties.total_memory,
    }


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match=r"cuda:63.*cuda:0"):
        open_device("cuda:63")


def test_hidden_gpus_are_not_opened(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="hides every GPU"):
        open_device("cuda")
    assert open_device("auto").name == "cpu"


def test_a_gpu_can_be_named_by_its_uuid(monkeypatch):
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    last = connection.visible_gpus()[-1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", last.uuid)
    assert [gpu.uuid for gpu in connection.visible_gpus()] == [last.uuid]
    assert open_device("cuda").info().model == last.name


def test_telemetry_has_memory_temperature_and_utilization():
    values = open_device("cuda").telemetry().values
    assert 0 <= values["used_bytes"] < values["total_bytes"]
    assert 0 < values["temperature_c"] < 120
    assert 0 <= values["gpu_utilization"] <= 100
    assert values.get("power_w", 1) > 0


def fill(limit_bytes):
    device = open_device("cuda")
    device.limit_memory(limit_bytes)
    blocks = []
    try:
        while True:
            blocks.append(torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device))
    except Exception as error:
        return {
            "type": type(error).__name__,
            "is_oom": device.is_out_of_memory(error),
            "attempted_bytes": attempted_bytes(error),
            "peak_bytes": device.peak_bytes(),
            "detail": device.memory_detail(),
        }


def test_beyond_the_limit_torch_raises_out_of_memory():
    found = in_process(fill, 3 * GIB)
    assert found["type"] == "OutOfMemoryError"
    assert found["is_oom"]
    assert found["attempted_bytes"] == 64 * MIB
    assert found["detail"]["num_ooms"] >= 1


@pytest.mark.parametrize("limit_bytes", [2 * GIB, 5 * GIB])
def test_the_limit_bounds_all_that_the_process_has_on_the_card(limit_bytes):
    found = in_process(fill, limit_bytes)
    assert limit_bytes - 200 * MIB < found["peak_bytes"] <= limit_bytes + 64 * MIB
    assert found["detail"]["outside_bytes"] > 50 * MIB  # a context is never smaller


def run_out_with_a_cache():
    device = open_device("cuda")
    device.limit_memory(6 * GIB)
    block = torch.empty(4 * GIB, dtype=torch.uint8, device=device.torch_device)
    kept = torch.empty(GIB, dtype=torch.uint8, device=device.torch_device)
    del block  # stays in the cache, which the allocator empties before it gives up
    try:
        torch.empty(8 * GIB, dtype=torch.uint8, device=device.torch_device)
    except torch.OutOfMemoryError as error:
        attempted = attempted_bytes(error)
        return kept.numel(), attempted, device.held_bytes(attempted), device.peak_bytes()
    return None


def test_after_a_failed_allocation_only_what_was_held_with_it_counts():
    kept, attempted, held_bytes, peak_bytes = in_process(run_out_with_a_cache)
    assert attempted == 8 * GIB
    assert peak_bytes > 5 * GIB
    assert kept < held_bytes < kept + 2 * GIB


def prepare_on(name):
    seen = []

    def build_model():
        seen.append(torch.cuda.current_device())
        return torch.nn.Linear(4, 2)

    task = Task(build_model=build_model, make_batch=lambda n: (torch.randn(n, 4), torch.zeros(n).long()))
    session = prepare(task, {"batch_size": 2}, device=name)
    session.step(next(iter(session.loader)))
    return seen, torch.cuda.current_device(), str(session.device)


@pytest.mark.parametrize("index", [0, 1])
def test_a_session_runs_with_its_gpu_as_the_current_one_like_a_probe(index):
    if index >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    assert in_process(prepare_on, f"cuda:{index}") == ([index], index, f"cuda:{index}")


def refuse_small_limit():
    device = open_device("cuda")
    try:
        device.limit_memory(10 * MIB)
    except DeviceError as error:
        return str(error)
    return ""


def test_a_limit_below_what_cuda_itself_takes_is_refused_naming_both():
    message = in_process(refuse_small_limit)
    assert "10.0 MiB" in message
    assert "cuda:0" in message
    assert "--memory-limit" in message


def train():
    device = open_device("cuda")
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4096, 2048, device=device.torch_device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    device.synchronize()
    peak_bytes, current_bytes = device.peak_bytes(), device.current_bytes()
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    gpu = connection.visible_gpus()[0]
    booked_bytes = connection.used_by_process(gpu).get(os.getpid())
    return {
        "peak_bytes": peak_bytes,
        "current_bytes": current_bytes,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "booked_bytes": booked_bytes,
        "card_bytes": (connection.memory(gpu) or (0, 0))[0],
        "detail": device.memory_detail(),
    }


def test_the_peak_covers_the_allocators_peak_and_is_what_the_driver_books():
    before = open_device("cuda").telemetry().values["used_bytes"]
    found = in_process(train)
    assert found["peak_bytes"] >= found["allocated_bytes"]
    assert found["current_bytes"] <= found["peak_bytes"]
    seen_bytes = found["booked_bytes"] or found["card_bytes"] - before
    assert found["peak_bytes"] == pytest.approx(seen_bytes, rel=0.1)
    detail = found["detail"]
    assert detail["allocated_bytes"] == found["allocated_bytes"]
    assert detail["reserved_bytes"] + detail["outside_bytes"] == pytest.approx(found["peak_bytes"], rel=0.01)
    assert detail["num_alloc_retries"] == detail["num_ooms"] == 0


def peak_after_free():
    device = open_device("cuda")
    before_bytes = device.peak_bytes()
    block = torch.ones(GIB, dtype=torch.uint8, device=device.torch_device)
    held_bytes = device.current_bytes()
    del block
    after_bytes = device.current_bytes()  # while the allocator keeps it
    device.give_back()
    return before_bytes, held_bytes, device.peak_bytes(), after_bytes, torch.cuda.memory_reserved()


def test_freed_memory_still_counts_in_the_peak_and_no_longer_as_held_now():
    before_bytes, held_bytes, peak_bytes, after_bytes, reserved_bytes = in_process(peak_after_free)
    assert peak_bytes - before_bytes == pytest.approx(GIB, rel=0.05)
    assert held_bytes - after_bytes == pytest.approx(GIB, rel=0.05)
    assert reserved_bytes < GIB  # once it was given back


def raise_without_memory(name, limit_bytes, beside):
    """Take the whole card, or all that a limit or a neighbour leaves, then make a library allocate for itself."""
    device = open_device("cuda")
    device.enter()
    convolution = torch.nn.Conv2d(8, 16, 3).to(device.torch_device)
    images = torch.ones(2, 8, 30, 16, device=device.torch_device)
    if limit_bytes:
        device.limit_memory(limit_bytes)
    if beside:
        played().set_neighbour(device.info().free_bytes - 64 * MIB)
    block_bytes, blocks = 256 * MIB, []
    while block_bytes >= MIB:
        try:
            blocks.append(torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device))
        except torch.OutOfMemoryError:
            block_bytes //= 2
    try:
        if name == "cublas":
            with ThreadPoolExecutor(1) as another_thread:  # which needs a handle of its own
                another_thread.submit(torch._C._cuda_getCurrentBlasHandle).result()
        else:
            convolution(images).sum().item()
    except Exception as error:
        return type(error).__name__, device.is_out_of_memory(error), str(error)
    return None


@pytest.mark.parametrize(
    ("name", "limit_bytes", "beside"),
    [
        ("cublas", None, False),
        ("cudnn", None, False),
        ("cudnn", 4 * GIB, False),
        pytest.param("cudnn", None, True, marks=pytest.mark.played),
    ],
)
def test_what_libraries_raise_on_a_full_card_or_at_the_limit_is_out_of_memory(name, limit_bytes, beside, no_neighbour):
    outcome = in_process(raise_without_memory, name, limit_bytes, beside)
    if outcome is None:
        pytest.skip(f"{name} needed no memory")
    kind, is_oom, message = outcome
    assert kind != "OutOfMemoryError", "the library's own error is wanted"
    assert is_oom, message


def raise_for_another_reason():
    device = open_device("cuda")
    device.limit_memory(4 * GIB)
    try:
        torch.ones(3, 4, device=device.torch_device) @ torch.ones(5, 6, device=device.torch_device)
    except RuntimeError as error:
        return device.is_out_of_memory(error)
    return None


def test_another_error_on_the_gpu_is_not_out_of_memory():
    assert in_process(raise_for_another_reason) is False


def elapsed_with_and_without_synchronize():
    device = open_device("cuda")
    matrix = torch.ones(8192, 8192, device=device.torch_device)
    matrix @ matrix
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    queued = time.perf_counter() - begin
    device.synchronize()
    return queued, time.perf_counter() - begin


def test_synchronize_waits_for_queued_work():
    queued, done = in_process(elapsed_with_and_without_synchronize)
    assert done > 2 * queued


def hold_gpu(ready):
    matrix = torch.ones(4096, 4096, device="cuda:0")
    ready.set()
    while True:
        matrix = torch.tanh(matrix @ matrix)
        torch.cuda.synchronize()


def contention_while_working(seconds):
    device = open_device("cuda")
    matrix = torch.ones(4096, 4096, device=device.torch_device)
    device.start_measuring()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        matrix = torch.tanh(matrix @ matrix)
        device.synchronize()
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    return device.contention(), os.getpid() in connection.used_by_process(connection.visible_gpus()[0])


@pytest.mark.values
def test_another_process_on_the_gpu_is_seen_where_the_driver_shows_processes():
    ready = CONTEXT.Event()
    other = CONTEXT.Process(target=hold_gpu, args=(ready,), daemon=True)
    other.start()
    assert ready.wait(60)
    try:
        share, visible = in_process(contention_while_working, 3)
    finally:
        other.kill()
        other.join()
    if not visible:
        pytest.skip("the driver does not show this process to itself (a container)")
    assert 0.1 < share <= 1


def peak_beside_another_process():
    device = open_device("cuda")
    device.limit_memory(4 * GIB)
    return device.peak_bytes()


def hold_memory(ready):
    block = torch.ones(8 * GIB, dtype=torch.uint8, device="cuda:0")
    ready.set()
    time.sleep(600)
    del block


def test_memory_of_another_process_is_not_counted():
    ready = CONTEXT.Event()
    other = CONTEXT.Process(target=hold_memory, args=(ready,), daemon=True)
    other.start()
    assert ready.wait(60)
    try:
        assert in_process(peak_beside_another_process) < 3 * GIB
    finally:
        other.kill()
        other.join()


def outside_over_time(knows):
    """What lies outside the allocator as the driver's books or the card's use tell it: at first, grown, and as the peak in the end."""
    if knows == "the card's use":  # as in a container, whose books are empty
        booked = Instruments.booked_bytes
        Instruments.booked_bytes = lambda self: (None, booked(self)[1])
    if knows == "torch":
        nvml._connections[os.getpid()] = "no NVIDIA driver is installed"
    device = device_named("cuda:0")
    device.limit_memory(8 * GIB)
    first_bytes = device.current_bytes() - torch.cuda.memory_allocated()
    cudart, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(300 * MIB))
    grown_bytes = device.current_bytes() - torch.cuda.memory_allocated()
    cudart.cudaFree(address)
    device.current_bytes()
    peak_bytes = device.memory_detail()["outside_bytes"]
    played().set_neighbour(GIB)
    beside_bytes = device.current_bytes() - torch.cuda.memory_allocated()
    return [found_bytes // MIB for found_bytes in (first_bytes, grown_bytes, peak_bytes, beside_bytes)]


def communicators_seen():
    """What is seen of two communicators of 800 MiB by the card's use alone, and the peak outside the allocator."""
    booked = Instruments.booked_bytes
    Instruments.booked_bytes = lambda self: (None, booked(self)[1])
    device = device_named("cuda:0")
    device.enter()
    cudart, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    for _ in range(2):
        with device.count_communicators(1):
            cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(800 * MIB))
    detail = device.memory_detail()
    return detail["num_communicators"], detail["communicators_bytes"] // MIB, detail["outside_bytes"] // MIB


@pytest.mark.played
@pytest.mark.parametrize(
    ("knows", "first_mib", "beside_mib"),
    [
        ("the driver's books", 528, 528),
        ("the card's use", 528, 528),
        ("torch", 512, 1024),  # a typical context, and a neighbour that nobody sees is taken for late kernels
    ],
)
def test_memory_outside_the_allocator_is_followed_by_whatever_tells_of_it(knows, first_mib, beside_mib, tmp_path):
    """On a card of its own: beside other processes the card's use tells nothing of one of them."""
    program = f"from tests.devices.test_cuda import outside_over_time; print(outside_over_time({knows!r}))"
    environment = variables(tmp_path / "books", A100)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    expected = [first_mib, first_mib + 300, first_mib + 300, beside_mib]
    assert run.stdout.strip().splitlines()[-1:] == [str(expected)], run.stderr


@pytest.mark.played
def test_communicators_are_counted_although_kernels_that_are_loaded_late_never_take_so_much(tmp_path):
    program = "from tests.devices.test_cuda import communicators_seen; print(*communicators_seen())"
    environment = variables(tmp_path / "books", A100)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip().splitlines()[-1:] == [f"2 1600 {528 + 1600}"], run.stderr


def judge_in_a_broken_context():
    """What is said once a kernel has broken the context, where CUDA alone could tell of the card, and answers no more."""
    nvml._connections[os.getpid()] = "no NVIDIA driver is installed"
    device = device_named("cuda:0")
    device.limit_memory(4 * GIB)
    numbers = torch.zeros(9, device=device.torch_device)
    played().fail_launch()
    try:
        numbers.add_(1)
        device.synchronize()
    except RuntimeError as error:
        outcome = outcome_of_failure(error, device, "warmup")
    device.give_back()
    later = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`")
    pinning = RuntimeError("CUDA error: out of memory")
    return str(outcome.kind), outcome.cause, device.is_out_of_memory(later), device.is_of_host(pinning)


@pytest.mark.played
def test_in_a_broken_context_the_error_that_broke_it_is_told_and_none_is_lack_of_memory():
    kind, cause, is_oom, is_of_host = in_process(judge_in_a_broken_context)
    assert (kind, is_oom, is_of_host) == ("error", False, False)
    assert "illegal memory access" in cause


def is_asked_anew_after_a_fork():
    before = nvml.connect()
    if not (pid := os.fork()):
        os._exit(int(nvml.connect() is before))
    return os.waitpid(pid, 0)[1] == 0


def test_a_fork_has_a_connection_to_the_driver_of_its_own():
    assert in_process(is_asked_anew_after_a_fork)


def describe():
    return open_device("cuda").info().free_bytes, torch.cuda.is_initialized()


def crowded_beside(neighbour_bytes, attempted_bytes):
    """Fill a card whose neighbour comes once the limit, all that was free, is set."""
    device = open_device("cuda")
    device.limit_memory(device.info().free_bytes)
    played().set_neighbour(neighbour_bytes)
    blocks = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            blocks.append(torch.empty(GIB, dtype=torch.uint8, device=device.torch_device))
    return device.is_crowded(attempted_bytes)


@pytest.mark.played
@pytest.mark.parametrize(
    ("neighbour_bytes", "attempted_bytes", "crowded"),
    [
        (0, GIB, False),  # alone
        (30 * MIB, 50 * MIB, False),  # a desktop's window
        (8 * GIB, 2 * GIB, True),
        (8 * GIB, 60 * GIB, False),  # would not fit without it
    ],
)
def test_a_neighbour_is_blamed_for_what_it_took_and_the_config_for_the_rest(
    neighbour_bytes, attempted_bytes, crowded, no_neighbour
):
    assert in_process(crowded_beside, neighbour_bytes, attempted_bytes) is crowded


def test_opening_and_describing_a_gpu_leaves_a_process_able_to_fork():
    free_bytes, initialized = in_process(describe)
    assert free_bytes > 0 and not initialized
