"""Measures where the time of a training step goes, module by module, and how much the allocator really holds."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from autotune.devices import Device
from autotune.probe.passes import MicroBatches
from autotune.records.config import ALONE, Config, World
from autotune.records.explanation import BACKWARD, BATCH, FORWARD, LOSS, MODEL, STEP, UPDATE, ModuleTimes
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import StepBatch

_LARGEST_SEQUENCE = 2**63  # nodes that accumulate gradients are outside the order: their number is 2**64 - 1
NUM_STEPS = 5  # timed steps of one micro batch each, after NUM_WARMUP untimed ones
NUM_WARMUP = 3


@dataclass
class Stretch:
    """A stretch of a training step in which one module's code runs.

    Attributes:
        sequence: number of the first autograd node that can be made in it.
        note: what `Scopes.note` returned at its beginning.
    """

    phase: str
    module: str
    sequence: int
    note: Any


class Scopes:
    """The stretches of training steps: found by module hooks in the forward pass, by hooks on autograd nodes in the backward pass.

    A forward pass that is run again in the backward pass counts for its module, too. A node belongs to the module whose
    forward pass was running when the node got its sequence number. Time or memory between two nodes of the backward pass
    counts for the node that ran first.

    Args:
        note: called at the beginning of each stretch.

    Attributes:
        last_layer: the module that began last in a forward pass; empty where none did.
    """

    def __init__(self, session: Session, note: Callable[[], Any]) -> None:
        self.stretches: list[Stretch] = []
        self.last_layer = ""
        self._session = session
        self._note = note
        self._names = {id(module): name or MODEL for name, module in session.model.named_modules()}
        self._outer: list[str] = []
        self._phase = STEP
        self._after_layer: Stretch | None = None  # the model's own code after the layer that ran last

    def begin(self, phase: str, module: str) -> None:
        """Another stretch begins."""
        self._phase = phase
        self.stretches.append(Stretch(phase, module, torch._C._autograd._get_sequence_nr(), self._note()))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the session's forward and backward passes; for all else (the update, say) the caller calls `begin`."""
        loss = self._session.loss

        def observed(micro_batch: Any) -> torch.Tensor:
            self._outer.clear()
            self._after_layer = None
            self.begin(FORWARD, BATCH)
            result = loss(micro_batch)
            self.begin(BACKWARD, LOSS)
            self._follow_back(result)
            return result

        with (
            mock.patch.object(self._session, "loss", observed),
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        current = self.stretches[-1].module if self.stretches else LOSS
        self._outer.append(LOSS if current == BATCH else current)
        if name is not None:
            self.begin(self._phase, name)
            if self._phase == FORWARD and name != MODEL:
                self.last_layer = name

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        outer = self._outer.pop()
        name = self._names.get(id(module))
        if name is None:
            return
        if name == MODEL and self._after_layer is not None:
            self._after_layer.module = LOSS  # what a model does after its last layer may be to compute the loss
            self._after_layer = None
        self.begin(self._phase, outer)
        if outer == MODEL:
            self._after_layer = self.stretches[-1]

    def _follow_back(self, loss: torch.Tensor) -> None:
        """Have every node of the graph tell when the backward pass comes to it."""
        sequences = [stretch.sequence for stretch in self.stretches]
        for node in graph_nodes(loss):
            if (number := node._sequence_nr()) < _LARGEST_SEQUENCE:
                module = self.stretches[bisect_right(sequences, number) - 1].module
                node.register_prehook(partial(self._come_to, module))

    def _come_to(self, module: str, gradients: Any) -> None:
        if self.stretches[-1].module != module:
            self.begin(BACKWARD, module)


def graph_nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Every node of the autograd graph that a loss hangs on."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def measure_modules(task: Task, config: Config, device: Device, world: World) -> ModuleTimes:
    """Train a few steps of `config`: with the widest samples for the memory, with usual ones for the time.

    Raises:
        Exception: whatever the user's code or an allocation raises.
    """
    task.dataset()  # made before, so that its memory does not count
    held: list[int] = []
    with _allocations(device, held):
        session = prepare(task, config, device=device, world=ALONE, on_oom=RAISE)
        # A step keeps all its micro batches in memory, so all are made. Two are enough to train: more do not raise the peak.
        batch = [(task.batch(config.batch_size), config.batch_size) for _ in range(config.accumulation_steps)]
        for _ in range(2):  # the first step allocates the optimizer's state
            session.step(StepBatch(batch[:2]))
        device.synchronize()
    return ModuleTimes(seconds=_times(session, device), allocated_bytes=held[0])


@contextmanager
def _allocations(device: Device, held: list[int]) -> Iterator[None]:
    """Append the most bytes that tensors held at once inside; on a CPU the maximum of the running sum of the profiler's events.

    On a GPU, cuBLAS's workspaces (64 MiB on Hopper) are not counted, because they exist before.
    """
    if device.capabilities.own_allocator:
        device.enter()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        held.append(torch.cuda.max_memory_allocated() - before)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    kineto = profiler.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    held.append(max(itertools.accumulate(change for _, change in changes), default=0))


def _times(session: Session, device: Device) -> dict[str, dict[str, float]]:
    """Module -> phase -> seconds of a step of one micro batch and its update."""
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in session.model.modules())
    if session.task.takes_whole_steps or compiled:  # one unit, into which hooks do not reach
        return {}
    clock: Callable[[], Any] = _event if device.capabilities.streams else time.perf_counter
    scopes = Scopes(session, clock)
    batches = MicroBatches(session)
    for _ in range(NUM_WARMUP):
        session.step(StepBatch([next(batches)]))
    with scopes.followed():
        for _ in range(NUM_STEPS):
            session.accumulate(StepBatch([next(batches)]))
            scopes.begin(STEP, UPDATE)
            session.update()
            device.synchronize()
            scopes.begin("", "")  # loading the next batch
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stretch, following in itertools.pairwise(scopes.stretches):
        if stretch.phase:
            seconds[stretch.module][stretch.phase] += _between_s(stretch.note, following.note) / NUM_STEPS
    return {module: dict(phases) for module, phases in seconds.items()}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_s(first: Any, second: Any) -> float:
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1000)
