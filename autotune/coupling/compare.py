"""Compares the gradient of a batch with that of the same samples in micro batches: does the loss couple samples?

A mean loss gives both the same gradient but for rounding: each sample adds its own term, with its own noise. A contrastive
loss, a covariance, a hardest pair of the batch does not, nor does a sum, nor a mean over something other than what is counted.

Rounding is told from coupling by moving all parameters a little at random: a difference that rounding made is then another
one, while a difference that coupling made hardly changes.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from autotune.coupling.gradients import FIT_ERROR, LOSS_ERROR, Compared, Gradients, OutOfTimeError
from autotune.coupling.samples import Halves, Samples
from autotune.devices import Device
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import in_one_line
from autotune.randomness import keep_randomness
from autotune.records.check import Cause, Coupling, Verdict
from autotune.task import Task
from autotune.task.batches import CannotCutError, tensors
from autotune.units import plural

FIRST = 6  # samples in the first batch: its halves have an odd number of samples, and more than one
FEWEST = 2
GROWTH = 4
NOISELESS_ERROR = 1e-6  # relative, of a gradient: what is below is rounding
PERMUTED_ERROR = 1e-3  # the same where something is drawn among the samples, so that no two runs can be alike
DRIFT_ERROR = 1e-3  # the same for a state that each forward pass moves on a little, as spectral normalisation does
MOST_TIMES = 10  # times the seconds after which no larger batch is begun: what all comparing may take
NUM_MOVES = 2
DRAWS, MORE_DRAWS = 8, 2  # other random numbers that are tried with the first batch, and with each larger one


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

    It begins with few samples, and takes more while there is time and memory, since what couples them may show only in large
    batches: the hardest pair, two samples of one class. Dropout is the identity, and batch normalisation holds still.

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
    comparison = _Comparison(task, model, device, samples, seconds)
    separable: list[Coupling] = []
    unknown: list[Coupling] = []
    began_s = time.monotonic()
    sizes = _sizes(most, legal, FEWEST if 2 * FIRST * sample_s > seconds else FIRST)
    try:
        for size, following in zip(sizes, [*sizes[1:], math.inf], strict=True):
            found = comparison.of(size)
            if found.verdict is Verdict.COUPLED:
                return found
            (separable if found.may_be_cut else unknown).append(found)
            if separable and time.monotonic() - began_s + 2 * following * comparison.sample_s > seconds:
                break
    except CannotCutError as error:
        unknown = [Coupling.unknown(f"only the task itself can make smaller batches, since one holds {error}")]
    except OutOfTimeError as error:
        unknown = [Coupling.unknown(str(error))]
    except _OutOfMemoryError as error:
        unknown = [] if separable else [_of_the_fewest(comparison, str(error), tried=size)]
    return separable[-1] if separable else unknown[0]


def _sizes(most: int, legal: int, first: int) -> list[int]:
    sizes = {most, *([legal] if first <= legal <= most else ())}
    while first < most:
        sizes.add(first)
        first = GROWTH * first + 2  # twice an odd number again
    return sorted(sizes)


def _of_the_fewest(comparison: _Comparison, nothing: str, *, tried: int) -> Coupling:
    """What two samples show where more do not fit, and if not even they do, what their losses alone show."""
    looks = [comparison.of, comparison.of_losses] if tried > FEWEST else [comparison.of_losses]
    for look in looks:
        try:
            return look(FEWEST)
        except OutOfTimeError as error:
            return Coupling.unknown(str(error))
        except _OutOfMemoryError:
            continue
    return Coupling.unknown(nothing)


class _OutOfMemoryError(Exception):
    """Memory ran out in a comparison."""


class _Comparison:
    """Finds out, with one model, whether batches of a number of samples may be cut, and why not; `UNKNOWN` where it cannot.

    Args:
        seconds: after which nothing more is begun; everything together may take ten times as long.
    """

    def __init__(self, task: Task, model: torch.nn.Module, device: Device, samples: Samples, seconds: float) -> None:
        self._task, self._device, self._samples = task, device, samples
        self._gradients = Gradients(task, model, device, MOST_TIMES * seconds)
        self._soft_s = time.monotonic() + seconds
        self._num_draws = DRAWS

    @property
    def sample_s(self) -> float:
        """Seconds that each sample of the latest micro batches took."""
        return self._gradients.sample_s

    def of(self, num_samples: int) -> Coupling:
        """What a batch of so many samples shows.

        Raises:
            CannotCutError: the same samples cannot be had in parts.
            OutOfTimeError: the comparison takes too long.
            _OutOfMemoryError: the samples do not fit.
        """

        def by_gradients() -> Coupling:
            halves = self._samples.halves(num_samples)
            with self._gradients.equal_conditions(halves.whole):
                found = self._draw_again(self._judge(halves), halves)
                try:
                    found = self._of_other_padding(found, halves)
                    return self._of_unequal_samples(found, num_samples)
                except Exception:  # the verdict stands, whatever happens to the search for its cause
                    self._gradients.clear()
                    return found

        return self._guard(by_gradients, num_samples)

    def of_losses(self, num_samples: int) -> Coupling:
        """As `of`, by the losses alone, for which no activations are kept."""

        def by_losses() -> Coupling:
            halves = self._samples.halves(num_samples)
            with self._gradients.equal_conditions(halves.whole), torch.no_grad():
                found = self._gradients.compare(halves)
            loss = found.whole.loss
            error = abs(found.loss_difference) / max(abs(loss), sys.float_info.min)
            if not math.isfinite(error):
                return Coupling.unknown(f"the loss of {plural(num_samples, 'sample')} is {loss}")
            return _coupled(Cause.SAMPLES, num_samples, error) if error > LOSS_ERROR else _separable(num_samples, None)

        return self._guard(by_losses, num_samples)

    def _guard(self, look: Callable[[], Coupling], num_samples: int) -> Coupling:
        """What `look` finds; `UNKNOWN`, with the reason, where the user's code raises."""
        named = plural(num_samples, "sample")
        with keep_randomness(self._device.torch_device):
            try:
                return look()
            except (CannotCutError, OutOfTimeError):
                raise
            except Exception as error:
                is_short = self._device.is_out_of_memory(error)
                if is_short and self._device.is_crowded(attempted_bytes(error)):
                    raise
                why = f"comparing {named} with their halves raised {in_one_line(error)}"[:300]
                traceback.clear_frames(error.__traceback__)
        self._gradients.clear()
        if is_short:
            self._device.give_back()
            raise _OutOfMemoryError(f"{named} of plain training do not fit into memory")
        return Coupling.unknown(why)

    def _judge(self, halves: Halves) -> Coupling:
        found = self._gradients.compare(halves)
        named = plural(halves.num_samples, "sample")
        if not found.whole.is_finite:
            return Coupling.unknown(f"the loss of {named}, or its gradient, is not finite")
        if not all(part.is_finite for part in found.parts):
            if max(halves.parts.sizes) == 1:
                return Coupling.unknown(f"one sample alone has no finite loss, while {named} have")
            return _coupled(Cause.SAMPLES, halves.num_samples, math.inf)
        if found.scale == 0:
            return Coupling.unknown(f"the gradient of {named} is zero")
        if found.error > NOISELESS_ERROR and found.draws.several_rows:
            in_blocks = replace(halves, blocked=True)
            other = self._gradients.compare(in_blocks)
            if other.error < found.error:
                found, halves = other, in_blocks
        if self._is_rounding(found, halves):
            return _separable(halves.num_samples, found.error)
        return self._find_cause(found, halves)

    def _draw_again(self, first: Coupling, halves: Halves) -> Coupling:
        """What other random numbers show, where a step draws any: a term that only some steps have, partners hardly mixed."""
        if first.verdict is not Verdict.SEPARABLE or not self._gradients.random.has_moved():
            return first
        num_draws, self._num_draws = self._num_draws, MORE_DRAWS
        try:
            for number in range(num_draws):
                if time.monotonic() > self._soft_s:
                    break
                with self._gradients.other_draws(halves.num_samples * DRAWS + number):
                    again = self._judge(halves)
                if again.verdict is Verdict.COUPLED:
                    return again
        except OutOfTimeError:
            pass
        return first

    def _of_other_padding(self, found: Coupling, halves: Halves) -> Coupling:
        """The verdict found. Parts of a batch have its padding; those that a loader pads anew may show that padding reaches the loss."""
        # in the step, or where a batch is made: other numbers for other padding
        draws = self._gradients.random.has_moved
        if found.verdict is not Verdict.SEPARABLE or draws() or time.monotonic() > self._soft_s:
            return found
        anew = self._samples.collated_anew(halves)
        if anew is None or draws():
            return found
        if not all(map(torch.equal, tensors(halves.whole), tensors(anew.whole))):  # the data set draws by itself
            return found
        again = self._judge(anew)
        if again.verdict is not Verdict.COUPLED or again.gradient_error is None:
            return found
        return _coupled(Cause.PADDING, halves.num_samples, again.gradient_error)

    def _of_unequal_samples(self, found: Coupling, num_samples: int) -> Coupling:
        """The verdict found. Its cause is that samples are of unequal size, where as many of one size show no coupling."""
        if found.cause is not Cause.SAMPLES or found.gradient_error is None:
            return found
        alike = self._samples.of_one_shape(num_samples)
        if alike is None:
            is_padded = self._samples.halves(num_samples).are_padded_anew()
            reason = _OR_PADDING if is_padded else _REASONS[Cause.SAMPLES]
            return _coupled(Cause.SAMPLES, num_samples, found.gradient_error, reason)
        unequal = self._samples.halves(alike.num_samples)
        verdicts = self._judge(unequal).verdict, self._judge(alike).verdict
        if verdicts != (Verdict.COUPLED, Verdict.SEPARABLE):
            return found
        cause = Cause.PADDING if unequal.are_padded_anew() else Cause.TERMS
        return _coupled(cause, num_samples, found.gradient_error)

    def _is_rounding(self, found: Compared, halves: Halves) -> bool:
        """Whether the difference changes when parameters are moved a little, or with other random numbers."""
        if found.draws.among_samples:
            return found.error <= PERMUTED_ERROR
        if found.error <= NOISELESS_ERROR:
            return True
        if self._changes_with(self._gradients.other_parameters, found, halves):
            return True
        # a part drew numbers that are not those of the whole: torch's of another shape, or Python's and numpy's
        draws_unlike = found.draws.unlike or self._gradients.random.has_moved_beside_torch()
        return draws_unlike and self._changes_with(self._gradients.other_draws, found, halves)

    def _changes_with(
        self, other: Callable[[int], AbstractContextManager[None]], found: Compared, halves: Halves
    ) -> bool:
        others = []
        for seed in range(1, NUM_MOVES + 1):
            with other(seed):
                others.append(self._gradients.compare(halves))
        return not found.has_the_cause_of(others)

    def _find_cause(self, found: Compared, halves: Halves) -> Coupling:
        """Why the parts have another gradient."""
        num_samples, error = halves.num_samples, found.error
        if found.draws.among_samples:
            return _coupled(Cause.PARTNERS, num_samples, error)
        if state := self._gradients.changed():
            restored = replace(halves, restores_between=True)
            if self._is_rounding(self._gradients.compare(restored), restored):
                if error <= DRIFT_ERROR:
                    return _separable(num_samples, error)
                return _coupled(Cause.STATE, num_samples, error, state=state)
        weights = found.weights()
        with self._gradients.other_parameters(0):
            other = self._gradients.compare(halves).weights()
        # weights that are numbers of terms would not change
        if weights is None or other is None or math.dist(weights, other) > FIT_ERROR:
            return _coupled(Cause.SAMPLES, num_samples, error)
        if abs(sum(weights) - 1) > FIT_ERROR:
            return _coupled(Cause.SCALE, num_samples, error, times=f"{sum(weights):.3g}")
        listed, counted = (" and ".join(f"{value:.3f}" for value in values) for values in (weights, found.shares))
        counted += " without a loss_weight" if self._task.loss_weight is None else " by loss_weight"
        return _coupled(Cause.WEIGHTS, num_samples, error, listed=listed, counted=counted)


