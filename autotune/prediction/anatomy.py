"""What lives at the moment of a config's peak, of which kind and made by which module, from whole steps on fake tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from autotune.devices import capabilities_of
from autotune.devices.kernels.cuda_workspaces import cublas_workspaces
from autotune.devices.targets import Target, gpu_of
from autotune.prediction.allocator import reserved_bytes
from autotune.prediction.fake_steps import Run, TraceError, Tracer
from autotune.prediction.passes import Event
from autotune.prediction.traces import Purpose
from autotune.prediction.worlds import joined
from autotune.probe.module_times import Scopes, Stretch
from autotune.records.config import ALONE, Config, World
from autotune.records.device import Work
from autotune.records.explanation import BATCH, KINDS, MODEL, STEP, UPDATE, Anatomy, ModuleMemory, Moment
from autotune.task import Task
from autotune.task.batches import tensors
from autotune.techniques import Techniques

NUM_STEPS = 2  # the first one allocates the optimizer's state
NUM_MOMENTS = 200  # of the timeline
_BATCH_KIND = len(Purpose)  # beside the purposes, in the order of `KINDS`


class _Began(NamedTuple):
    """Where a stretch began, and the work in it."""

    num_events: int
    last_key: int
    work: Work


def anatomies(
    task: Task,
    configs: Iterable[Config],
    target: Target,
    techniques: Techniques,
    host_bytes: int | None = None,
    world: World = ALONE,
) -> Iterable[Anatomy | str]:
    """The anatomy of each config, or in one line why it cannot be traced; where the first cannot be, that alone.

    Args:
        host_bytes: as of `Tracer`.
        world: the processes that train the model together; rank 0 is traced.
    """
    tracer: Tracer | None = None
    with joined(world):
        for place, config in enumerate(configs):
            try:
                tracer = tracer or Tracer(task, target, techniques, host_bytes, world)
                yield anatomy(tracer, config, target)
            except TraceError as error:
                yield str(error)
                if place == 0:
                    return


def anatomy(tracer: Tracer, config: Config, target: Target) -> Anatomy:
    """Trace two optimizer steps at the config's own batch size: one of a single micro batch, one of two where it accumulates.

    Raises:
        TraceError: the task's code needs the values of tensors, or raised something.
    """
    num_micro = min(2, config.accumulation_steps)
    batch = tracer.batch(config.batch_size)
    with tracer.run(config) as run:
        found = _Found(run)
        found.take_steps(config.batch_size, batch, num_micro)
    device = capabilities_of(target)
    # where they are not copied, all micro batches of a step are there while it runs
    num_further = 0 if device.own_memory else config.accumulation_steps - 1
    further_bytes = num_further * tracer.input_bytes(config.batch_size) if num_further else 0
    seen = replace(found.anatomy(further_bytes), wire_bytes=found.wire_bytes(config.accumulation_steps))
    if not device.own_allocator:
        return seen
    added, held = tracer.techniques.allocator_settings(config), cublas_workspaces(gpu_of(target))
    simulated = reserved_bytes(run.tracker.events, added=added, held_bytes=held)
    return replace(seen, reserved_bytes=max(seen.peak_bytes, simulated))


class _Found:
    """A run's storages with their kinds and modules.

    Attributes:
        kinds: key of a storage -> place in `KINDS`, as far as passes tell.
        made_in: key of a storage -> the module under whose code it was made.
        owners: key of what belongs to a parameter -> the module that owns it.
        steps: number of events at the beginning of each step.
        micro_batches: number of stretches before each micro batch of the last step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scopes = Scopes(run.session, self._begin)
        self.kinds: dict[int, int] = {}
        self.made_in: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.steps: list[int] = []
        self.micro_batches: list[int] = []
        self.owner_of: dict[int, str] = {}
        for name, module in run.session.model.named_modules(remove_duplicate=False):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.owner_of.setdefault(id(tensor), name or MODEL)
                self._own(name or MODEL, [tensor])

    def _begin(self) -> _Began:
        tracker = self.run.tracker
        tracker.work = Work()
        return _Began(len(tracker.events), tracker.last_key, tracker.work)

    def _own(self, module: str, parts: Iterable[Any]) -> None:
        for key in self.run.tracker.keys_of(parts):
            self.owners.setdefault(key, module)

    def take_steps(self, batch_size: int, batch: Any, num_micro: int) -> None:
        run = self.run
        inputs = run.inputs(batch)
        batch_keys = run.tracker.keys_of(tensors(inputs))
        with self.scopes.followed():
            for step in range(NUM_STEPS):
                self.steps.append(len(run.tracker.events))
                num_left = num_micro if step else 1
                self.micro_batches = []
                while num_left:
                    num_left -= 1
                    self.micro_batches.append(len(self.scopes.stretches))
                    self._take(run.micro_step(batch_size, inputs, is_last=not num_left).purposes)
                    for parameter in run.session.model.parameters():
                        if parameter.grad is not None:
                            self._own(self.owner_of[id(parameter)], [parameter.grad])
                self.scopes.begin(STEP, UPDATE)
                update = run.update(batch_size) if step else run.first_update(batch_size)
                self._take(update.purposes)
                for parameter, state in getattr(run.session.optimizer, "state", {}).items():
                    if id(parameter) in self.owner_of:
                        kept = [part for part in state.values() if torch.is_tensor(part)]
                        self._own(self.owner_of[id(parameter)], kept)
                        self.kinds |= dict.fromkeys(run.tracker.keys_of(kept), int(Purpose.OPTIMIZER))
        run.tracker.work = None
        self.kinds |= dict.fromkeys(batch_keys, _BATCH_KIND)
        firsts = [stretch.note.last_key + 1 for stretch in self.scopes.stretches]
        for stretch, (first, end) in zip(
            self.scopes.stretches, pairwise([*firsts, run.tracker.last_key + 1]), strict=True
        ):
            self.made_in |= dict.fromkeys(range(first, end), stretch.module)

    def _take(self, purposes: Any) -> None:
        """Take over purposes. What a pass takes for a temporary may be known better from another pass."""
        for key, purpose in purposes.items():
            if purpose is not Purpose.TEMPORARIES or key not in self.kinds:
                self.kinds[key] = int(purpose)

    def anatomy(self, further_bytes: int) -> Anatomy:
        events = self.run.tracker.events
        totals = list(accumulate(event.change_bytes for event in events))
        start = self.steps[0]
        peak = max(range(start, len(events)), key=totals.__getitem__)
        held: dict[str, Counter[str]] = defaultdict(Counter)
        for key, size_bytes in _living(events[: peak + 1]).items():
            kind = self._kind(key)
            owner = "" if kind == _BATCH_KIND else self.owners.get(key, self.made_in.get(key, MODEL))
            held[owner][KINDS[kind]] += size_bytes
        held[BATCH] += held.pop("", Counter()) + Counter({KINDS[_BATCH_KIND]: further_bytes})
        flops, moved = self._work()
        modules = [
            ModuleMemory(
                name=name,
                held_bytes={kind: held[name][kind] for kind in KINDS if held[name][kind]},
                flops=dict(flops[name]),
                moved_bytes=dict(moved[name]),
            )
            for name in held.keys() | flops.keys() | moved.keys()
        ]
        at_peak = self._stretch_at(peak)
        peak_bytes = totals[peak] + further_bytes
        first = max(step for step in self.steps if step <= peak)
        last = min((step for step in self.steps if step > first), default=len(events))
        return Anatomy(
            peak_bytes=peak_bytes,
            reserved_bytes=peak_bytes,
            phase=at_peak.phase,
            module=at_peak.module,
            last_layer=self.scopes.last_layer,
            modules=tuple(sorted(modules, key=lambda module: (-module.total_bytes, module.name))),
            timeline=self._timeline(first, last, further_bytes),
        )

    def _kind(self, key: int) -> int:
        """Place in `KINDS`. What is made of a batch before the first layer belongs to the batch, as its copy on a GPU does."""
        kind = self.kinds.get(key, int(Purpose.TEMPORARIES))
        return _BATCH_KIND if kind >= Purpose.ACTIVATIONS and self.made_in.get(key) == BATCH else kind

    def _work(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """FLOPs and bytes moved, by module and phase, of the last micro batch and the update after it."""
        flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        moved: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for stretch in self.scopes.stretches[self.micro_batches[-1] :]:
            work = stretch.note.work
            if work.num_operators:
                flops[stretch.module][stretch.phase] += sum(work.flops.values())
                moved[stretch.module][stretch.phase] += work.moved_bytes
        return flops, moved

    def wire_bytes(self, accumulation_steps: int) -> dict[str, float]:
        """Bytes of each collective in an optimizer step."""
        first, last = self.micro_batches[0], self.micro_batches[-1]
        found: Counter[str] = Counter()
        for place, stretch in enumerate(self.scopes.stretches[first:], first):
            times = accumulation_steps - 1 if place < last else 1
            for name, size_bytes in stretch.note.work.wire_bytes.items():
                found[name] += times * int(size_bytes)
        return dict(found)

    def _timeline(self, first: int, last: int, further_bytes: int) -> tuple[Moment, ...]:
        """The largest moment of each of some equal parts of the events from `first` to `last`."""
        events = self.run.tracker.events
        changes = np.zeros((1 + last - first, len(KINDS)), dtype=int)
        changes[0, _BATCH_KIND] = further_bytes
        for key, size_bytes in _living(events[:first]).items():
            changes[0, self._kind(key)] += size_bytes
        for row, event in enumerate(events[first:last], start=1):
            changes[row, self._kind(event.key)] = event.change_bytes
        held = changes.cumsum(axis=0)[1:]
        edges = [len(held) * number // NUM_MOMENTS for number in range(NUM_MOMENTS + 1)]
        largest = [low + int(held[low:high].sum(axis=1).argmax()) for low, high in pairwise(edges) if low < high]
        return tuple(
            Moment(phase=self._stretch_at(first + place).phase, held_bytes=tuple(held[place].tolist()))
            for place in largest
        )

    def _stretch_at(self, position: int) -> Stretch:
        """The stretch in which an event falls."""
        later = bisect_right(self.scopes.stretches, position, key=lambda stretch: stretch.note.num_events)
        return self.scopes.stretches[max(0, later - 1)]


def _living(events: Iterable[Event]) -> dict[int, int]:
    """Key -> bytes of what was allocated and not freed."""
    living: dict[int, int] = {}
    for event in events:
        if event.allocates:
            living[event.key] = event.size_bytes
        else:
            living.pop(event.key, None)
    return living
