"""Runs a few optimizer steps with each of several configs, from the same weights on the same samples.

Of the processes of a world the first alone runs plainly, and holds whole copies. The others wait for what it asks them to take part in
(`Runs.take_part`), and send it what they hold, one tensor after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.coupling.draws import RandomDraws, dropout_off
from autotune.devices import Device
from autotune.devices.torch_errors import attempted_bytes
from autotune.group import deal, shard_types, take_from_first
from autotune.probe.differences import Tensors, Values
from autotune.randomness import seed_everything
from autotune.records.config import ALONE, Config, World
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import fresh_copy, map_tensors, own_elements, split, strided_parts, to_device
from autotune.task.facts import uses_batch_statistics
from autotune.techniques import Techniques
from autotune.techniques.tensors.spread import take_values_of_first

SEED = 0
FEWEST_SAMPLES = 4  # of a comparison where the model normalises over samples
NUM_VALUES = 64  # behind each batch statistic; a statistic of fewer values makes any rounding look large
_SHARDS = shard_types()
_MOST_SCALE_REDUCTIONS = 24  # GradScaler's 65536 halved to below 1e-2


@dataclasses.dataclass(frozen=True)
class Order:
    """What the first process of a world asks the others to run with it.

    Attributes:
        initial: parameters and buffers as `meta` tensors, which tell their shapes alone.
    """

    config: Config
    num_steps: int
    in_double: bool
    initial: tuple[Tensors, Tensors]


@dataclasses.dataclass
class Runs:
    """Runs one session after another, so that the device holds one at a time.

    Attributes:
        batch: the samples, of which a process of a world that is not the first has none.
        part: of them, what this process trains on where the world trains together.
        techniques: the techniques whose settings are restored after each run.
        num_steps: optimizer steps per run.
        same_masks: whether dropout is on, with the same masks; otherwise it is the identity.
        world: the processes that may run a config together.
        batch_statistics: whether the latest run's model normalises over the samples of a micro batch.
    """

    task: Task
    device: Device
    batch: Any
    part: Any
    techniques: Techniques
    num_steps: int
    same_masks: bool
    world: World = ALONE
    batch_statistics: bool = False
    is_double: bool = False
    _initial: tuple[Tensors, Tensors] | None = None  # parameters and buffers, on the host

    def in_double(self) -> Runs:
        """The same runs from the same weights, with model and data in double precision, also where a technique draws a batch."""

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        def doubled(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda asked: map_tensors(double, make(asked))

        build_model, make_batch = self.task.build_model, self.task.make_batch
        task = dataclasses.replace(
            self.task,
            build_model=lambda *variant: build_model(*variant).double(),
            make_batch=None if make_batch is None else doubled(make_batch),
            collate_fn=doubled(self.task.collate_fn or torch.utils.data.default_collate),
        )
        batch, part = (map_tensors(double, samples) for samples in (self.batch, self.part))
        return dataclasses.replace(self, task=task, batch=batch, part=part, is_double=True)

    def runs_not(self, error: RuntimeError) -> bool:
        """Whether a failure says that the model does not run in double precision.

        User code makes fp32 tensors, an operator has no double kernel, or memory ran out that others do not hold.
        """
        ran_out = self.device.is_out_of_memory(error) and self.device.is_crowded(attempted_bytes(error))
        return self.is_double and not ran_out

    def take_part(self) -> Any:
        """Run what the first process asks for, in any other, until it tells its result, which is returned.

        It may take long between two runs, in which it runs plainly: the group has to wait as long as the whole comparison may take.
        """
        while isinstance(order := take_from_first(), Order):
            runs = self.in_double() if order.in_double else self
            runs = dataclasses.replace(runs, num_steps=order.num_steps, _initial=order.initial)
            try:
                runs.run(order.config, together=True)
            except RuntimeError as error:  # in the first one, too
                if not runs.runs_not(error):
                    raise
        return order

    def run(
        self,
        config: Config,
        *,
        seed: int = SEED,
        prepare_model: Callable[[torch.nn.Module], None] | None = None,
        draws: RandomDraws | None = None,
        together: bool = False,
    ) -> Values:
        """Take `num_steps` optimizer steps, watched by `draws`, and return the results on the host. Nothing stays on the device.

        Args:
            together: whether the processes of the world train together; else this one trains alone. The others have no results.
        """
        world = self.world if together else ALONE
        if world.size > 1 and world.rank == 0:
            assert self._initial is not None
            parameters, buffers = ([tensor.to("meta") for tensor in tensors] for tensors in self._initial)
            take_from_first(Order(config, self.num_steps, self.is_double, (parameters, buffers)))
        try:
            with self.techniques.keep_settings(), exact_convolutions():
                return self._run(config, seed, prepare_model, draws or contextlib.nullcontext(), world)
        finally:
            self.device.give_back()

    def _run(
        self,
        config: Config,
        seed: int,
        prepare_model: Callable[[torch.nn.Module], None] | None,
        watching: contextlib.AbstractContextManager[Any],
        world: World,
    ) -> Values:
        seed_everything(SEED)
        batch = self.batch if world.size == 1 else self.part
        session = prepare(self.task, config, device=self.device, on_oom=RAISE, world=world)
        model = session.model
        self.batch_statistics = uses_batch_statistics(model)
        if self._initial is None:
            self._initial = _copies(model.parameters(), world), _copies(model.buffers(), world)
        with contextlib.nullcontext() if self.same_masks else dropout_off(model), watching:
            for _ in range(_MOST_SCALE_REDUCTIONS):
                self._reset(model, world)
                if prepare_model is not None:
                    prepare_model(model)
                start = _copies(model.parameters(), world) if self.num_steps > 1 else []
                seed_everything(seed)
                with _gradients(session, world) as gradients:
                    loss = float(session.accumulate(fresh_copy(batch)))
                session.update()
                # GradScaler starts too high on purpose and skips steps, halving its scale, until nothing overflows.
                if session.scaler is None or _are_finite(gradients, world):
                    break
            buffers = [_copies(module.buffers(recurse=False), world) for module in model.modules()]
            for _ in range(self.num_steps - 1):
                session.step(fresh_copy(batch))  # models change their input in place
        names = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
        moved = model.parameters() if self.num_steps > 1 else ()
        return Values(
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            movement=[now.sub_(before) for now, before in zip(_copies(moved, world), start, strict=True)],
            names=[names, list(model.state_dict())],
        )

    def _reset(self, model: torch.nn.Module, world: World) -> None:
        assert self._initial is not None
        with torch.no_grad():
            for tensors, initial in zip((model.parameters(), model.buffers()), self._initial, strict=True):
                parts = (part for tensor in tensors for part in _parts(tensor))
                for tensor, value in zip(parts, initial, strict=False):  # check N finds it if their number differs
                    if tensor.shape != value.shape:
                        continue
                    own = own_elements(tensor)
                    if isinstance(tensor, _SHARDS):
                        tensor.copy_(_spread_as(tensor, value))
                    elif world.rank == 0:
                        tensor[own].copy_(value[own])
                    if world.size > 1 and not isinstance(tensor, _SHARDS):
                        take_values_of_first(tensor)


@contextlib.contextmanager
def _gradients(session: Session, world: World) -> Iterator[Tensors]:
    """A context that yields unscaled gradients of all parameters on the host, zero where there is none. They are complete at its end.

    A single process collects them during the backward pass, because a technique may use them up there. In a world they are read
    after it, when the processes have put them together.
    """
    scale = 1.0 if session.scaler is None else session.scaler.get_scale()
    parameters = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
    gradients: Tensors = []
    if world.size > 1:
        yield gradients
        found = (torch.zeros_like(p) if p.grad is None else _dense(p.grad) for p in parameters)
        gradients += [gradient.div_(scale) for gradient in _copies(found, world)]
        return
    gradients += [_host(torch.zeros_like(parameter)) for parameter in parameters]

    def add(number: int, found: torch.Tensor) -> None:
        gradients[number] += _host(_dense(found)).div_(scale)

    with contextlib.ExitStack() as stack:
        for number, parameter in enumerate(parameters):
            stack.callback(parameter.register_hook(partial(add, number)).remove)
        yield gradients


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _are_finite(gradients: Tensors, world: World) -> bool:
    """Whether all gradients are finite, as the first process of the world sees it, which has them."""
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return finite if world.size == 1 else bool(take_from_first(finite))


def _copies(tensors: Iterable[torch.Tensor], world: World) -> Tensors:
    """Copies of whole tensors on the host, in the first process of the world; none in the others. Of a sparse one its parts are copied.

    Shards are put together one tensor after the other, so that no more than one is on its way: training itself gathers a whole
    block at a time.
    """
    copies: Tensors = []
    for tensor in tensors:
        if world.rank == 0:
            copies += map(_host, _parts(_whole(tensor)))
        else:
            _whole(tensor)  # of a shard, all have to take part in that
    return copies


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or the strided parts of a sparse or jagged one, which need not fit into memory as a dense one."""
    return [tensor] if tensor.layout is torch.strided else strided_parts(tensor)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host in the default memory layout; floating tensors become at least fp32."""
    tensor = _whole(tensor)
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def deal_parts(task: Task, batch: Any, num_samples: int, world: World) -> Any:
    """The first process's part of a batch, which it has; each of the others takes its own by `deal()`.

    Args:
        num_samples: in the batch; a multiple of the number of processes.

    Raises:
        CannotCutError: there are others, and the batch cannot be cut.
    """
    if world.size == 1:
        return batch
    return deal([fresh_copy(part) for part in split(batch, task.cuts(), num_samples // world.size)])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, put together where each process holds a shard of it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, _SHARDS) else tensor


def _spread_as(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    """The first process's value, sharded as the tensor is. The others know its shape alone, from a `meta` tensor."""
    from torch.distributed.tensor import distribute_tensor

    if value.is_meta:
        value = torch.empty_like(value, device=tensor.device)
    return distribute_tensor(value.to(tensor.device, tensor.dtype), tensor.device_mesh, tensor.placements)


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """A context in which TF32 is off in cuDNN.

    cuDNN rounds the inputs of fp32 convolutions to TF32 by default, in the user's training and in every probe. In a comparison,
    an exact technique that makes cuDNN choose another algorithm would then differ by the rounding of TF32, through no fault of
    its own.
    """
    cudnn: Any = torch.backends.cudnn
    try:
        before = [(cudnn, "allow_tf32", cudnn.allow_tf32)]
    except RuntimeError:  # the model file has set one kind of operator's `fp32_precision` (torch 2.9)
        before = [(operator, "fp32_precision", operator.fp32_precision) for operator in (cudnn.conv, cudnn.rnn)]
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        for settings, name, value in before:
            setattr(settings, name, value)


def enough_samples(task: Task, device: Device, most: int) -> int:
    """The fewest samples that give each batch statistic enough values: an image has many values for each channel, a vector one.

    Args:
        most: the most samples, and the answer where nothing is normalised over samples or a few samples are an error.
    """
    if most <= FEWEST_SAMPLES:
        return most
    seen: list[int] = []

    def see(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].numel() // inputs[0].shape[1])

    model = task.model().to(device.torch_device)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.register_forward_pre_hook(see)
    with contextlib.suppress(Exception), torch.no_grad():
        task.loss(model, to_device(task.batch(FEWEST_SAMPLES), device.torch_device))
        return min(most, FEWEST_SAMPLES * math.ceil(NUM_VALUES / min(seen))) if seen else most
    return most