def _separable(num_samples: int, error: float | None) -> Coupling:
    return Coupling(verdict=Verdict.SEPARABLE, num_samples=num_samples, gradient_error=error)


_LEARN_THE_SAME = "micro batches learn the same; {include} allows them as they are"
_ONE_MEAN = "a loss that divides all its terms by what loss_weight counts, or by the number of samples"
_MASK = "a model that leaves padding out (a mask, pack_padded_sequence)"
_OTHERS = "{include} allows other micro batches, which learn something else"
_Reason = tuple[str, str]  # what was found, and what would allow micro batches, with the placeholder `{include}`
_REASONS: Mapping[Cause, _Reason] = {
    Cause.SAMPLES: ("the loss couples the samples of a batch ({seen}, with equal noise and without dropout)", _OTHERS),
    Cause.PARTNERS: ("the loss draws at random among the samples of a batch ({seen})", _OTHERS),
    Cause.PADDING: (
        "the loss of samples of unequal length depends on those beside them, by padding that reaches it or by means over "
        "unequal numbers of terms ({seen})",
        f"{_MASK}, and {_ONE_MEAN}, make {_LEARN_THE_SAME}",
    ),
    Cause.TERMS: (
        "the loss adds means over unequal numbers of terms: samples of unequal size (in boxes, tokens) change each "
        "other's share in it ({seen})",
        f"{_ONE_MEAN}, makes {_LEARN_THE_SAME}",
    ),
    Cause.STATE: (
        "each forward pass changes the model's {state}, on which the loss of the next one depends ({seen})",
        _OTHERS,
    ),
    Cause.WEIGHTS: (
        "the loss is a mean over something other than what is counted (the halves of {named} weigh {listed} in it, and "
        "{counted})",
        f"a loss_weight(batch) that returns the number of terms in the mean makes {_LEARN_THE_SAME}",
    ),
    Cause.SCALE: (
        "the loss is no mean over its samples (the gradient of {named} is {times} times the mean of those of its halves)",
        f"a training_step that returns the mean makes {_LEARN_THE_SAME}",
    ),
}
# where samples are padded to the longest of their batch, and too few have one length to compare without padding
_OR_PADDING: _Reason = (
    "the loss couples the samples of a batch, or padding reaches it ({seen}, with equal noise and without dropout)",
    f"{_MASK} shows which of the two it is; {_OTHERS}",
)


def _coupled(cause: Cause, num_samples: int, error: float, reason: _Reason | None = None, **details: str) -> Coupling:
    named, small = plural(num_samples, "sample"), plural(-(-num_samples // 2), "sample")
    percent = f"{100 * error:.2g}" if error < 0.99 else f"{100 * error:,.0f}"
    differs = f"differs by {percent} % from" if math.isfinite(error) else "is finite, unlike"
    seen = f"the gradient of {named} {differs} that of the same samples in micro batches of {small}"
    why, remedy = reason or _REASONS[cause]
    return Coupling(
        verdict=Verdict.COUPLED,
        cause=cause,
        num_samples=num_samples,
        gradient_error=error if math.isfinite(error) else None,
        reason=why.format(seen=seen, named=named, **details),
        remedy=remedy,
    )
