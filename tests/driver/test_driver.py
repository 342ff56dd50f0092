"""What the played driver promises: the cards' books, torch's own errors over it, and each fault that tests can call for.

Every process here sees a machine of its own, by its own state file. Those that need no torch talk to the driver's libraries.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.driver.build import BuildError, build, missing_tools
from tests.driver.cards import A100, CARDS, H100, H100_SLICE, LAPTOP, T4, environment
from tests.driver.played import LAUNCH_FAILURE, Played
from tests.driver.run import ROOT, variables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA build"),
    pytest.mark.skipif(bool(missing_tools()), reason=f"no {', '.join(missing_tools())} to build the driver with"),
]

MIB = 2**20
GIB = 2**30

PLAYED = """
import os
from pathlib import Path
from tests.driver.played import Played
played = Played(Path(os.environ["PLAYED_STATE"]))
"""
TORCH = (
    PLAYED
    + """
import torch

def error_of(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"
"""
)
CUDART = (
    PLAYED
    + """
import ctypes
cudart = ctypes.CDLL("libcudart.so.13")

def answer(function, *arguments, of=ctypes.c_int):
    value = of()
    error = getattr(cudart, function)(ctypes.byref(value), *arguments)
    return error, value.value

def memory():
    total = ctypes.c_size_t()
    return answer("cudaMemGetInfo", ctypes.byref(total), of=ctypes.c_size_t)[1]

def properties(device):
    told = ctypes.create_string_buffer(1008)
    cudart.cudaGetDeviceProperties(told, device)
    return told.value.decode(), told.raw[256:272].hex()
"""
)
NVML = (
    PLAYED
    + """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
"""
)


class Machine:
    """A machine with cards of the driver's, and what its processes print."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.played = Played(state)

    def begin(self, program, card=A100, num_cards=1, given=None, **settings):
        env = variables(self.state, card, num_cards, **settings) | (given or {})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", program], env=env, text=True, **pipes)

    def run(self, program, *arguments, **named):
        out, err = (process := self.begin(program, *arguments, **named)).communicate(timeout=60)
        assert not process.returncode, err
        return out.splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "books")


# ---- memory


HOLD = CUDART + "answer('cudaMalloc', ctypes.c_size_t(2**30), of=ctypes.c_void_p); print(memory(), flush=True); input()"


def test_the_memory_of_a_card_is_that_of_all_processes_and_their_contexts(machine):
    context, total = A100.context_bytes, A100.total_bytes
    holders = [machine.begin(HOLD) for _ in range(2)]
    printed = [int(holder.stdout.readline()) for holder in holders]
    assert min(printed) == total - 2 * (context + GIB)
    assert machine.played.processes() == {holder.pid: context + GIB for holder in holders}
    for holder in holders:
        holder.communicate("\n")
    assert machine.played.used_bytes() == 0


def test_torch_says_out_of_memory_where_the_card_is_full_and_goes_on(machine):
    lines = machine.run(
        TORCH
        + """
print(error_of(lambda: torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")))
x = torch.empty(7 * 2**30, dtype=torch.uint8, device="cuda")
print(played.used_bytes() - torch.cuda.max_memory_reserved())
""",
        LAPTOP,
    )
    assert lines[0].startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    )
    assert int(lines[1]) == LAPTOP.context_bytes


