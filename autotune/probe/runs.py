"""Runs a few optimizer steps with each of several configs, from the same weights on the same samples, and tells how they differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.coupling.draws import RandomDraws, dropout_off
from autotune.devices import Device
from autotune.group import shard_types
from autotune.randomness import seed_everything
from autotune.records.config import ALONE, Config, World
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import fresh_copy, map_tensors, split, to_device
from autotune.task.facts import uses_batch_statistics
from autotune.techniques import Techniques

SEED = 0
FEWEST_SAMPLES = 4  # of a comparison where the model normalises over samples
NUM_VALUES = 64  # behind each batch statistic; a statistic of fewer values makes any rounding look large
_SHARDS = shard_types()
_MOST_SCALE_REDUCTIONS = 24  # GradScaler's 65536 halved to below 1e-2

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Values:
    """What one session computed, on the host."""

    loss: float
    gradients: Tensors
    buffers: list[Tensors]  # per module
    movement: Tensors  # how the parameters moved in all steps; empty when only one was taken
    names: list[Any]


@dataclasses.dataclass
class Runs:
    """Runs one session after another, so that the device holds one at a time.

    Attributes:
        techniques: the techniques whose settings are restored after each run.
        num_steps: optimizer steps per run.
        same_masks: whether dropout is on, with the same masks; otherwise it is the identity.
        world: the processes that may run a config together, each on its part of the batch; the same code runs in all of them.
        batch_statistics: whether the latest run's model normalises over the samples of a micro batch.
    """

    task: Task
    device: Device
    batch: Any
    num_samples: int
    techniques: Techniques
    num_steps: int
    same_masks: bool
    world: World = ALONE
    batch_statistics: bool = False
    _initial: tuple[Tensors, Tensors] | None = None  # parameters and buffers, on the host

    def in_double(self) -> Runs:
        """The same runs from the same weights, with model and data in double precision."""

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        build_model = self.task.build_model
        task = dataclasses.replace(self.task, build_model=lambda *variant: build_model(*variant).double())
        return dataclasses.replace(self, task=task, batch=map_tensors(double, self.batch))

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
            together: whether the processes of the world train together; else each trains alone.
        """
        try:
            with self.techniques.keep_settings(), exact_convolutions():
                world = self.world if together else ALONE
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
        batch = _part(self.task, self.batch, self.num_samples, world)
        session = prepare(self.task, config, device=self.device, on_oom=RAISE, world=world)
        model = session.model
        self.batch_statistics = uses_batch_statistics(model)
        if self._initial is None:
            self._initial = [_host(p) for p in model.parameters()], [_host(b) for b in model.buffers()]
        with contextlib.nullcontext() if self.same_masks else dropout_off(model), watching:
            for _ in range(_MOST_SCALE_REDUCTIONS):
                self._reset(model, world)
                if prepare_model is not None:
                    prepare_model(model)
                start = [_host(p) for p in model.parameters()] if self.num_steps > 1 else []
                seed_everything(seed)
                with _gradients(session, world) as gradients:
                    loss = float(session.accumulate(fresh_copy(batch)))
                session.update()
                # GradScaler starts too high on purpose and skips steps, halving its scale, until nothing overflows.
                if session.scaler is None or all(bool(g.isfinite().all()) for g in gradients):
                    break
            buffers = [[_host(b) for b in module.buffers(recurse=False)] for module in model.modules()]
            for _ in range(self.num_steps - 1):
                session.step(fresh_copy(batch))  # models change their input in place
        names = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
        return Values(
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            movement=[_host(p).sub_(before) for p, before in zip(model.parameters(), start, strict=False)],
            names=[names, list(model.state_dict())],
        )

    def _reset(self, model: torch.nn.Module, world: World) -> None:
        assert self._initial is not None
        with torch.no_grad():
            for tensors, initial in zip((model.parameters(), model.buffers()), self._initial, strict=True):
                for tensor, value in zip(tensors, initial, strict=False):  # check N finds it if their number differs
                    if tensor.shape == value.shape:
                        tensor.copy_(_spread_as(tensor, value))
                        if world.size > 1 and not isinstance(tensor, _SHARDS):
                            distributed.broadcast(tensor, 0)


