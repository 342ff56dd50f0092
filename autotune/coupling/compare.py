"""Compares the gradient of a batch with that of the same samples in micro batches: does the loss couple samples?

A mean loss gives both the same gradient but for rounding: each sample adds its own term, with its own noise. A contrastive
loss, a covariance, a hardest pair of the batch does not, nor does a sum, nor a mean over other terms than are counted.

Rounding is told from coupling by moving all parameters a little at random: where rounding made the difference it is
another one then, while the difference that coupling makes hardly changes.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from autotune.coupling.batch_statistics import hold_still
from autotune.coupling.buffers import Buffers
from autotune.coupling.dropout_off import dropout_off
from autotune.coupling.same_draws import SameDraws
from autotune.devices import Device
from autotune.devices.oom import attempted_bytes
from autotune.errors import in_one_line
from autotune.randomness import RandomState, keep_randomness
from autotune.records.coupling import Cause, Coupling, Verdict
from autotune.task import Task
from autotune.task.adapters import uncounted
from autotune.task.batches import CannotCutError, StepBatch, fresh_copy, split, to_device
from autotune.task.losses import shares_of
from autotune.units import format_seconds, plural

FIRST = 6  # samples: its halves are of an odd number, and of more than one
FEWEST = 2
GROWTH = 4
MOST_SHAPES, FEWEST_ALIKE = 128, 4  # samples that are looked at for some of one shape, and how many are needed
NOISELESS_ERROR = 1e-6  # relative, of a gradient: what is below is rounding
PERMUTED_ERROR = 1e-3  # where something is drawn among the samples, so that no two runs can be alike
LOSS_ERROR = 1e-4  # relative, where there is memory for the loss alone
MOVED = 2.0**-8  # relative: as far as the shortest type rounds
MOST_TIMES = 10  # the time after which no larger batch is begun: what all of it may take
NUM_MOVES = 2
DRAWS, MORE_DRAWS = 8, 2  # other random numbers that are tried with the first batch, and with each larger one
ALIKE = 0.5  # cosine between the differences of two runs, from which they have one cause
FIT_ERROR = 1e-5  # relative, of the gradient put together from its parts with other weights
DRIFT_ERROR = 1e-3  # by a state that each forward pass moves on a little, as spectral normalisation does
NUM_ELEMENTS = 2**14  # of each parameter's gradient, of which larger ones are sampled


class Samples(Protocol):
    """Gives the same samples as one batch and as its micro batches."""

    def halves(self, num_samples: int) -> tuple[Any, StepBatch]:
        """A batch of so many samples, and the same in two micro batches. Raises CannotCutError."""

    def of_one_shape(self, num_samples: int) -> tuple[Any, StepBatch] | None:
        """As `halves`, with at most so many samples, each of which alone has the same shapes; None where none are known."""


class SamplesOf:
    """The first samples of a batch."""

    def __init__(self, task: Task, batch: Any) -> None:
        self._task, self._batch = task, batch

    def halves(self, num_samples: int) -> tuple[Any, StepBatch]:
        """As `Samples.halves`."""
        cuts = self._task.cuts()
        whole = split(self._batch, cuts, num_samples)[0]
        return whole, split(whole, cuts, -(-num_samples // 2))

    def of_one_shape(self, num_samples: int) -> tuple[Any, StepBatch] | None:
        """As `Samples.of_one_shape`: how long samples are is not known once they are a batch."""
        return None


class TypicalSamples:
    """Samples of a task's training set drawn at random, or what its `make_batch` makes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        size = task.dataset_size()
        is_stream = isinstance(task.dataset(), torch.utils.data.IterableDataset)
        drawn = size is not None and not is_stream
        self._positions = random.Random(0).sample(range(size), size) if drawn and size is not None else None

    def halves(self, num_samples: int) -> tuple[Any, StepBatch]:
        """As `Samples.halves`. What cannot be cut is collated anew, as `Session.loader` does."""
        task = self._task
        if task.dataset() is None:
            return SamplesOf(task, task.batch(num_samples)).halves(num_samples)
        positions: Sequence[int] = (self._positions or range(num_samples))[:num_samples]
        whole = task.batch_of(positions)
        with contextlib.suppress(CannotCutError):
            return SamplesOf(task, whole).halves(num_samples)
        return whole, self._collated(positions)

    def of_one_shape(self, num_samples: int) -> tuple[Any, StepBatch] | None:
        """As `Samples.of_one_shape`."""
        task = self._task
        if task.dataset() is None or self._positions is None:
            return None
        of_shape: dict[Any, list[int]] = {}
        for position in self._positions[:MOST_SHAPES]:
            alike = of_shape.setdefault(_shapes(task.batch_of((position,))), [])
            alike.append(position)
            if len(alike) == num_samples:
                break
        most = max(of_shape.values(), key=len)
        return (task.batch_of(most), self._collated(most)) if len(most) >= FEWEST_ALIKE else None

    def _collated(self, positions: Sequence[int]) -> StepBatch:
        size = -(-len(positions) // 2)
        parts = (positions[:size], positions[size:])
        return StepBatch((self._task.batch_of(part), len(part)) for part in parts)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _are_padded_anew(whole: Any, parts: StepBatch, num_samples: int) -> bool:
    """Whether some rows of samples are longer in the batch than in one of its parts."""
    for part, size in zip(parts, parts.sizes, strict=True):
        pairs = zip(_shapes(whole), _shapes(part), strict=False)
        changes = [[lengths for lengths in zip(*pair, strict=False) if len(set(lengths)) > 1] for pair in pairs]
        if any((num_samples, size) in changed and len(changed) > 1 for changed in changes):
            return True
    return False


def find_coupling(
    task: Task,
    model: torch.nn.Module,
    device: Device,
    samples: Samples,
    *,
    most: int,
    seconds: float,
    legal: int = FEWEST,
    sample_s: float = 0.0,
) -> Coupling:
    """Whether micro batches of up to `most` samples give the gradient of the whole batch. Model and random states stay as they are.

    It begins with few samples, and takes more while there is time and memory, since what couples them may show in large
    batches alone: the hardest pair, two samples of one class. Dropout is the identity, and batch normalisation holds still.

    Args:
        model: on the device, in training mode, without gradients.
        most: samples of the largest batch to compare.
        seconds: after which no larger batch is begun. The first one may take ten times as long.
        legal: samples of a batch that is known to be legal.
        sample_s: seconds that one sample is known to take; 0 where that is not known.

    Raises:
        Exception: out of memory because others hold it.
    """
    if most < FEWEST:
        return Coupling(verdict=Verdict.SEPARABLE)
    comparison = _Comparison(task, model, device, MOST_TIMES * seconds)
    largest: Coupling | None = None
    nothing, is_short = "", False
    began_s = time.monotonic()
    sizes = _sizes(most, legal, FEWEST if 2 * FIRST * sample_s > seconds else FIRST)
    try:
        for size, following in zip(sizes, [*sizes[1:], math.inf], strict=True):
            found = comparison.of(samples, size)
            if isinstance(found, str):
                nothing = nothing or found
            elif found.verdict is Verdict.COUPLED:
                return found
            else:
                largest = found
            if largest and time.monotonic() - began_s + 2 * following * comparison.sample_s > seconds:
                break
    except CannotCutError as error:
        nothing = f"only the task itself can make smaller batches, since one holds {error}"
    except _OutOfTimeError as error:
        nothing = str(error)
    except _OutOfMemoryError as error:
        nothing, is_short = str(error), True
    if largest is None and is_short and size > FEWEST:
        is_short = False
        try:
            found = comparison.of(samples, FEWEST)
            largest, nothing = (None, found) if isinstance(found, str) else (found, nothing)
        except _OutOfTimeError as error:
            nothing = str(error)
        except _OutOfMemoryError:
            is_short = True
    if largest is None and is_short:
        with contextlib.suppress(_OutOfMemoryError, _OutOfTimeError):
            found = comparison.of_losses(samples, FEWEST)
            largest, nothing = (None, found) if isinstance(found, str) else (found, nothing)
    if largest is not None:
        return largest
    return Coupling.unknown(nothing)


def _sizes(most: int, legal: int, first: int) -> list[int]:
    sizes = {most, *([legal] if first <= legal <= most else ())}
    while first < most:
        sizes.add(first)
        first = GROWTH * first + 2  # twice an odd number again
    return sorted(sizes)


class _OutOfMemoryError(Exception):
    """Memory ran out in a comparison."""


class _OutOfTimeError(Exception):
    """A comparison has taken too long."""


@dataclass(frozen=True)
class _Gradient:
    loss: float
    values: torch.Tensor  # a sample of them, in double precision on the host

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and bool(self.values.isfinite().all())


@dataclass(frozen=True)
class _Compared:
    """A batch and its parts, each with its share in the mean."""

    whole: _Gradient
    parts: tuple[_Gradient, ...]
    shares: tuple[float, ...]
    draws: SameDraws

    @property
    def difference(self) -> torch.Tensor:
        parts = (share * part.values for share, part in zip(self.shares, self.parts, strict=True))
        return self.whole.values - sum(parts, torch.zeros_like(self.whole.values))

    @property
    def loss_difference(self) -> float:
        """Of the loss, as far as that is known more exactly than rounding of it."""
        losses = [share * part.loss for share, part in zip(self.shares, self.parts, strict=True)]
        found = self.whole.loss - sum(losses)
        return found if abs(found) > LOSS_ERROR * max(abs(self.whole.loss), sum(map(abs, losses))) else 0.0

    @property
    def scale(self) -> float:
        """The size of the gradients, also where those of the parts cancel each other."""
        parts = sum(float(share * part.values.norm()) for share, part in zip(self.shares, self.parts, strict=True))
        return max(float(self.whole.values.norm()), parts)

    @property
    def error(self) -> float:
        return float(self.difference.norm()) / self.scale

    def weights(self) -> tuple[float, ...] | None:
        """The weights with which the parts' gradients make up that of the whole, where some do."""
        parts = torch.stack([part.values for part in self.parts], dim=1)
        found = torch.linalg.lstsq(parts, self.whole.values[:, None]).solution
        misses = float((parts @ found - self.whole.values[:, None]).norm())
        weights = tuple(found.flatten().tolist())
        return weights if misses <= FIT_ERROR * self.scale and min(weights) >= 0 else None


class _Comparison:
    """Takes the gradients of batches and of their parts, with one model.

    Attributes:
        sample_s: seconds that each sample of the latest micro batches took.
    """

    def __init__(self, task: Task, model: torch.nn.Module, device: Device, longest_s: float) -> None:
        self._task, self._model, self._device = task, model, device
        self._longest_s, self._latest_s = longest_s, time.monotonic() + longest_s
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._random = RandomState(device.torch_device)
        self._num_draws = DRAWS
        self._soft_s = time.monotonic() + longest_s / MOST_TIMES
        self._buffers = Buffers(model)
        self._restores_between = False  # the parts, and not only before the first
        self.sample_s = 0.0

    def of(self, samples: Samples, num_samples: int) -> Coupling | str:
        """What a batch of so many samples shows, or why it shows nothing.

        Raises:
            CannotCutError: the same samples cannot be had in parts.
            _OutOfMemoryError: they do not fit.
        """
        with self._guarded(num_samples) as why:
            whole, parts = samples.halves(num_samples)
            with self._alike(whole):
                found = self._judged(whole, parts, num_samples)
                found = self._drawn_again(found, whole, parts, num_samples)
                try:
                    return self._of_unequal_samples(found, samples, num_samples)
                except Exception:  # the verdict stands, whatever happens to the search for its cause
                    self._clear()
                    return found
        return why[0]

    def of_losses(self, samples: Samples, num_samples: int) -> Coupling | str:
        """As `of`, by the losses alone, for which no activations are kept."""
        with self._guarded(num_samples) as why:
            whole, parts = samples.halves(num_samples)
            with self._alike(whole), torch.no_grad():
                found = self._compare(whole, parts, num_samples)
                losses = (share * part.loss for share, part in zip(found.shares, found.parts, strict=True))
                error = abs(found.whole.loss - sum(losses)) / max(abs(found.whole.loss), sys.float_info.min)
                if not math.isfinite(error):
                    return f"the loss of {plural(num_samples, 'sample')} is {found.whole.loss}"
                if error > LOSS_ERROR:
                    return self._coupled(Cause.SAMPLES, num_samples, error)
                return Coupling(verdict=Verdict.SEPARABLE, num_samples=num_samples, gradient_error=None)
        return why[0]

    @contextlib.contextmanager
    def _guarded(self, num_samples: int) -> Iterator[list[str]]:
        """Around a comparison: what the user's code raises is why it shows nothing."""
        why: list[str] = []
        is_short = False
        with keep_randomness(self._device.torch_device):
            try:
                yield why
            except (CannotCutError, _OutOfTimeError):
                raise
            except Exception as error:
                if self._device.is_out_of_memory(error):
                    if self._device.is_crowded(attempted_bytes(error)):
                        raise
                    is_short = True
                why.append(
                    f"comparing {plural(num_samples, 'sample')} with their halves raised {in_one_line(error)}"[:300]
                )
                traceback.clear_frames(error.__traceback__)
        self._clear()
        if is_short:
            self._device.give_back()
            raise _OutOfMemoryError(f"{plural(num_samples, 'sample')} of plain training do not fit into memory")

    @contextlib.contextmanager
    def _alike(self, whole: Any) -> Iterator[None]:
        """Around the passes that are compared: nothing is random, or depends on how many samples are normalised together."""
        outside = Buffers(self._model)
        outside.note()
        try:
            with contextlib.ExitStack() as stack:
                if "torch._dynamo" in sys.modules:  # what is compiled is compiled again for each size
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(dropout_off(self._model))
                stack.enter_context(hold_still(self._model, lambda: self._loss(whole)))
                self._buffers = Buffers(self._model)
                self._buffers.note()
                yield
        finally:
            outside.restore()

    def _judged(self, batch: Any, parts: StepBatch, num_samples: int) -> Coupling | str:
        found = self._compare(batch, parts, num_samples)
        named = plural(num_samples, "sample")
        if not found.whole.is_finite:
            return f"the loss of {named}, or its gradient, is not finite"
        if not all(part.is_finite for part in found.parts):
            if max(parts.sizes) == 1:
                return f"one sample alone has no finite loss, while {named} have"
            return self._coupled(Cause.SAMPLES, num_samples, math.inf)
        if found.scale == 0:
            return f"the gradient of {named} is zero"
        blocked = False
        if found.error > NOISELESS_ERROR and found.draws.several_rows:
            other = self._compare(batch, parts, num_samples, blocked=True)
            if blocked := other.error < found.error:
                found = other
        if self._is_rounding(found, batch, parts, num_samples, blocked=blocked):
            return Coupling(verdict=Verdict.SEPARABLE, num_samples=num_samples, gradient_error=found.error)
        return self._caused(found, batch, parts, num_samples, blocked=blocked)

    def _of_unequal_samples(self, found: Coupling | str, samples: Samples, num_samples: int) -> Coupling | str:
        """The same verdict, with their unequal sizes as its cause where as many samples of one size do not show it."""
        if isinstance(found, str) or found.cause is not Cause.SAMPLES or found.gradient_error is None:
            return found
        alike = samples.of_one_shape(num_samples)
        if alike is None:
            may_be_padding = _are_padded_anew(*samples.halves(num_samples), num_samples)
            return self._coupled(found.cause, num_samples, found.gradient_error, may_be_padding=may_be_padding)
        num_alike = sum(alike[1].sizes)
        whole, parts = samples.halves(num_alike)
        unequal = self._judged(whole, parts, num_alike)
        again = self._judged(*alike, num_alike)
        if isinstance(unequal, str) or isinstance(again, str):
            return found
        if unequal.verdict is not Verdict.COUPLED or again.verdict is Verdict.COUPLED:
            return found
        cause = Cause.PADDING if _are_padded_anew(whole, parts, num_alike) else Cause.TERMS
        return self._coupled(cause, num_samples, found.gradient_error)

    def _drawn_again(self, first: Coupling | str, batch: Any, parts: StepBatch, num_samples: int) -> Coupling | str:
        """What other random numbers show, where a step draws any: a term of some steps alone, partners that were hardly mixed."""
        if isinstance(first, str) or first.verdict is Verdict.COUPLED or not self._random.has_moved():
            return first
        before, num_draws, self._num_draws = self._random, self._num_draws, MORE_DRAWS
        try:
            for number in range(num_draws):
                if time.monotonic() > self._soft_s:
                    break
                _seed(num_samples * DRAWS + number)
                self._random = RandomState(self._device.torch_device)
                again = self._judged(batch, parts, num_samples)
                if isinstance(again, Coupling) and again.verdict is Verdict.COUPLED:
                    return again
        except _OutOfTimeError:
            return first
        finally:
            self._random = before
        return first

    def _is_rounding(self, found: _Compared, batch: Any, parts: StepBatch, num_samples: int, *, blocked: bool) -> bool:
        """Whether the difference is another one with parameters that are moved a little, or with other random numbers."""
        if found.draws.among_samples:
            return found.error <= PERMUTED_ERROR
        if found.error <= NOISELESS_ERROR:
            return True
        others = []
        for seed in range(1, NUM_MOVES + 1):
            with self._moved(seed):
                others.append(self._compare(batch, parts, num_samples, blocked=blocked))
        if not _are_alike(found, others):
            return True
        if not self._draws_unlike(found):
            return False
        before = self._random
        others.clear()
        try:
            for seed in range(1, NUM_MOVES + 1):
                _seed(seed)
                self._random = RandomState(self._device.torch_device)
                others.append(self._compare(batch, parts, num_samples, blocked=blocked))
        finally:
            self._random = before
        return not _are_alike(found, others)

    def _draws_unlike(self, found: _Compared) -> bool:
        """Whether a part drew numbers that are not those of the whole: torch's of another shape, or Python's and numpy's."""
        return found.draws.unlike or self._random.has_moved_beside_torch()

    def _caused(self, found: _Compared, batch: Any, parts: StepBatch, num_samples: int, *, blocked: bool) -> Coupling:
        """Why the parts have another gradient."""
        if found.draws.among_samples:
            return self._coupled(Cause.PARTNERS, num_samples, found.error)
        if buffer := self._buffers.changed():
            self._restores_between = True
            restored = self._compare(batch, parts, num_samples, blocked=blocked)
            is_state = self._is_rounding(restored, batch, parts, num_samples, blocked=blocked)
            self._restores_between = False
            if is_state:
                if found.error <= DRIFT_ERROR:
                    return Coupling(verdict=Verdict.SEPARABLE, num_samples=num_samples, gradient_error=found.error)
                return self._coupled(Cause.STATE, num_samples, found.error, buffer=buffer)
        with self._moved(0):
            other = self._compare(batch, parts, num_samples, blocked=blocked).weights()
        weights = found.weights()
        if weights is None or other is None or math.dist(weights, other) > FIT_ERROR:  # numbers of terms do not change
            return self._coupled(Cause.SAMPLES, num_samples, found.error)
        if abs(sum(weights) - 1) <= FIT_ERROR:
            has_loss_weight = self._task.loss_weight is not None
            return self._coupled(
                Cause.WEIGHTS,
                num_samples,
                found.error,
                weights=weights,
                shares=found.shares,
                has_loss_weight=has_loss_weight,
            )
        return self._coupled(Cause.SCALE, num_samples, found.error, weights=weights)

    def _coupled(self, cause: Cause, num_samples: int, error: float, **details: Any) -> Coupling:
        reason, remedy = words(cause, num_samples, error, **details)
        return Coupling(
            verdict=Verdict.COUPLED,
            cause=cause,
            num_samples=num_samples,
            gradient_error=error if math.isfinite(error) else None,
            reason=reason,
            remedy=remedy,
        )

    def _compare(self, batch: Any, parts: StepBatch, num_samples: int, *, blocked: bool = False) -> _Compared:
        """The gradients of a batch and, from the same state on, of its parts, as `Session.accumulate` takes and weights them."""
        draws = SameDraws(blocked=blocked)
        self._buffers.restore()
        with draws.whole():
            whole = self._gradient(batch)
        self._buffers.restore()
        began_s = time.perf_counter()
        found, start = [], 0
        shares = shares_of(list(map(self._task.weight, parts, parts.sizes)))
        for part, size, share in zip(parts, parts.sizes, shares, strict=True):
            if self._restores_between:
                self._buffers.restore()
            if share:
                with draws.part(start, start + size, num_samples):
                    found.append(self._gradient(part))
            start += size
        self.sample_s = (time.perf_counter() - began_s) / num_samples
        return _Compared(whole, tuple(found), tuple(share for share in shares if share), draws)

    def _loss(self, batch: Any) -> torch.Tensor:
        self._random.restore()
        with uncounted(self._model):
            return self._task.loss(self._model, to_device(fresh_copy(batch), self._device.torch_device))

    def _gradient(self, batch: Any) -> _Gradient:
        if time.monotonic() > self._latest_s:
            raise _OutOfTimeError(
                f"comparing a batch with its halves took more than {format_seconds(self._longest_s)}; a larger --budget "
                "gives it more"
            )
        loss = self._loss(batch)
        if not torch.is_grad_enabled():
            return _Gradient(loss.item(), torch.zeros(0, dtype=torch.float64))
        loss.backward()
        values = [_sampled(parameter, number) for number, parameter in enumerate(self._parameters)]
        self._clear()
        return _Gradient(loss.detach().item(), torch.cat(values))

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def _moved(self, seed: int) -> Iterator[None]:
        """All parameters moved at random, and put back at the end."""
        generator = torch.Generator().manual_seed(seed)
        floating = [p for p in self._model.parameters() if p.is_floating_point()]
        before = [parameter.detach().to("cpu", copy=True) for parameter in floating]
        try:
            with torch.no_grad():
                for parameter in floating:
                    signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                    parameter.mul_(1 + signs * MOVED)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(floating, before, strict=True):
                    parameter.copy_(value)


def words(
    cause: Cause,
    num_samples: int,
    error: float,
    *,
    buffer: str = "",
    weights: Sequence[float] = (),
    shares: Sequence[float] = (),
    may_be_padding: bool = False,
    has_loss_weight: bool = False,
) -> tuple[str, str]:
    """What was found, and what would allow micro batches, in which `{include}` stands for the option.

    Args:
        may_be_padding: samples are padded to the longest of their batch, and too few are of one length to leave that out.
    """
    named, small = plural(num_samples, "sample"), plural(-(-num_samples // 2), "sample")
    differs = f"differs by {100 * error:.2g} % from" if math.isfinite(error) else "is finite, and not"
    seen = f"the gradient of {named} {differs} that of the same samples in micro batches of {small}"
    asked = "{include} allows other micro batches, which learn something else"
    if cause is Cause.PARTNERS:
        return f"the loss draws at random among the samples of a batch ({seen})", asked
    if cause is Cause.PADDING:
        return (
            f"the loss of samples of unequal length depends on those beside them, by padding that reaches it or by means over "
            f"unequal numbers of terms ({seen})",
            "a model that leaves padding out (a mask, pack_padded_sequence), and a loss that divides all its terms by what "
            "loss_weight counts, or by the number of samples, make micro batches learn the same; {include} allows them as they "
            "are",
        )
    if cause is Cause.TERMS:
        return (
            f"the loss adds means over unequal numbers of terms: samples of unequal size (in boxes, tokens) change each "
            f"other's share in it ({seen})",
            "a loss that divides all its terms by what loss_weight counts, or by the number of samples, makes micro batches "
            "learn the same; {include} allows them as they are",
        )
    if cause is Cause.STATE:
        return (
            f"each forward pass changes the model's {buffer}, on which the loss of the next one depends ({seen})",
            asked,
        )
    if cause is Cause.WEIGHTS:
        listed, counted = (" and ".join(f"{value:.3f}" for value in values) for values in (weights, shares))
        return (
            f"the loss is a mean over other terms than are counted (the halves of {named} weigh {listed} in it, and {counted} "
            f"{'by loss_weight' if has_loss_weight else 'without a loss_weight'})",
            "a loss_weight(batch) that returns the number of terms in the mean makes micro batches learn the same; "
            "{include} allows them as they are",
        )
    if cause is Cause.SCALE:
        return (
            f"the loss is no mean over its samples (the gradient of {named} is {sum(weights):.3g} times the mean of those of "
            "its halves)",
            "a training_step that returns the mean makes micro batches learn the same; {include} allows them as they are",
        )
    also = ", or padding reaches it" if may_be_padding else ""
    shows = "a model that leaves padding out (a mask, pack_padded_sequence) shows which of both it is; " if also else ""
    return (
        f"the loss couples the samples of a batch{also} ({seen}, with equal noise and without dropout)",
        shows + asked,
    )


def _sampled(parameter: torch.nn.Parameter, number: int) -> torch.Tensor:
    """Elements of a parameter's gradient, always the same ones, in double precision on the host."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(min(parameter.numel(), NUM_ELEMENTS), dtype=torch.float64)
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    if gradient.numel() > NUM_ELEMENTS:
        generator = torch.Generator().manual_seed(number)
        gradient = gradient[torch.randint(gradient.numel(), (NUM_ELEMENTS,), generator=generator).to(gradient.device)]
    return gradient.to("cpu", torch.float64)


def _are_alike(found: _Compared, others: Sequence[_Compared]) -> bool:
    """Whether the differences of some runs have one cause: the gradients', or the losses' where those are all but rounding."""
    if sum(_cosine(found, other) for other in others) / len(others) >= ALIKE:
        return True
    losses = [compared.loss_difference for compared in (found, *others)]
    least, most = min(map(abs, losses)), max(map(abs, losses))
    return len({math.copysign(1.0, loss) for loss in losses}) == 1 and 0 < ALIKE * most <= least


def _cosine(one: _Compared, other: _Compared) -> float:
    a, b = one.difference, other.difference
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 and math.isfinite(norms) else 0.0


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
