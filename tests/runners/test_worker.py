"""What a job reports of an allocation that failed."""

import pytest
import torch

import autotune.devices
import autotune.probe.checks
import autotune.probe.inspection
import autotune.session
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.runners import worker
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.tuning.inspecting import inspection_failed
from autotune.units import GIB, MIB
from tests.devices.processes import in_process

techniques = find_techniques()


class Card(CpuDevice):
    """A device whose allocator once held more than it holds now."""

    capabilities = CudaDevice.capabilities

    def peak_bytes(self):
        return 7 * GIB

    def held_bytes(self, attempted_bytes):
        return 3 * GIB


@pytest.fixture
def fail(monkeypatch):
    """Runs a probe on `Card` whose training raises `error`."""

    def probe(error):
        def prepare(task, config, **options):
            raise error

        monkeypatch.setattr(worker, "open_device", lambda name: Card())
        monkeypatch.setattr(autotune.session, "prepare", prepare)
        settings = ProbeSettings(memory_limit_bytes=None)
        arguments = {"config": techniques.complete({}).as_dict(), "device": "cuda:0", "settings": settings.to_dict()}
        return worker._probe(None, arguments, lambda progress: None)["outcome"]

    return probe


def test_a_failed_allocation_came_on_top_of_what_was_held_then_not_of_an_earlier_peak(fail):
    outcome = fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    assert outcome["kind"] is Kind.OOM
    assert (outcome["peak_bytes"], outcome["attempted_bytes"]) == (3 * GIB, 2 * GIB)


@pytest.mark.parametrize(("error", "kind"), [(MemoryError(), Kind.OOM), (ValueError("shape"), Kind.ERROR)])
def test_where_nothing_says_what_was_asked_for_the_peak_is_what_is_known(fail, error, kind):
    outcome = fail(error)
    assert outcome["kind"] is kind
    assert (outcome["peak_bytes"], outcome["attempted_bytes"]) == (7 * GIB, 0)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("job", "module", "function", "arguments"),
    [
        (
            "inspect",
            autotune.probe.inspection,
            "inspect_task",
            {"absent": None, "trains": True, "world": {}, "comparing_s": 0.0},
        ),
        (
            "check",
            autotune.probe.checks,
            "run_checks",
            {"config": {}, "batch_size": 4, "settings": ProbeSettings(memory_limit_bytes=None).to_dict()},
        ),
    ],
)
def test_an_inspection_and_a_check_tell_memory_that_others_hold_from_what_the_model_needs(
    monkeypatch, shared, job, module, function, arguments
):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(Card, "is_crowded", lambda self, attempted_bytes: shared)
    monkeypatch.setattr(worker, "open_device", lambda name: Card())
    monkeypatch.setattr(module, function, fail)
    task = Task(build_model=lambda: torch.nn.Linear(1, 1), make_batch=lambda n: (torch.zeros(n, 1), torch.zeros(n, 1)))
    given = {"device": "cuda:0", "memory_limit_bytes": None, **arguments}
    outcome = worker.JOBS[job](task, given, lambda progress: None)["outcome"]
    assert (outcome["kind"], outcome["crowded"], outcome["attempted_bytes"]) == (Kind.OOM, shared, 2 * GIB)
    assert outcome["cause"].startswith("other processes hold memory") == shared


def test_memory_of_the_host_that_a_gpus_job_lacked_is_told_as_the_hosts(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "2147483648 bytes. Error code 12 (Cannot allocate memory)"
        )

    monkeypatch.setattr(Card, "is_crowded", lambda self, attempted_bytes: True)
    monkeypatch.setattr(worker, "open_device", lambda name: Card())
    monkeypatch.setattr(autotune.probe.inspection, "inspect_task", fail)
    given = {"device": "cuda:0", "memory_limit_bytes": None, "absent": None, "trains": True, "world": {}}
    given["comparing_s"] = 0.0
    outcome = Outcome.from_dict(worker.JOBS["inspect"](None, given, lambda progress: None)["outcome"])
    assert (outcome.kind, outcome.on_host, outcome.crowded) == (Kind.OOM, True, False)
    told = str(inspection_failed(outcome, 8 * GIB))
    assert told.startswith("the host's memory ran out, not the GPU's: an allocation of 2.00 GiB failed")
    assert "--memory-limit" not in told and "8.00 GiB" not in told


@pytest.mark.parametrize(
    ("log", "then"), [("", ""), ("/logs/probe-1.log", "; `probe-1.log` in /logs holds its output")]
)
def test_an_inspection_that_took_too_long_says_what_gives_it_more_time_and_where_its_output_is_if_any(log, then):
    outcome = Outcome(kind=Kind.TIMEOUT, cause="killed after 20 s, during setup", log=log)
    more = "; a larger --budget, or --probe-timeout, gives it more time"
    assert str(inspection_failed(outcome, 8 * GIB)).endswith(f"during setup{more}{then}")


@pytest.mark.parametrize(("num_ranks", "each"), [(1, 6), (3, 2), (8, 1)])
def test_the_ranks_of_a_world_share_the_threads_of_numpys_blas(num_ranks, each, monkeypatch, tmp_path):
    class Ended(BaseException):
        pass

    def end(status):
        raise Ended

    given = []
    monkeypatch.setattr(worker, "_restore_blas_threads", given.append)
    monkeypatch.setattr(worker, "_take_rank", lambda request: None)
    monkeypatch.setattr(worker.os, "_exit", end)
    monkeypatch.setitem(worker.JOBS, "nothing", lambda task, arguments, report: {})
    request = {
        "channel": str(tmp_path / "channel"), "compiled": "", "widest": None, "source": {}, "job": "nothing",
        "arguments": {}, "blas_threads": 6, "num_ranks": num_ranks, "log": "",
    }  # fmt: skip
    task = Task(build_model=torch.nn.Identity, train_dataset=lambda: [0.0])
    with pytest.raises(Ended):
        worker.run_job(task, request)
    assert given == [each]


def outside_bytes_with_many_threads(trains):
    torch.set_num_threads(16)
    task = Task(
        build_model=lambda: torch.nn.Linear(8, 4),
        make_batch=lambda n: (torch.randn(n, 8), torch.randint(0, 4, (n,))),
    )
    given = {"device": "cpu", "memory_limit_bytes": 8 * GIB, "absent": None, "trains": trains, "world": {}}
    given |= {"comparing_s": 0.0}
    return worker._inspect(task, given, lambda progress: None)["inspection"]["outside_bytes"]


def test_the_compute_threads_of_a_cpu_are_outside_a_model_whether_it_is_trained_or_not():
    trained, untrained = (in_process(outside_bytes_with_many_threads, trains) for trains in (True, False))
    assert untrained == pytest.approx(trained, abs=40 * MIB)  # of 15 threads that were started, 120 MiB are stacks
