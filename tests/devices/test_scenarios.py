"""The matrix of what users' cards are like: limit, peak, contention and verdict of a probe, and the search on top.

`pytest -s tests/devices/test_scenarios.py` prints it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from autotune import devices
from autotune.devices import cuda, instruments
from autotune.devices.cuda import CudaDevice
from autotune.errors import DeviceError
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.jobs import CheckJob, InspectJob, Job
from autotune.runners.local import LocalRunner
from autotune.techniques import find_techniques
from autotune.tuning.why import as_error
from autotune.units import GIB, MIB, format_bytes
from tests.devices.fake_card import CONTEXT_BYTES, NO_NVML, Card, Machine, Neighbour
from tests.devices.scenarios import MODEL_BYTES, SAMPLE_BYTES, FakeCardRunner, fits, found, train

complete = find_techniques().complete

ALONE = MODEL_BYTES + 8 * SAMPLE_BYTES + CONTEXT_BYTES  # a probe of batch 8
ROWS: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def printed() -> Iterator[None]:
    yield
    columns = list(dict.fromkeys(column for cells in ROWS.values() for column in cells))
    rows = [["scenario", *columns], *([name, *(cells.get(c, "") for c in columns)] for name, cells in ROWS.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def tell(name: str, **cells: str) -> None:
    ROWS.setdefault(name, {}).update({column.replace("_", " "): text for column, text in cells.items()})


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A machine, what one probe of batch 8 on it has to find, and what a search has to end with.

    Attributes:
        card: of the machine, made anew for each test.
        limit_bytes: the default limit.
        peak_bytes: of the probe; within `peak_error` bytes.
        disturbed: what the probe says of its disturbances.
        before: happens to the card before the search's probe of a number.
        during: happens to the card in the search's inspection or check of a number.
        best: batch size of the search's answer.
        num_probes_again: probes that the search ran a second time.
        job_again: the other job that it ran a second time.
    """

    card: Callable[[], Card]
    limit_bytes: int
    peak_bytes: int = ALONE
    contention: float = 0.0
    disturbed: str = ""
    before: Callable[[Card, int], None] = lambda card, number: None
    during: Callable[[Card, Job, int], None] = lambda card, job, number: None
    releases_in: int = 0
    best: int = 0
    num_probes_again: int = 0
    job_again: str = ""
    others: tuple[Card, ...] = ()
    cuda_order: tuple[int, ...] | None = None
    nvml_error: Exception | None = None

    def machine(self, monkeypatch: pytest.MonkeyPatch) -> Machine:
        return Machine(monkeypatch, *self.others, self.card(), cuda_order=self.cuda_order, nvml_error=self.nvml_error)


def grows(card: Card, number: int, *, probes: range, used: int = 50 * GIB) -> None:
    card.neighbours[0].used_bytes = used if number in probes else 0


def grows_in_the_first(card: Card, job: Job, number: int, kind: type[Job]) -> None:
    if isinstance(job, kind):
        card.neighbours[0].used_bytes = 79 * GIB if number == 0 else 0


def card_of(**changes: object) -> Callable[[], Card]:
    return lambda: Card(**changes)  # type: ignore[arg-type]


def with_neighbour(neighbour: dict[str, int], **changes: object) -> Callable[[], Card]:
    return lambda: Card(neighbours=[Neighbour(**neighbour)], **changes)  # type: ignore[arg-type]


