"""Whole training steps of a config run on fake tensors: what is allocated and freed, when, and what for.

The session is the one that a probe trains, `prepare(task, config)`. Nothing is computed and nothing large is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autotune.devices import capabilities_of
from autotune.devices.cpu import CpuDevice
from autotune.devices.targets import Target
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import first_line, in_one_line
from autotune.prediction.fakes import Fakes, what_reads_values, why_values_are_needed
from autotune.prediction.passes import MicroSteps, Pass, Updates, are_aligned
from autotune.prediction.storages import StorageTracker
from autotune.prediction.traces import Purpose
from autotune.prediction.worlds import Spreading
from autotune.records.config import ACCUMULATION, ALONE, BATCH_SIZE, Choice, Config, World
from autotune.records.device import Work
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import StepBatch, map_tensors, tensors
from autotune.task.usercode import is_allocation_failure
from autotune.techniques import Phase, Recomputation, Technique, Techniques, UnsupportedError
from autotune.techniques.build import FEW
from autotune.units import format_bytes, plural


class TraceError(Exception):
    """A config cannot be traced; the message says in one line why."""


class Tracer:
    """Traces configs of one task. What fake tensors have learned of operators is shared between them.

    The input batches are made by the task, as a probe makes them (the widest of a dataset), and their shapes are taken over. On a
    GPU their copy on the device counts and they themselves do not; on a CPU there is no copy, and they count.

    Args:
        task: the user's task; its dataset is made if it has one.
        target: the kind of device to predict.
        techniques: of the configs.
        host_bytes: what this process may take of the host's memory; None where nothing bounds it.
        world: the processes that train the model together, whose group this one has joined (`autotune.prediction.worlds`).

    Raises:
        TraceError: the model cannot be built, or the dataset cannot be made.
    """

    def __init__(
        self,
        task: Task,
        target: Target,
        techniques: Techniques,
        host_bytes: int | None = None,
        world: World = ALONE,
    ) -> None:
        self.techniques = techniques
        self._world = replace(world, data_parallel=1)  # no samples are read, and so none are shared out
        with _explained():
            self._fakes = Fakes(task, target, techniques, host_bytes)
            task = self._fakes.task
            task.model()  # which finds out whether it can be built without values
            dataset = task.dataset()
            widest = task.widest()
        self._task = task
        self._session_task = replace(task, global_batch=None)
        if dataset is not None:
            self._session_task = replace(self._session_task, train_dataset=lambda: dataset)
            self._session_task.use_widest(widest)
        self._target = target
        self._batches: dict[int, Any] = {}
        self._model: torch.nn.Module | None = None

    def micro_steps(self, config: Config, low: int, high: int, *, check: bool = False) -> MicroSteps:
        """Run micro batches of `config`, forward and backward.

        Args:
            config: its batch size, accumulation and options of the data loader do not matter.
            low: samples of the smallest micro batch; `high` of the largest.
            check: whether to run one between them, too. One is run in any case where the two differ in more than sizes.

        Raises:
            TraceError: the task's code needs the values of tensors, or raised something.
        """
        sizes = sorted({low, round(math.sqrt(low * high)), high} if check else {low, high})
        batches = {size: self.batch(size) for size in sizes}
        with self.run(config) as run:
            found = run.micro_steps(batches)
        if len(sizes) < 3 and not check and not are_aligned(found.alone[0], found.alone[-1]):
            return self.micro_steps(config, low, high, check=True)
        return found

    def updates(self, config: Config, batch_size: int) -> Updates:
        """Run a whole training step of `config` and another update. Otherwise as `micro_steps`."""
        batch = self.batch(batch_size)
        with self.run(config) as run:
            return run.updates(batch_size, batch)

    def recomputation(self, technique: Technique, choice: Choice) -> Recomputation | None:
        """What a choice recomputes of the model, if that is all that it does. Raises TraceError."""
        if self._model is None:
            with self.run(self.techniques.complete({})):
                pass
        assert self._model is not None
        with _explained():
            return technique.recomputation(self._task, self._model, choice)

    @contextmanager
    def run(self, config: Config) -> Iterator[Run]:
        """A session of `config` on fake tensors, to be run inside. Raises TraceError for whatever is raised inside."""
        with _explained(), self._fakes.run() as tracker, (spreading := Spreading(tracker, self._world)).followed():
            session = self._session(config)
            if session.task.takes_whole_steps:
                raise TraceError("the task's own step is one unit")
            on_gpu = capabilities_of(self._target).own_memory
            run = Run(session, tracker, self._fakes, self.techniques, spreading, self.batch, on_gpu=on_gpu)
            self._model = run.session.model
            with run.observed():
                yield run

    def input_bytes(self, batch_size: int) -> int:
        """Bytes of an input batch. Raises TraceError."""
        storages = (tensor.untyped_storage() for tensor in tensors(self.batch(batch_size)))
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def batch(self, batch_size: int) -> Any:
        """An input batch, as a probe makes it. Raises TraceError."""
        if batch_size not in self._batches:
            with _explained(f"a batch of {plural(batch_size, 'sample')} cannot be made:"):
                self._batches[batch_size] = self._task.batch(batch_size)
        return self._batches[batch_size]

    def _session(self, config: Config) -> Session:
        unseen = (Phase.LOADER, Phase.PROCESS)  # by what is allocated
        off = {t.name: t.off for t in self.techniques.values() if t.phase in unseen}
        config = config.replace(**off, **{BATCH_SIZE: FEW, ACCUMULATION: 1})
        return prepare(self._session_task, config, device=CpuDevice(), on_oom=RAISE, world=self._world)


class Run:
    """A session on fake tensors, and what is seen of it."""

    def __init__(
        self,
        session: Session,
        tracker: StorageTracker,
        fakes: Fakes,
        techniques: Techniques,
        spreading: Spreading,
        batch: Callable[[int], Any],
        *,
        on_gpu: bool,
    ) -> None:
        self.session = session
        self._batch = batch
        self.tracker = tracker
        self.spreading = spreading
        self.fakes = fakes
        self.on_gpu = on_gpu
        constants = (*session.model.parameters(), *session.model.buffers())
        for tensor in constants:
            tracker.see(tensor)
        self.known = dict.fromkeys(tracker.keys_of(constants), Purpose.PARAMETERS)
        self.kept: set[int] = set()  # storages that outlived the forward pass that allocated them
        self.forward_end = 0  # the last key of the latest forward pass
        self.blocks = {id(block): number for number, block in enumerate(_blocks(session, techniques))}
        self.marks: list[tuple[int, int]] = []  # as in `Pass`, from the first event of all on
        self._accumulated: set[int] = set()  # what a micro batch of a world left behind for the last one of its step

    def micro_steps(self, batches: Mapping[int, Any]) -> MicroSteps:
        """A micro batch of each size, and of the smallest and the largest another one beside the gradients of the first."""
        ends, in_world = (min(batches), max(batches)), self.session.world.size > 1
        begun = self._begun(batches[ends[0]])
        alone, first, beside = [], [], []
        for size, batch in batches.items():
            inputs = self.inputs(batch)
            with self._counted() as work:
                alone.append(replace(self.micro_step(size, inputs), work=work))
            if size in ends and in_world:
                self.session.optimizer.zero_grad(set_to_none=True)
                first.append(self.micro_step(size, inputs, is_last=False))
            if size in ends:
                beside.append(self.micro_step(size, inputs))
            self.session.optimizer.zero_grad(set_to_none=True)
            del inputs
        if not are_aligned(alone[0], alone[-1]):  # the very first pass also made what is made once: a scale, a mask
            again = self.micro_step(ends[0], self.inputs(batches[ends[0]]))
            alone[0] = replace(again, work=alone[0].work)
        return replace(
            begun,
            alone=tuple(alone),
            beside=tuple(beside),
            first=tuple(first) or None,
            regrouped=self.spreading.regrouped,
        )

    def _begun(self, batch: Any) -> MicroSteps:
        """What was allocated and freed so far. In a world also by a micro batch that does what is done once there."""
        events = self.tracker.events
        if self.session.world.size == 1:
            return MicroSteps(alone=(), beside=(), before=tuple(events))
        end = start = len(events)
        if self.spreading.copies is not None:
            end = self.spreading.num_events
        self.micro_step(FEW, self.inputs(batch))
        self.session.optimizer.zero_grad(set_to_none=True)
        kept = [event for event in events[start:] if event.allocates and event.key in self.tracker.living()]
        return MicroSteps(
            alone=(),
            beside=(),
            before=(*events[:end], *kept),
            spread=tuple(events[end:start]),
        )

    def updates(self, batch_size: int, batch: Any) -> Updates:
        """The updates of two training steps, with the same gradients."""
        self.micro_step(batch_size, self.inputs(batch))
        parameters = list(self.session.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        first = self.first_update(batch_size)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        del gradients
        with self._counted() as work:
            return Updates(first=first, second=replace(self.update(batch_size), work=work))

    def first_update(self, batch_size: int) -> Pass:
        """An update of the parameters that allocates the optimizer's state."""
        first = self.update(batch_size)
        made = {event.key for event in first.events if event.allocates} & self.tracker.living().keys()
        self.known |= dict.fromkeys(made, Purpose.OPTIMIZER)
        return replace(first, purposes={**first.purposes, **self.known})

    def update(self, batch_size: int) -> Pass:
        """An update of the parameters."""
        with self.tracker.elsewhere() if self.spreading.updates_on_host else nullcontext():
            return self._pass(batch_size, self.session.update)

    @contextmanager
    def _counted(self) -> Iterator[Work]:
        """The work of the operators that run inside."""
        self.tracker.work = work = Work()
        yield work
        self.tracker.work = None

    def inputs(self, batch: Any) -> Any:
        """Fake tensors of the batch's shapes. Those of a GPU's batch lie on the host and do not count."""
        fake = self.fakes.inputs(batch)
        for tensor in tensors(fake):
            (self.tracker.see_elsewhere if self.on_gpu else self.tracker.see)(tensor)
        return fake

    def micro_step(self, batch_size: int, inputs: Any, *, is_last: bool = True) -> Pass:
        """A micro batch, forward and backward, the last of its step or one before it.

        Raises:
            TraceError: it raises something, and a micro batch of few samples does not.
        """
        self.spreading.regroup()
        step, first_key = StepBatch([(inputs, batch_size)]), self.tracker.last_key + 1
        try:
            found = self._pass(batch_size, lambda: self.session.accumulate(step, is_last=is_last))
        except Exception as error:
            if batch_size <= FEW or _explains_itself(error) or not self._takes_few():
                raise
            with _explained(f"with {batch_size} samples at once, and not with {FEW}, it raises"):
                raise
        if is_last:
            return found
        left = {key for key in self.tracker.living() if key >= first_key and self.tracker.scopes[key] is None}
        left -= self.tracker.keys_of(filter(None, [self.session.own_loss]))
        self._accumulated |= left
        return replace(found, purposes={**found.purposes, **dict.fromkeys(left, Purpose.GRADIENTS)})

    def _takes_few(self) -> bool:
        """Whether a micro batch of few samples runs."""
        try:
            step = StepBatch([(self.inputs(self._batch(FEW)), FEW)])
            self._pass(FEW, lambda: self.session.accumulate(step, is_last=True))
        except Exception:
            return False
        return True

    def _pass(self, batch_size: int, work: Callable[[], Any]) -> Pass:
        gradients = self._gradients()
        held = self.tracker.living()
        start, first_key = len(self.tracker.events), self.tracker.last_key + 1
        self.marks.clear()
        self.forward_end = first_key - 1
        work()
        self.tracker.in_backward = False
        events = tuple(self.tracker.events[start:])
        gradients |= self._gradients()
        scopes = self.tracker.scopes
        purposes = dict.fromkeys(held, Purpose.TEMPORARIES) | {
            key: Purpose.ACTIVATIONS
            for key in range(first_key, self.tracker.last_key + 1)
            if scopes[key] is not None and (key in self.kept or key > self.forward_end)
        }
        purposes |= dict.fromkeys(gradients, Purpose.GRADIENTS) | self.known
        for event in events:
            purposes.setdefault(event.key, Purpose.TEMPORARIES)
        return Pass(
            batch_size=batch_size,
            held=held,
            events=events,
            purposes=purposes,
            modules={key: scopes[key] or "" for key, purpose in purposes.items() if purpose is Purpose.ACTIVATIONS},
            marks=tuple((position - start, block) for position, block in self.marks),
        )

    def _gradients(self) -> set[int]:
        gradients = (p.grad for p in self.session.model.parameters() if p.grad is not None)
        accumulated = self._accumulated & self.tracker.living().keys()
        return accumulated | self.tracker.keys_of((*gradients, *self.spreading.buckets))

    def _mark(self, block: int) -> None:
        self.marks.append((len(self.tracker.events), block))

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Tell the tracker where forward passes begin and end, and which module's runs, also where the backward pass runs it
        again. On a GPU, copy the inputs and take the optimizer's default there.
        """
        session, loss = self.session, self.session.loss

        def copy_in(micro_batch: Any) -> Any:
            inputs = map_tensors(torch.clone, micro_batch) if self.on_gpu else micro_batch
            self.tracker.scope, self.tracker.in_backward = "", False
            return inputs

        def marked(micro_batch: Any) -> torch.Tensor:
            result = loss(micro_batch)
            self.tracker.scope, self.tracker.in_backward = None, True
            self.forward_end = self.tracker.last_key
            self.kept.update(self.tracker.living())
            return result

        if self.on_gpu:
            for group in session.optimizer.param_groups:
                if group.get("foreach", False) is None and group.get("fused") is None:
                    group["foreach"] = True
        names = {id(module): name for name, module in session.model.named_modules()}
        outer: list[str | None] = []

        def enter(module: torch.nn.Module, inputs: Any) -> None:
            outer.append(self.tracker.scope)
            if name := names.get(id(module)):
                self.tracker.scope = name
            if id(module) in self.blocks and not self.tracker.in_backward:
                self._mark(self.blocks[id(module)])

        def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self.tracker.scope = outer.pop()
            if id(module) in self.blocks and not self.tracker.in_backward:
                block = self.blocks[id(module)]
                if block == len(self.blocks) - 1:
                    self._mark(len(self.blocks))
                for tensor in [tensor for tensor in tensors(output) if tensor.requires_grad][:1]:
                    tensor.register_hook(lambda gradient: self._mark(block))

        with (
            mock.patch.object(session, "loss", marked),
            # where a session copies a batch to its device, so that nothing but what is made of it holds the copy
            mock.patch.object(session.ready, "transforms", (copy_in, *session.ready.transforms)),
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ):
            yield


def _blocks(session: Session, techniques: Techniques) -> tuple[torch.nn.Module, ...]:
    """The blocks that a technique may recompute."""
    found = (t.recomputation(session.task, session.model, t.off) for t in techniques.values())
    return next((recomputation.blocks for recomputation in found if recomputation is not None), ())


def _explains_itself(error: Exception) -> bool:
    """Whether an exception says why it was raised: a technique cannot be had, memory ran out, or values are needed."""
    is_ours = isinstance(error, UnsupportedError | TraceError)
    return is_ours or is_allocation_failure(error) or bool(what_reads_values(error))


@contextmanager
def _explained(otherwise: str = "") -> Iterator[None]:
    """Whatever happens is a `TraceError`, which says it in one line.

    Args:
        otherwise: stands before an exception that does not explain itself, in place of that values are lacking.
    """
    try:
        yield
    except Exception as error:
        if is_allocation_failure(error):
            asked = attempted_bytes(error)
            what = f": an allocation of {format_bytes(asked)} failed" if asked else ""
            raise TraceError(f"the host's memory ran out{what}") from error
        if otherwise and not _explains_itself(error):
            raise TraceError(f"{otherwise} {in_one_line(error)}"[:300].removesuffix(".")) from error
        is_ours = isinstance(error, UnsupportedError | TraceError)
        raise TraceError(first_line(error).removesuffix(".") if is_ours else why_values_are_needed(error)) from error