def test_expandable_segments_take_and_give_back_memory_in_pages_of_theirs(machine):
    lines = machine.run(
        TORCH
        + """
x = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
y = torch.empty(50 * 2**20, dtype=torch.uint8, device="cuda")
print(len(torch.cuda.memory_snapshot()), torch.cuda.memory_reserved() == played.used_bytes() - 400 * 2**20)
del y
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved() >> 20, (played.used_bytes() >> 20) - 400)
print(error_of(lambda: torch.empty(2**34, dtype=torch.uint8, device="cuda"))[:16])
""",
        LAPTOP,
        given={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )
    assert lines == ["1 True", "40 40", "OutOfMemoryError"]


def test_a_neighbour_comes_grows_and_goes(machine):
    lines = machine.run(
        TORCH
        + """
take = lambda: torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
print(error_of(take))
torch.cuda.empty_cache()
played.set_neighbour(5 * 2**30)
print(error_of(take)[:16], torch.cuda.mem_get_info()[0] >> 20)
played.set_neighbour(0)
print(error_of(take))
""",
        LAPTOP,
    )
    assert lines == ["no error", f"OutOfMemoryError {8188 - 400 - 5120}", "no error"]


def test_a_neighbour_may_be_there_from_the_beginning(machine):
    (free,) = machine.run(CUDART + "print(memory())", LAPTOP, neighbour_mib=4096)
    assert int(free) == LAPTOP.total_bytes - LAPTOP.context_bytes - 4 * GIB
    assert machine.played.used_bytes() == 4 * GIB


def test_a_full_card_has_no_room_for_a_library_or_a_context(machine):
    lines = machine.run(
        TORCH
        + """
x = torch.ones(64, 64, device="cuda")
convolution, image = torch.nn.Conv2d(8, 16, 3).cuda(), torch.randn(2, 8, 20, 16, device="cuda")
played.set_neighbour(torch.cuda.mem_get_info()[0])
print(error_of(lambda: x @ x))
print(error_of(lambda: convolution(image)))
"""
    )
    assert lines == [
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ]
    machine.played.set_neighbour(A100.total_bytes)
    assert machine.run(CUDART + "print(cudart.cudaFree(None))") == ["2"]


def test_memory_of_a_killed_process_stays_held_as_long_as_asked(machine):
    machine.played.hold_after_death_s(0.5)
    holder = machine.begin(HOLD)
    holder.stdout.readline()
    holder.kill()
    holder.wait()
    assert machine.played.used_bytes() == A100.context_bytes + GIB
    assert machine.played.processes() == {}
    time.sleep(0.6)
    assert machine.played.used_bytes() == 0


def test_a_child_forked_after_a_context_cannot_use_cuda(machine):
    program = (
        CUDART
        + "answer('cudaGetDevice'); cudart.cudaFree(None)\nif not os.fork(): print(answer('cudaGetDeviceCount')[0])"
    )
    assert machine.run(program) == ["3"]


# ---- time


def test_events_measure_the_time_of_what_lies_between_them_and_graphs_repeat_it(machine):
    (line,) = machine.run(
        TORCH
        + """
x = torch.ones(4096, 4096, device="cuda")
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
def time_of(act):
    begin.record(); act(); end.record(); torch.cuda.synchronize()
    return begin.elapsed_time(end)
print(time_of(lambda: x @ x), time_of(graph.replay), error_of(lambda: graph.replay()))
"""
    )
    product_ms, graph_ms = (float(text) for text in line.split()[:2])
    assert 2 * 4096**3 / A100.fp32_tflops / 1e9 < product_ms < 20
    assert 2 * 4096**3 / A100.fp32_tflops / 1e9 < graph_ms < 20


# ---- faults


def test_an_illegal_access_breaks_the_process_for_good_and_no_other(machine):
    lines = machine.run(
        TORCH
        + """
x = torch.zeros(10, device="cuda")
add = lambda: (x.add_(1), torch.cuda.synchronize())
played.fail_launch(3)
print([error_of(add) for _ in range(2)])
print(error_of(add))
for act in (torch.cuda.synchronize, torch.cuda.mem_get_info, lambda: torch.empty(2**24, device="cuda"), lambda: x.tolist()):
    print(error_of(act))
"""
    )
    assert lines[0] == "['no error', 'no error']"
    assert lines[1:] == ["AcceleratorError: CUDA error: an illegal memory access was encountered"] * 5
    assert machine.run(CUDART + "print(answer('cudaMalloc', ctypes.c_size_t(1), of=ctypes.c_void_p)[0])") == ["0"]


def test_a_kernel_named_in_the_settings_fails_in_each_process(machine):
    program = (
        TORCH
        + "x = torch.ones(9, device='cuda'); print(error_of(lambda: x.sum().item()), error_of(lambda: x.sum().item()))"
    )
    (line,) = machine.run(program, kernel_error="710:2:reduce_kernel")
    assert line == "no error AcceleratorError: CUDA error: device-side assert triggered"


def test_a_card_that_falls_off_the_bus_is_lost_to_cuda_and_nvml(machine):
    lines = machine.run(
        TORCH
        + f"""
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
x = torch.zeros(10, device="cuda")
played.take_off_bus(error={LAUNCH_FAILURE})
print(error_of(lambda: x.add_(1)))
print(error_of(lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu)))
played.put_on_bus()
print(error_of(lambda: x.add_(1)))
"""
    )
    assert lines == [
        "AcceleratorError: CUDA error: unspecified launch failure",
        "NVMLError_GpuIsLost: GPU is lost",
        "AcceleratorError: CUDA error: unspecified launch failure",
    ]
    machine.played.take_off_bus()
    assert machine.run(CUDART + "print(answer('cudaMalloc', ctypes.c_size_t(1), of=ctypes.c_void_p)[0])") == ["46"]


def test_host_memory_cannot_be_pinned_beyond_a_limit(machine):
    machine.played.limit_pinned_bytes(MIB)
    pin = "answer('cudaHostAlloc', ctypes.c_size_t(2**19), 0, of=ctypes.c_void_p)[0]"
    assert machine.run(CUDART + f"print({pin}, {pin}, {pin})") == ["0 0 2"]


def test_cudnn_without_a_plan_makes_torch_say_so(machine):
    lines = machine.run(
        TORCH
        + """
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
convolve = lambda: torch.nn.Conv2d(8, 16, 3).cuda()(torch.randn(2, 8, 20, 16, device="cuda"))
attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    print(error_of(convolve), error_of(attend))
played.remove_cudnn_plans()
q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
convolve = lambda: torch.nn.Conv2d(8, 16, 3).cuda()(torch.randn(2, 8, 30, 16, device="cuda"))
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    print(error_of(convolve))
    print(error_of(attend))
"""
    )
    assert lines == [
        "no error no error",
        "RuntimeError: GET was unable to find an engine to execute this computation",
        "RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
    ]


def test_a_driver_that_is_too_old_leaves_torch_without_cuda(machine):
    lines = machine.run(
        TORCH + "print(torch.cuda.is_available()); print(error_of(torch.cuda.init))", driver_version=12020
    )
    assert lines[0] == "False"
    assert "driver on your system is too old (found version 12020)" in lines[1]


@pytest.mark.parametrize(("error", "name"), [(9, "DriverNotLoaded"), (12, "LibraryNotFound")])
def test_nvml_may_be_missing_where_cuda_is_there(machine, error, name):
    program = CUDART + (
        "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as error: print(type(error).__name__)\n"
        "print(answer('cudaGetDeviceCount'))"
    )
    assert machine.run(program, nvml_error=error) == [f"NVMLError_{name}", "(0, 1)"]


# ---- several cards, and which are visible

UUID = "GPU-91a7edca-4d00-4000-8000-00000000000"


@pytest.mark.parametrize(
    ("wanted", "buses"),
    [
        (None, [1, 2, 3]),
        ("2,0", [3, 1]),
        (f"{UUID}1,{UUID}0", [2, 1]),
        ("0,7,1", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("GPU-00", []),
    ],
)
def test_a_process_sees_the_cards_that_cuda_visible_devices_names(machine, wanted, buses):
    program = (
        CUDART + "print([answer('cudaDeviceGetAttribute', 33, i)[1] for i in range(answer('cudaGetDeviceCount')[1])])"
    )
    given = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    assert machine.run(program, A100, 3, given) == [str(buses)]


@pytest.mark.parametrize(("order", "first"), [("FASTEST_FIRST", "H100"), ("PCI_BUS_ID", "T4")])
def test_cuda_counts_the_fastest_card_first_and_nvml_the_first_on_the_bus(machine, order, first):
    program = CUDART + NVML + "print(properties(0)[0], '|', pynvml.nvmlDeviceGetName(gpu))"
    (line,) = machine.run(program, T4, given={"CUDA_DEVICE_ORDER": order}, others=(H100,))
    assert first in line.split("|")[0]
    assert line.endswith("| Tesla T4")


def test_memory_is_booked_on_the_card_that_a_tensor_lies_on(machine):
    (line,) = machine.run(
        TORCH
        + """
x = torch.empty(2**28, device="cuda:1")
y = x[:2**26].to("cuda:0")
print([(torch.cuda.memory_reserved(i) >> 20, (played.used_bytes(i) >> 20) - 400) for i in range(2)])
""",
        A100,
        2,
    )
    assert line == "[(256, 256), (1024, 1024)]"


# ---- NVML


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_cuda_and_nvml_tell_the_same_of_a_card(machine, card):
    lines = machine.run(
        CUDART
        + NVML
        + """
if pynvml.nvmlDeviceGetUUID(gpu).startswith("GPU-") and os.environ.get("PLAYED_MIG"):
    gpu = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
print(pynvml.nvmlDeviceGetName(gpu))
print(pynvml.nvmlDeviceGetMemoryInfo(gpu).total)
total = ctypes.c_size_t()
answer("cudaMemGetInfo", ctypes.byref(total), of=ctypes.c_size_t)
print(total.value)
print(*pynvml.nvmlDeviceGetCudaComputeCapability(gpu))
print(*(answer("cudaDeviceGetAttribute", attribute, 0)[1] for attribute in (75, 76, 16, 38)))
""",
        card,
    )
    major, minor = card.capability
    assert lines == [
        card.name,
        str(card.total_bytes),
        str(card.total_bytes),
        f"{major} {minor}",
        f"{major} {minor} {card.num_multiprocessors} {card.l2_bytes}",
    ]


def test_nvml_reads_what_the_instruments_are_set_to(machine):
    machine.played.set_neighbour(3 * GIB)
    machine.played.set_power_w(250)
    machine.played.set_temperature_c(83)
    machine.played.set_utilization(97, 41)
    machine.played.set_throttle_reasons(0x20)
    lines = machine.run(
        NVML
        + """
print(pynvml.nvmlDeviceGetPowerUsage(gpu), pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
print(pynvml.nvmlDeviceGetTemperature(gpu, 0), pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
rates = pynvml.nvmlDeviceGetUtilizationRates(gpu)
print(rates.gpu, rates.memory)
print([(each.pid, each.usedGpuMemory >> 30) for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)])
import time
before_mj, began = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.monotonic()
time.sleep(0.2)
print((pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before_mj) / 1000 / (time.monotonic() - began))
"""
    )
    assert lines[:4] == ["250000 400000", "83 32", "97 41", "[(1, 3)]"]
    assert float(lines[4]) == pytest.approx(250, rel=0.05)


def test_a_slice_has_a_board_with_more_memory_and_another_uuid(machine):
    lines = machine.run(
        CUDART
        + NVML
        + """
part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
print(pynvml.nvmlDeviceGetName(gpu), pynvml.nvmlDeviceGetMigMode(gpu), pynvml.nvmlDeviceGetMemoryInfo(gpu).total >> 20)
uuid = pynvml.nvmlDeviceGetUUID(part)
print(uuid[4:].replace("-", "") == properties(0)[1], uuid[4:] in pynvml.nvmlDeviceGetUUID(gpu))
""",
        H100_SLICE,
    )
    assert lines == ["NVIDIA H100 80GB HBM3 [1, 1] 81559", "True False"]
    for wanted in ("0", f"{UUID}0", "MIG-91a7edca-4d00-4000-8000-000000000100"):
        count = CUDART + "print(answer('cudaGetDeviceCount'))"
        assert machine.run(count, H100_SLICE, given={"CUDA_VISIBLE_DEVICES": wanted}) == ["(0, 1)"]


# ---- groups

GROUP = (
    TORCH
    + """
import sys, torch.distributed as dist
rank, file = int(os.environ["RANK"]), os.environ["GROUP_FILE"]
torch.cuda.set_device(int(os.environ["DEVICE"]))
def join():
    dist.init_process_group("nccl", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    x = torch.tensor([rank + 1.0] * 4).cuda()
    dist.all_reduce(x)
    print(x.tolist(), (played.processes(rank)[os.getpid()] - torch.cuda.memory_reserved() >> 20) - 400, flush=True)
    gathered = [None, None]
    dist.all_gather_object(gathered, f"rank {rank}")
    print(gathered, flush=True)
    dist.destroy_process_group()
    print((played.processes(rank)[os.getpid()] - torch.cuda.memory_reserved() >> 20) - 400, flush=True)
print(error_of(join), flush=True)
os._exit(0)
"""
)


def run_group(machine, tmp_path, devices):
    common = {"GROUP_FILE": str(tmp_path / "store")}
    given = [common | {"RANK": str(rank), "DEVICE": device} for rank, device in enumerate(devices)]
    ranks = [machine.begin(GROUP, A100, 2, each, copies_up_to=65536, nccl_mib=100) for each in given]
    return [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]


def test_two_ranks_reduce_gather_and_hold_memory_for_their_communicator(machine, tmp_path):
    for lines in run_group(machine, tmp_path, "01"):
        assert lines == ["[3.0, 3.0, 3.0, 3.0] 100", "['rank 0', 'rank 1']", "0", "no error"]


def test_two_ranks_on_one_card_are_refused(machine, tmp_path):
    for lines in run_group(machine, tmp_path, "00"):
        assert "DistBackendError" in lines[-1]


# ---- the command, the settings, the books and the build


def test_a_setting_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match="PLAYED_NVML_EROR"):
        environment(A100, nvml_eror=9)


def test_the_command_passes_the_exit_code_on_and_leaves_nothing_behind():
    env = {name: value for name, value in os.environ.items() if name != "PLAYED_STATE"} | {"PYTHONPATH": str(ROOT)}
    program = "import os, sys; print(os.environ['PLAYED_STATE'], os.environ['PLAYED_NAME']); sys.exit(7)"
    command = [sys.executable, "-m", "tests.driver", "--card", "t4", sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    state, _, name = done.stdout.strip().partition(" ")
    assert (done.returncode, name) == (7, "Tesla T4")
    assert not Path(state).parent.exists()


def test_the_command_passes_a_signal_on():
    program = "import signal, time; print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "tests.driver", sys.executable, "-c", program]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_books_of_another_version_are_refused_on_both_sides(machine):
    machine.state.write_bytes((99).to_bytes(4, "little") + bytes(100))
    assert "take a new file" in machine.begin(CUDART).communicate()[1]
    with pytest.raises(RuntimeError, match="is of version 99"):
        Played(machine.state)


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="gcc, nm, readelf is missing"):
        build(Path(torch.__file__).parent, tmp_path)


def a_torch(folder: Path, cudart: str) -> Path:
    """A package `torch` with one library, which calls a function of CUDA that nobody knows."""
    lib = folder / "torch" / "lib"
    lib.mkdir(parents=True)
    (folder / "torch" / "version.py").touch()
    (folder / "tomorrow.c").write_text("int cudaOfTomorrow(void);\nint call(void) { return cudaOfTomorrow(); }\n")
    subprocess.run(
        ["gcc", "-shared", "-o", folder / cudart, f"-Wl,-soname,{cudart}", "-x", "c", os.devnull], check=True
    )
    arguments = ["-Wl,--no-as-needed", folder / "tomorrow.c", folder / cudart, "-o", lib / "libtorch_cuda.so"]
    subprocess.run(["gcc", "-shared", "-fPIC", *arguments], check=True)
    return folder / "torch"


def test_what_a_newer_torch_imports_beyond_the_known_succeeds_and_does_nothing(tmp_path):
    folder = build(a_torch(tmp_path, "libcudart.so.13"), tmp_path / "built")
    assert ctypes.CDLL(str(folder / "libplayed.so")).cudaOfTomorrow() == 0


def test_a_torch_for_another_cuda_is_refused_by_what_it_needs(tmp_path):
    with pytest.raises(BuildError, match=r"needs libcudart\.so\.14, and the driver plays CUDA 13"):
        build(a_torch(tmp_path, "libcudart.so.14"), tmp_path / "built")