A100 = {"name": "NVIDIA A100-SXM4-80GB", "total_bytes": 80 * GIB, "capability": (8, 0)}
SCENARIOS = {
    "alone, booked right": Scenario(card=card_of(), limit_bytes=140 * GIB),
    "container: booked 0 bytes": Scenario(card=card_of(books="zero"), limit_bytes=140 * GIB),
    "WSL: booked without a figure": Scenario(card=card_of(books="none"), limit_bytes=140 * GIB),
    "container: the host's pid": Scenario(card=card_of(books="host pid"), limit_bytes=140 * GIB),
    "container: empty list": Scenario(card=card_of(books="empty list"), limit_bytes=140 * GIB),
    "T4, no bf16": Scenario(
        card=card_of(name="Tesla T4", total_bytes=15 * GIB, capability=(7, 5)), limit_bytes=15 * GIB
    ),
    "laptop: a desktop, always hot": Scenario(
        card=with_neighbour({"used_bytes": GIB}, name="RTX 4070 Laptop", total_bytes=12 * GIB, reasons=0x20),
        limit_bytes=11 * GIB,
        disturbed="clock throttled: temperature (driver)",
        num_probes_again=1,
    ),
    "at its power cap": Scenario(card=card_of(reasons=0x04), limit_bytes=140 * GIB),
    "a busy neighbour, visible": Scenario(
        card=with_neighbour({"used_bytes": 5 * GIB, "utilization": 40}, **A100),
        limit_bytes=75 * GIB,
        contention=0.4,
        disturbed="others held the processor for 40% of the time",
        num_probes_again=1,
    ),
    "a busy neighbour, hidden": Scenario(
        card=with_neighbour({"used_bytes": 5 * GIB, "utilization": 40}, books="empty list", **A100),
        limit_bytes=75 * GIB,
    ),
    "a neighbour grows for a while": Scenario(
        card=with_neighbour({}, **A100),
        limit_bytes=80 * GIB,
        before=lambda card, number: grows(card, number, probes=range(2, 3)),
        num_probes_again=1,
    ),
    "the same, hidden": Scenario(
        card=with_neighbour({}, books="empty list", **A100),
        limit_bytes=80 * GIB,
        before=lambda card, number: grows(card, number, probes=range(2, 3)),
        num_probes_again=1,
    ),
    "a neighbour grows for good": Scenario(
        card=with_neighbour({}, **A100),
        limit_bytes=80 * GIB,
        before=lambda card, number: grows(card, number, probes=range(2, 100)),
        best=32,  # the largest that still runs; 64 had fitted, and then lacked memory in the play-off
    ),
    "a neighbour in the inspection": Scenario(
        card=with_neighbour({}, **A100),
        limit_bytes=80 * GIB,
        during=lambda card, job, number: grows_in_the_first(card, job, number, InspectJob),
        job_again="inspect",
    ),
    "the same in a check, hidden": Scenario(
        card=with_neighbour({}, books="empty list", **A100),
        limit_bytes=80 * GIB,
        during=lambda card, job, number: grows_in_the_first(card, job, number, CheckJob),
        job_again="check",
    ),
    "a predecessor still releases": Scenario(card=card_of(**A100), limit_bytes=80 * GIB, releases_in=20),
    "the same, empty list": Scenario(card=card_of(books="empty list", **A100), limit_bytes=80 * GIB, releases_in=20),
    "a MIG slice": Scenario(
        card=lambda: Card(instances=[Card(uuid="MIG-77777777", name="NVIDIA H200 MIG 1g.18gb", total_bytes=16 * GIB)]),
        limit_bytes=16 * GIB,
    ),
    "two unlike boards": Scenario(
        card=card_of(), limit_bytes=140 * GIB, others=(Card("GPU-2", "Tesla T4", 15 * GIB, (7, 5)),), cuda_order=(1, 0)
    ),
    "container without NVML": Scenario(card=card_of(**A100), limit_bytes=80 * GIB, nvml_error=NO_NVML),
    "the same, a neighbour grows": Scenario(
        card=with_neighbour({}, **A100),
        limit_bytes=80 * GIB,
        before=lambda card, number: grows(card, number, probes=range(2, 3)),
        num_probes_again=1,
        nvml_error=NO_NVML,
    ),
}
each = pytest.mark.parametrize("name", SCENARIOS)


def trained_card(machine: Machine) -> Card:
    return machine.visible[0]


