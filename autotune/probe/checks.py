"""Is a config still the user's training? Its loss, gradients, buffers and names against plain fp32's."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from autotune import techniques
from autotune.devices import Device, open_device
from autotune.probe.differences import Difference, Run, difference, worst
from autotune.probe.dropout_off import dropout_off
from autotune.records.config import Choice, Config
from autotune.records.result import Check
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import map_tensors
from autotune.techniques.accumulation import uses_batch_statistics
from autotune.techniques.matmul_precision import kept_matmul_precision

EXACT_ERROR = 1e-5  # relative: what reordering sums in fp32 amounts to
NOISE_FACTOR = 10.0  # an exact technique may differ by so many times the model's own noise
REDUCED_COSINE = 0.999
REDUCED_GRADIENT_ERROR = 0.1  # the cosine does not see a wrong scale; at equal norms 0.999 is an error of 0.045
REDUCED_LOSS_ERROR = 0.05
REDUCED_BUFFER_ERROR = 0.05
# Parameters after three steps, relative to how far they moved. Adam divides a gradient by its own size, so where it is
# nearly zero its rounding decides the whole step.
THREE_STEPS_ERROR = 1e-3
DOUBLE_ERROR = 1e-9  # where fp32 disagrees: the same bound, as far above the rounding of double precision

_SEED = 0
_MOST_SCALE_REDUCTIONS = 24  # GradScaler's 65536 halved to below 1e-2
# With these the forward pass draws the same random numbers as plain training. Another dtype, another memory layout and
# micro batches draw other masks by nature, which says nothing about their gradients.
_KEEP_MASKS = {
    "optimizer_impl",
    "checkpoint_segments",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
}


def run_checks(task: Task, config: Config | Mapping[str, Choice], device: str | Device, *, batch_size: int) -> Check:
    """Compare a config with plain fp32 on one batch: the same weights, the same samples, the same seed.

    Check G compares the loss and all gradients, B the buffers after one optimizer step, N the names of parameters and
    of the state dict. When all that the config changes is exact, and `optimizer_impl` is among it, the parameters are
    compared after three steps as well (P3; the figure is in `reason`).

    Exact techniques are held to a relative error of 1e-5, or ten times the model's own noise: the larger difference
    that repeating the plain run makes, and moving its parameters by one unit in the last place. A config with a
    technique of reduced precision is held to a gradient cosine of 0.999. Checkpointing, optimizer and loader are
    compared with dropout live, since keeping its random state is part of being right; in a config that also changes
    dtype, layout or micro batch dropout is the identity on both sides (`check_choice` on each technique tells more).

    Args:
        task: the user's task.
        config: complete or partial. Its batch size does not count; one that accumulates has the samples cut in two
            micro batches, against all of them at once. With batch normalisation that fails, as it should, and `reason`
            says so.
        device: where to compare; process-wide settings and random states are put back.
        batch_size: samples to compare on. On the device the runs follow one another, so memory is that of one session.

    Raises:
        UnsupportedError: the config cannot be applied to the model on the device.
        TaskError: the task is not valid.
        ConfigError: the config is not valid.
    """
    config = techniques.complete(config.as_dict() if isinstance(config, Config) else config)
    changes = _changes(config)
    text = ", ".join(f"{name}={choice}" for name, choice in changes.items()) or "nothing switched on"
    return _Comparison(task, config, device, batch_size).check("config", text)


def check_choice(task: Task, name: str, choice: Choice, device: str | Device, batch_size: int) -> Check:
    """`run_checks` for one technique alone.

    Raises:
        ConfigError: there is no such technique, or no such choice of it; otherwise as `run_checks`.
    """
    return _Comparison(task, techniques.complete({name: choice}), device, batch_size).check(name, choice)


class _Comparison:
    """A config and plain training, run one after the other from the same weights on the same batch."""

    def __init__(self, task: Task, config: Config, device: str | Device, batch_size: int) -> None:
        self.task = dataclasses.replace(task, global_batch=None)  # one small batch is compared, not the global one
        self.device = open_device(device) if isinstance(device, str) else device
        self.batch_size = batch_size
        changes = _changes(config)
        self.micro_steps = 2 if config.accumulation_steps > 1 and batch_size > 1 else 1
        self.config = config.replace(batch_size=-(-batch_size // self.micro_steps), accumulation_steps=self.micro_steps)
        self.exact = all(techniques.REGISTRY[name].exact for name in changes)
        self.same_masks = changes.keys() <= _KEEP_MASKS
        self.num_steps = 3 if self.exact and "optimizer_impl" in changes else 1
        self.plain = techniques.complete({"batch_size": batch_size})
        self.batch_statistics = False
        self.initial: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # parameters and buffers, on the host

    def check(self, technique: str, choice: Choice) -> Check:
        """Run everything and judge."""
        with _restored(self.device):
            _seed(_SEED)
            self.batch = self.task.batch(self.batch_size)
            plain = self.run(self.plain)
            # Where masks cannot be the same, randomness that `dropout_off` does not reach is the model's own noise.
            noise = worst(
                difference(plain, self.run(self.plain, seed=_SEED if self.same_masks else _SEED + 1)),
                difference(plain, self.run(self.plain, prepare_model=_move_by_one_ulp)),
            )
            candidate = self.run(self.config)
            found = difference(plain, candidate)
            names_equal = plain.names == candidate.names
            complaints = self.complaints(found, noise)
            notes = []
            if complaints and self.micro_steps > 1 and self.batch_statistics:
                notes.append(
                    "expected: batch normalisation sees one micro batch at a time, so accumulation learns otherwise"
                )
            elif complaints and self.exact and (error := self.error_in_double()) <= DOUBLE_ERROR:
                complaints = []
                notes.append(
                    f"the gradient differs by {found.gradient:.1e}, because single roundings decide in this model; "
                    f"in double precision it differs by {error:.1e}"
                )
            elif complaints and not self.exact:
                rounded = difference(plain, self.run(self.plain, prepare_model=self.round_parameters))
                notes.append(f"plain fp32 with parameters rounded as far has a gradient cosine of {rounded.cosine:.5f}")
        if not names_equal:
            complaints.append("the names of parameters or the keys of the state dict changed")
        if self.num_steps > 1:
            notes.append(
                f"parameters after {self.num_steps} steps differ by {found.movement:.1e} of how far they moved"
            )
        if noise.gradient > REDUCED_GRADIENT_ERROR:
            notes.append("two plain runs differ as much, so this comparison says little about the technique")
        return Check(
            technique=technique,
            choice=choice,
            exact=self.exact,
            loss_error=found.loss,
            gradient_error=found.gradient,
            gradient_cosine=found.cosine,
            buffer_error=found.buffers,
            names_equal=names_equal,
            noise=noise.gradient,
            passed=not complaints,
            reason="; ".join([*complaints, *notes]),
        )

    def error_in_double(self) -> float:
        """The largest error when model and data are double precision; infinite where the model does not run in it.

        A rounding that flips one ReLU or one maximum moves the gradient of a convolutional network by a percent, in
        some runs and not in others, so that the noise of two runs may miss it. In double precision that does not
        happen, while a technique that is wrong stays wrong.
        """

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        build_model, batch, initial = self.task.build_model, self.batch, self.initial
        self.task = dataclasses.replace(self.task, build_model=lambda: build_model().double())
        self.batch = map_tensors(double, batch)
        try:
            found = difference(self.run(self.plain), self.run(self.config))
        except RuntimeError:  # code that makes fp32 tensors of its own, an operator without a double kernel, no memory
            return math.inf
        finally:
            self.task, self.batch, self.initial = (
                dataclasses.replace(self.task, build_model=build_model),
                batch,
                initial,
            )
        errors = (found.loss, found.gradient, found.buffers, found.movement)
        return math.inf if any(math.isnan(error) for error in errors) else max(errors)

    def round_parameters(self, model: torch.nn.Module) -> None:
        """Keep as many bits of every parameter as the config's arithmetic has: 8 for bf16, 11 for fp16 and TF32."""
        dtype = torch.bfloat16 if self.config["amp"] == "bf16" else torch.float16
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))

    def complaints(self, found: Difference, noise: Difference) -> list[str]:
        """What is out of bounds, in words. Comparisons are written so that NaN is out of bounds."""
        reduced = (REDUCED_LOSS_ERROR, REDUCED_GRADIENT_ERROR, REDUCED_BUFFER_ERROR)
        least_loss, least_gradient, least_buffers = (EXACT_ERROR,) * 3 if self.exact else reduced
        bounds = (
            ("the loss differs", found.loss, least_loss, noise.loss),
            ("the gradient differs", found.gradient, least_gradient, noise.gradient),
            ("buffers differ", found.buffers, least_buffers, noise.buffers),
            ("the parameters' movement differs", found.movement, THREE_STEPS_ERROR, noise.movement),
        )
        out = []
        for what, error, least, floor in bounds:
            bound = max(least, NOISE_FACTOR * floor)
            if not error <= bound:
                out.append(f"{what} by {error:.1e} from plain fp32 (bound {bound:.1e})")
        lowest = min(REDUCED_COSINE, 1 - NOISE_FACTOR * (1 - noise.cosine))
        if not self.exact and not found.cosine >= lowest:
            out.append(f"the gradient's cosine with plain fp32 is {found.cosine:.5f} (bound {lowest:.3f})")
        return out

    def run(
        self, config: Config, *, seed: int = _SEED, prepare_model: Callable[[torch.nn.Module], None] | None = None
    ) -> Run:
        """Accumulate and step once, and go on to `num_steps`; nothing is left on the device afterwards."""
        try:
            with kept_matmul_precision():
                return self._run(config, seed, prepare_model)
        finally:
            gc.collect()
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()

    def _run(self, config: Config, seed: int, prepare_model: Callable[[torch.nn.Module], None] | None) -> Run:
        _seed(_SEED)
        session = prepare(self.task, config, device=self.device)
        model = session.model
        self.batch_statistics = uses_batch_statistics(model)
        if self.initial is None:
            self.initial = [_host(p) for p in model.parameters()], [_host(b) for b in model.buffers()]
        with nullcontext() if self.same_masks else dropout_off(model):
            for _ in range(_MOST_SCALE_REDUCTIONS):
                self._reset(model)
                if prepare_model is not None:
                    prepare_model(model)
                start = [_host(p) for p in model.parameters()] if self.num_steps > 1 else []
                _seed(seed)
                loss = float(session.accumulate(self._fresh_batch()))
                gradients = _gradients(session)
                session.update()
                # GradScaler starts too high on purpose and skips steps, halving its scale, until nothing overflows.
                if session.scaler is None or all(bool(g.isfinite().all()) for g in gradients):
                    break
            buffers = [[_host(b) for b in module.buffers(recurse=False)] for module in model.modules()]
            for _ in range(self.num_steps - 1):
                session.step(self._fresh_batch())
        movement = [_host(p).sub_(before) for p, before in zip(model.parameters(), start, strict=False)]
        return Run(loss=loss, gradients=gradients, buffers=buffers, movement=movement, names=_names(model))

    def _fresh_batch(self) -> Any:
        """A copy, for models that change their input in place."""
        return map_tensors(torch.clone, self.batch)

    def _reset(self, model: torch.nn.Module) -> None:
        assert self.initial is not None
        with torch.no_grad():
            for tensors, initial in zip((model.parameters(), model.buffers()), self.initial, strict=True):
                for tensor, value in zip(tensors, initial, strict=False):  # other numbers of them are found by check N
                    if tensor.shape == value.shape:
                        tensor.copy_(value)


def _changes(config: Config) -> dict[str, Choice]:
    """What a config switches on, the batch size aside: both sides are compared on the same batch."""
    return {
        name: config[name] for name in config if name != "batch_size" and config[name] != techniques.REGISTRY[name].off
    }


def _gradients(session: Session) -> list[torch.Tensor]:
    """Unscaled gradients of all parameters on the host, zero where there is none."""
    scale = 1.0 if session.scaler is None else session.scaler.get_scale()
    return [
        _host(torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad).div_(scale)
        for p in session.model.parameters()
        if p.requires_grad
    ]


def _names(model: torch.nn.Module) -> list[Any]:
    return [[(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()], list(model.state_dict())]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in the default memory layout; of at least fp32 when it is floating."""
    tensor = tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _move_by_one_ulp(model: torch.nn.Module) -> None:
    """Every parameter up or down by about one unit in its last place: what a well-conditioned model does not notice."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def _restored(device: Device) -> Iterator[None]:
    """Put the random states of torch, Python and numpy back."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    on_gpu = [device.torch_device] if device.kind == "cuda" else []
    try:
        with torch.random.fork_rng(devices=on_gpu):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
