"""What a technique does beside the computation, on a stream of its own or on the host, waits for it and is waited for.

torch's own detector of races watches the streams: it follows who waits for whom, whatever the kernels compute.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.devices import open_device
from autotune.probe.measure import Run
from autotune.probe.passes import MicroBatches
from autotune.records.config import ProbeSettings
from autotune.task import Task
from autotune.techniques import activation_offload
from autotune.techniques.activation_offload import _Store
from autotune.techniques.device_prefetch import Copier
from autotune.units import KIB
from tests.devices.processes import in_process
from tests.driver.played import Played

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(256, 4))


def watched(train: Callable[[], Any]) -> Any:
    """What a function returns while torch looks for races; a race raises."""
    import torch.cuda._sanitizer as sanitizer

    sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    try:
        return train()
    finally:
        sanitizer.cuda_sanitizer.disable()  # type: ignore[no-untyped-call]


def is_taken_by_others(give_away: Callable[[], int], stream: torch.cuda.Stream) -> bool:
    """Whether the memory that is given away, whose address that returns, is what an allocation on a stream gets next."""
    address = give_away()
    with torch.cuda.stream(stream):
        return torch.empty(2**20, device="cuda").data_ptr() == address


def keep_busy() -> None:
    """Queue half a second of work on the current stream."""
    matrix = torch.ones(8192, 8192, device="cuda")
    for _ in range(8):
        matrix @ matrix


def train_on_prefetched_batches() -> int:
    samples = [(torch.ones(256), i % 4) for i in range(32)]
    session = prepare(
        Task(build_model=model, train_dataset=lambda: samples),
        {"batch_size": 4, "device_prefetch": True},
        device="cuda",
    )
    return len([session.step(step) for step in session.loader])


def test_a_prefetched_batch_is_read_when_it_has_arrived() -> None:
    assert in_process(watched, train_on_prefetched_batches) == 8


def test_a_prefetched_batch_keeps_its_memory_until_the_step_has_read_it() -> None:
    def give_away() -> bool:
        copies: Any = Copier(torch.device("cuda"))

        def read() -> int:
            batch = copies.begin(torch.ones(2**20))()
            keep_busy()
            return int((batch + 1).data_ptr() and batch.data_ptr())

        return is_taken_by_others(read, copies.stream)

    assert in_process(give_away) is False


def offload() -> tuple[int, list[int], list[int]]:
    """Tensors that moved, the events that the moves recorded, and those that the stream that trains waited for."""
    import torch.cuda._gpu_trace as trace

    activation_offload._SMALLEST_BYTES = 0
    streams: dict[int, int] = {}
    waits: list[tuple[int, int]] = []
    trace.register_callback_for_event_record(streams.__setitem__)
    trace.register_callback_for_event_wait(lambda event, stream: waits.append((event, stream)))
    moved: list[Any] = []
    move = _Store.move
    _Store.move = lambda store, tensor: moved.append(move(store, tensor)) or moved[-1]  # type: ignore[func-returns-value, method-assign]
    task = Task(build_model=model, make_batch=lambda n: (torch.randn(n, 256), torch.randint(4, (n,))))
    session = prepare(task, {"batch_size": 8, "activation_offload": 4}, device="cuda")
    session.step(task.batch(8))
    training = torch.cuda.current_stream().cuda_stream
    assert all(one.host.is_pinned() for one in moved)
    return (
        len(moved),
        sorted(event for event, stream in streams.items() if stream != training),
        sorted({event for event, stream in waits if stream == training}),
    )


def test_an_activation_is_copied_when_it_is_computed_and_copied_back_when_it_has_arrived() -> None:
    num_moved, recorded, waited_for = in_process(watched, offload)
    assert num_moved >= 4
    assert recorded == waited_for


def test_an_activation_keeps_its_memory_until_it_is_copied() -> None:
    def give_away() -> bool:
        store = _Store(torch.device("cuda"))

        def move() -> int:
            activation = torch.ones(2**20, device="cuda")
            keep_busy()  # the copy waits for it
            store.move(activation)
            return activation.data_ptr()

        return is_taken_by_others(move, torch.cuda.current_stream())

    assert in_process(give_away) is False


def test_an_optimizer_on_the_host_steps_when_gradients_have_arrived() -> None:
    def pending() -> list[bool]:
        found = []
        module = importlib.import_module("torch.optim.adam")  # of which AdamW is a kind
        adam = module.adam

        def stepped(*arguments: Any, **named: Any) -> None:
            found.append(torch.cuda.current_stream().query())
            adam(*arguments, **named)

        module.adam = stepped  # type: ignore[attr-defined]
        task = Task(build_model=model, make_batch=lambda n: (torch.randn(n, 256), torch.randint(4, (n,))))
        session = prepare(task, {"batch_size": 8, "optimizer_state": "cpu"}, device="cuda")
        keep_busy()
        session.step(task.batch(8))
        return found

    assert in_process(pending) == [True]


def test_a_probe_times_what_the_gpu_does_and_not_how_fast_it_is_asked() -> None:
    def times() -> tuple[float, float, float]:
        side = 4096
        task = Task(
            build_model=lambda: nn.Linear(side, side), make_batch=lambda n: (torch.randn(n, side), torch.randn(n, side))
        )
        device = open_device("cuda")
        session = prepare(task, {"batch_size": side}, device=device)
        settings = ProbeSettings(memory_limit_bytes=None, num_steps=5, timeout_s=120)
        measured = Run(session, device, settings, lambda progress: None).measure(0.0)
        batch = task.batch(side)
        batch = tuple(tensor.cuda() for tensor in batch)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        session.step(batch)
        end.record()
        device.synchronize()
        phases_s = sum(measured.phases_s[name] for name in ("forward", "backward", "optimizer"))
        return begin.elapsed_time(end) / 1000, measured.step_s, phases_s

    of_events_s, step_s, phases_s = in_process(times)
    assert step_s > 0.8 * of_events_s
    assert phases_s > 0.8 * of_events_s


@pytest.mark.played
def test_a_host_that_page_locks_no_batch_is_trained_on_all_the_same() -> None:
    def train() -> tuple[list[bool], bool]:
        task = Task(build_model=model, make_batch=lambda n: (torch.randn(n, 256), torch.randint(4, (n,))))
        session = prepare(task, {"batch_size": 256}, device="cuda")
        Played(Path(os.environ["PLAYED_STATE"])).limit_pinned_bytes(64 * KIB)
        batches = MicroBatches(session)
        prepared = [next(batches)[0] for _ in range(4)]
        return [images.is_pinned() for images, _ in prepared], math.isfinite(session.step(prepared[0]).item())

    try:
        assert in_process(train) == ([False] * 4, True)
    finally:
        Played(Path(os.environ["PLAYED_STATE"])).limit_pinned_bytes(2**50)