@each
def test_one_probe(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scenario = SCENARIOS[name]
    machine = scenario.machine(monkeypatch)
    limit_bytes = CudaDevice(0).info().free_bytes
    outcome = train(machine, limit_bytes, 8)
    assert outcome.measurement is not None, outcome
    measured = outcome.measurement
    tell(
        name,
        limit=format_bytes(limit_bytes),
        peak=format_bytes(measured.peak_bytes),
        contention=f"{measured.contention:.2f}",
        verdict="ok, disturbed" if measured.disturbances else "ok",
    )
    assert limit_bytes == scenario.limit_bytes
    assert measured.peak_bytes == pytest.approx(scenario.peak_bytes, abs=128 * MIB)
    assert measured.contention == pytest.approx(scenario.contention)
    assert measured.disturbances == ((scenario.disturbed,) if scenario.disturbed else ())


@each
def test_beyond_the_limit_it_is_out_of_memory_and_a_wall(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = SCENARIOS[name].machine(monkeypatch)
    outcome = train(machine, ALONE - GIB, 8)
    tell(name, beyond_the_limit="wall" if not outcome.crowded else "disturbance")
    assert (outcome.kind, outcome.crowded) == (Kind.OOM, False), outcome


@each
def test_memory_that_a_neighbour_takes_after_the_limit_was_set_is_a_disturbance(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine = SCENARIOS[name].machine(monkeypatch)
    card = trained_card(machine)
    limit_bytes = CudaDevice(0).info().free_bytes

    def grow() -> None:
        card.neighbours.append(Neighbour(used_bytes=limit_bytes - 4 * GIB, pid=99))

    outcome = train(machine, limit_bytes, 8, meanwhile=grow)
    tell(name, taken_by_others="disturbance" if outcome.crowded else "wall")
    assert (outcome.kind, outcome.crowded) == (Kind.OOM, True), outcome
    assert "other processes hold memory" in outcome.cause


@each
def test_a_whole_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    machine = scenario.machine(monkeypatch)
    card = trained_card(machine)
    runner = FakeCardRunner(
        machine,
        before=lambda number: scenario.before(card, number),
        during=lambda job, number: scenario.during(card, job, number),
        releases_in=scenario.releases_in,
    )
    result = found(tmp_path, runner)
    if scenario.job_again == "check":  # an answer that changes the batch alone has nothing to compare
        runner.run(
            CheckJob(
                config=complete(result.config),
                settings=ProbeSettings(memory_limit_bytes=scenario.limit_bytes),
                batch_size=2,
            )
        )
    best = scenario.best or fits(scenario.limit_bytes)
    tried = [size for size, _ in runner.outcomes]
    tell(name, search=f"batch {result.config['batch_size']} of {best}; {said(runner)}")
    assert result.memory_limit_bytes == scenario.limit_bytes
    assert result.config["batch_size"] == best, (tried, [o.crowded for _, o in runner.outcomes], result.warnings)
    assert any("other processes had taken memory" in warning for warning in result.warnings) == crowded_for_good(runner)
    again = sum(first == second for first, second in itertools.pairwise(tried))
    assert again >= scenario.num_probes_again
    assert not any("could not be compared" in warning for warning in result.warnings)
    lacked = {name: crowded for name, crowded in runner.crowded.items() if any(crowded)}
    assert lacked == ({scenario.job_again: [True, False]} if scenario.job_again else {})


def crowded_for_good(runner: FakeCardRunner) -> bool:
    """Whether a probe lacked memory that others held, and again when it was repeated."""
    crowded = [(size, outcome.crowded) for size, outcome in runner.outcomes]
    return any(first == second and first[1] for first, second in itertools.pairwise(crowded))


def said(runner: FakeCardRunner) -> str:
    kinds = ["crowded" if outcome.crowded else str(outcome.kind) for _, outcome in runner.outcomes]
    again = [f"{name} again" for name, crowded in runner.crowded.items() if any(crowded)]
    return " ".join([*(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds)), *again])


def test_memory_that_others_took_is_no_wall_and_is_tried_again_when_the_study_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = SCENARIOS["a neighbour grows for good"].machine(monkeypatch)
    card = trained_card(machine)
    taken = FakeCardRunner(machine, before=lambda number: grows(card, number, probes=range(2, 100)))
    assert found(tmp_path, taken).config["batch_size"] == 32
    card.neighbours[0].used_bytes = 0
    machine.process_of(0)
    assert found(tmp_path, FakeCardRunner(machine)).config["batch_size"] == fits(80 * GIB)


def test_an_inspection_that_others_leave_no_memory_twice_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, Card(neighbours=[Neighbour()], **A100))  # type: ignore[arg-type]
    card = trained_card(machine)
    runner = FakeCardRunner(machine, during=lambda job, number: grows(card, number, probes=range(2), used=79 * GIB))
    with pytest.raises(DeviceError, match=r"other processes hold memory .*end them"):
        found(tmp_path, runner)
    assert runner.crowded["inspect"] == [True, True]


def test_the_play_off_times_a_gpu_until_its_speed_is_the_one_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = FakeCardRunner(Machine(monkeypatch, Card(total_bytes=16 * GIB)))
    found(tmp_path, runner)
    assert runner.settings[0].min_timed_s == 0
    assert runner.settings[-1].min_timed_s == 2.0


def test_no_time_is_spent_on_running_again_what_is_always_slowed_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = SCENARIOS["laptop: a desktop, always hot"].machine(monkeypatch)
    runner = FakeCardRunner(machine)
    result = found(tmp_path, runner)
    assert len(runner.outcomes) == result.probes + 1  # the first one was run twice


def test_settling_waits_for_what_an_ended_process_held_and_then_accepts_what_others_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(total_bytes=80 * GIB)
    Machine(monkeypatch, card)
    device = CudaDevice(0)
    device.settle()
    card.releasing = [30 * GIB] * 5
    device.settle()
    assert card.releasing == []
    monkeypatch.setattr(cuda, "_RELEASE_S", 0.1)
    card.neighbours.append(Neighbour(used_bytes=20 * GIB))
    device.settle()
    looks: list[int] = []
    monkeypatch.setattr(cuda.time, "sleep", looks.append)
    device.settle()
    assert not looks


def test_what_ended_processes_held_is_waited_for_on_every_gpu_of_a_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards = Card(), Card("GPU-22222222")
    Machine(monkeypatch, *cards)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    runner = LocalRunner(None, logs=tmp_path, devices="cuda:0,1")
    runner._settle()
    for card in cards:
        card.releasing = [30 * GIB] * 5
    runner._settle()
    assert [card.releasing for card in cards] == [[], []]


def test_retries_and_ooms_count_from_the_end_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, Card())
    device = CudaDevice(0)
    device.enter()
    assert machine.process is not None
    machine.process.counts |= {"num_ooms": 7, "num_alloc_retries": 3}  # cuDNN's search for the fastest algorithm
    device.start_measuring()
    assert {"num_ooms": 0, "num_alloc_retries": 0}.items() <= device.memory_detail().items()
    machine.process.counts["num_alloc_retries"] += 1
    assert device.memory_detail()["num_alloc_retries"] == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "driver on your system is too old"),
        ("CUDA error: no kernel image is available for execution on the device\nCompile with", "no kernel image"),
        ("Torch not compiled with CUDA enabled", "not compiled with CUDA"),
    ],
)
def test_what_torch_cannot_use_is_the_devices_fault(monkeypatch: pytest.MonkeyPatch, said: str, expected: str) -> None:
    machine = Machine(monkeypatch, Card())

    def fail(device: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(cuda, "_load_libraries", fail)
    with pytest.raises(DeviceError, match=expected) as raised:
        CudaDevice(0).enter()
    assert "--device cpu" in str(raised.value)
    outcome = train(machine, GIB, 1)
    assert (outcome.kind, outcome.device_fault) == (Kind.ERROR, True)
    assert isinstance(as_error(outcome), DeviceError)


def test_what_every_training_run_loads_is_loaded_before_the_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        cuda._load_libraries(torch.device("cpu"))
    ran = {event.key for event in profiler.key_averages()}
    assert {"aten::mm", "aten::addmm", "aten::convolution", "aten::convolution_backward"} <= ran


def test_a_gpu_that_a_process_uses_already_is_adopted_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, Card())
    assert machine.process is not None
    machine.process.create_context()
    for touched in ("_load_libraries", "torch.cuda.set_device"):
        where = f"autotune.devices.cuda.{touched}" if touched.startswith("_") else touched
        monkeypatch.setattr(where, lambda *_: pytest.fail("it is touched"))
    device = CudaDevice(0)
    device.adopt()
    device.limit_memory(10 * GIB)
    assert machine.process.allowed_bytes == pytest.approx(10 * GIB - CONTEXT_BYTES, abs=2)
    assert device.peak_bytes() == CONTEXT_BYTES