@contextlib.contextmanager
def _gradients(session: Session, world: World) -> Iterator[Tensors]:
    """A context that yields unscaled gradients of all parameters on the host, zero where there is none. They are complete at its end.

    A single process collects them during the backward pass, because a technique may use them up there. In a world they are read
    after it, when the processes have put them together.
    """
    scale = 1.0 if session.scaler is None else session.scaler.get_scale()
    parameters = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
    gradients = [_host(torch.zeros_like(parameter)) for parameter in parameters]

    def add(number: int, found: torch.Tensor) -> None:
        gradients[number] += _host(found.to_dense() if found.is_sparse else found).div_(scale)

    with contextlib.ExitStack() as stack:
        for number, parameter in enumerate(parameters):
            if world.size == 1:
                stack.callback(parameter.register_hook(partial(add, number)).remove)
        yield gradients
    if world.size > 1:
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                add(number, parameter.grad)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host in the default memory layout; floating tensors become at least fp32."""
    tensor = tensor.detach()
    if isinstance(tensor, _SHARDS):
        tensor = tensor.full_tensor()
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _spread_as(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value, sharded as the tensor is; unchanged where the tensor is not sharded."""
    if not isinstance(tensor, _SHARDS):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(tensor.device, tensor.dtype), tensor.device_mesh, tensor.placements)


def _part(task: Task, batch: Any, num_samples: int, world: World) -> Any:
    """This process's part of a batch. Raises CannotCutError."""
    if world.size == 1:
        return batch
    return split(batch, task.cuts(), num_samples // world.size)[world.rank]


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


@dataclasses.dataclass(frozen=True)
class Difference:
    """Relative differences between two runs."""

    loss: float
    gradient: float
    cosine: float
    size: float  # of the gradient's norm
    buffers: float
    movement: float


def difference(plain: Values, other: Values) -> Difference:
    """`other` relative to `plain`. Values that are not finite give NaN or infinity."""
    gradient, cosine, size = _relative(plain.gradients, other.gradients)
    return Difference(
        loss=abs(other.loss - plain.loss) / max(abs(plain.loss), sys.float_info.min),
        gradient=gradient,
        cosine=cosine,
        size=size,
        buffers=_buffer_error(plain.buffers, other.buffers),
        movement=_relative(plain.movement, other.movement)[0],
    )


def worst(*differences: Difference) -> Difference:
    """The largest error of each kind, and the smallest cosine. Noise that is not finite is ignored."""

    def largest(name: str) -> float:
        return max(filter(math.isfinite, (getattr(one, name) for one in differences)), default=0.0)

    names = [field.name for field in dataclasses.fields(Difference) if field.name != "cosine"]
    return Difference(cosine=min(one.cosine for one in differences), **{name: largest(name) for name in names})


def _buffer_error(plain: list[Tensors], other: list[Tensors]) -> float:
    """The largest relative error of any module: its floating buffers taken together, and its counters and indices."""
    if len(plain) != len(other):
        return math.inf
    errors = [0.0]
    for ours, theirs in zip(plain, other, strict=True):
        for floating in (True, False):
            kind = [[b.double() for b in side if b.is_floating_point() is floating] for side in (ours, theirs)]
            errors.append(_relative(*kind)[0])
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _relative(plain: Tensors, other: Tensors) -> tuple[float, float, float]:
    """|other - plain| / |plain| over all tensors, the cosine between them, and ||other| - |plain|| / |plain|.

    Summed in double precision.
    """
    if [p.shape for p in plain] != [o.shape for o in other]:
        return math.inf, 0.0, math.inf
    pairs = list(zip(plain, other, strict=True))
    distance = math.sqrt(sum(_dot(o - p, o - p) for p, o in pairs))
    norm = math.sqrt(sum(_dot(p, p) for p in plain))
    other_norm = math.sqrt(sum(_dot(o, o) for o in other))
    if norm == 0 or other_norm == 0:
        return (0.0, 1.0, 0.0) if distance == 0 else (math.inf, 0.0, math.inf)
    cosine = sum(_dot(p, o) for p, o in pairs) / (norm * other_norm)
    return distance / norm, cosine, abs(other_norm - norm) / norm


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.dot(a.double().flatten(), b.double().flatten()))