@pytest.mark.parametrize("taken_bytes", [0, 8 * GIB])
def test_what_the_driver_keeps_of_a_card_is_not_taken_for_another_process(
    monkeypatch: pytest.MonkeyPatch, taken_bytes: int
) -> None:
    """An RTX 4090 whose limit is all of it, alone or beside a neighbour that has been there from the beginning."""
    neighbours = [Neighbour(used_bytes=taken_bytes)] if taken_bytes else []
    machine = Machine(monkeypatch, Card(total_bytes=24564 * MIB, driver_bytes=357 * MIB, neighbours=neighbours))
    device = CudaDevice(0)
    device.limit_memory(device.info().total_bytes)
    assert machine.process is not None
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            machine.process.allocate(512 * MIB)
    assert device.is_crowded(512 * MIB) == bool(taken_bytes)


def test_a_process_that_uses_cuda_gets_no_context_on_a_gpu_by_asking_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, Card(), Card("GPU-22222222"))
    assert machine.process is not None
    machine.process.create_context()  # on the first, as in a notebook
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: pytest.fail(f"a context is made on cuda:{index}"))
    device = CudaDevice(1)
    device.settle()
    assert device.info().free_bytes == 140 * GIB and device.hardware_id() == "22222222"


def test_torch_is_asked_for_the_gpus_that_cuda_shows_and_not_for_the_boards_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, Card(), Card("GPU-22222222"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if torch.cuda.is_initialized() else 1)
    instruments.answer()
    assert [gpu["uuid"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == ["11111111", "22222222"]


def test_a_process_that_will_train_finds_out_by_itself_which_of_unlike_gpus_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the use of the card since before its context, where the driver books nothing on it."""
    beside = Card("GPU-22222222", "Tesla T4", 15 * GIB, (7, 5), neighbours=[Neighbour(used_bytes=9 * GIB)])
    Machine(monkeypatch, beside, Card(books="empty list"), cuda_order=(1, 0))
    monkeypatch.setattr(instruments, "_ask", lambda: pytest.fail("another interpreter is started"))
    device = CudaDevice(0)
    device.enter()
    assert device.peak_bytes() == CONTEXT_BYTES


def test_judging_scarcity_makes_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, Card())
    assert not CudaDevice(0).is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling"))
    assert machine.process is not None and not machine.process.context


def test_a_mig_instance_is_found_also_where_cuda_names_it_by_its_board(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SCENARIOS["a MIG slice"].machine(monkeypatch)
    properties = machine._get_device_properties(0)
    properties.uuid = "11111111"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = CudaDevice(0)
    device.enter()
    assert (device.info().model, device.info().total_bytes) == ("NVIDIA H200 MIG 1g.18gb", 16 * GIB)
