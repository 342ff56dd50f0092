"""Evaluates a session's model: forward passes without gradients, in the config's precision, and the means of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autotune.errors import TaskError
from autotune.group import Together, gather
from autotune.randomness import keep_randomness
from autotune.recovery import Halving
from autotune.task.adapters import uncounted
from autotune.task.batches import CannotCutError, StepBatch, split
from autotune.techniques.build import Build

_NONE = object()  # stands for "no batch left"
_UNCUT = 2**62  # more samples than any batch has


class Evaluator:
    """Evaluates the model of one session.

    Args:
        ready: moves a micro batch to the device, and opens the techniques' contexts for what is done with it.
        halves: whether a batch for which memory is short is evaluated in halves.
    """

    def __init__(self, build: Build, ready: Callable[[Any], AbstractContextManager[Any]], *, halves: bool) -> None:
        self._task, self._model, self._device = build.task, build.model, build.device
        self._together = Together(build.world, build.device.torch_device)
        self._is_alone = build.spread is None
        # where a spread gathers parameters, every pass needs all processes of the world
        self._gathering = build.spread if build.spread is not None and build.spread.gathers else None
        self._validation = build.task.validation(build.model)
        self._ready = ready
        halves = halves and self._gathering is None  # all processes must take the same number of passes
        self._halving = Halving(build.task, "batch", "it is evaluated") if halves else None

    def means(self, batches: Iterable[Any]) -> dict[str, float]:
        """The mean of each figure that the task evaluates, over the batches that have it, weighted by the terms of their mean loss.

        In a world of several processes each gives its own batches, and the means are over all of them.

        At the end random states and the modules' modes are as they were before.

        Raises:
            TaskError: a batch does not show its number of samples, or nothing in the batches counts.
            Exception: what the user's code raises; out of memory with a note that says why the batch was not halved.
        """
        totals: dict[str, Any] = {}
        weights: dict[str, float] = {}
        at_the_end: dict[str, float] = {}
        counts = False
        with keep_randomness(self._device.torch_device), self.mode(), uncounted(self._model):
            for batch in self._in_step(batches):
                for part, size in self._sized(batch):
                    for values, weight in self._evaluated(part, size):
                        counts = True
                        for name, value in values.items():
                            totals[name] = totals.get(name, 0.0) + value.double() * weight
                            weights[name] = weights.get(name, 0.0) + weight
            if self._validation is not None and self._together.largest(counts):
                with torch.inference_mode():
                    at_the_end = self._validation.at_the_end()
        if not self._is_alone:
            totals, weights, at_the_end, counts = _over_all(totals, weights, at_the_end, counts)
        if not counts:
            raise TaskError(
                "nothing was evaluated: no batch was given, or none has a term in its mean loss; give a loader that "
                "yields batches such as the task's own (an iterator is empty the second time)"
            )
        return {name: float(value) / weights[name] for name, value in totals.items()} | at_the_end

    def values(self, batch: Any) -> dict[str, torch.Tensor]:
        """What the task evaluates on one batch: scalars by name."""
        validation = self._validation
        of_batch: Callable[[torch.nn.Module, Any], dict[str, torch.Tensor]] = (
            self._task.evaluate if validation is None else lambda model, ready: validation.of_batch(ready)
        )
        # parameters that were gathered in inference mode could not be trained afterwards
        without_gradient = torch.inference_mode() if self._gathering is None else torch.no_grad()
        with without_gradient, self._ready(batch) as ready:
            if self._gathering is None:  # each process has the whole model, and evaluates by itself
                return of_batch(self._model, ready)
            found: dict[str, torch.Tensor] = self._gathering.run(of_batch, ready)
            return found

    def _take_part(self, batch: Any) -> None:
        """Run a batch that does not count through the model, because the other processes wait for this one."""
        assert self._gathering is not None
        with torch.no_grad(), self._ready(batch) as ready:
            self._gathering.run(self._task.loss, ready)

    def _in_step(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches. Where every pass needs all processes, a process without batches left runs a sample that does not count."""
        if self._gathering is None:
            yield from batches
            return
        own = iter(batches)
        while self._together.largest((batch := next(own, _NONE)) is not _NONE):
            if batch is _NONE:
                self._take_part(self._task.small_batch(1))
            else:
                yield batch

    def begin(self) -> None:
        """Put the model into evaluation mode, and tell the task's own validation that it begins."""
        self._model.eval()
        if self._validation is not None:
            with torch.inference_mode():
                self._validation.begin()

    @contextmanager
    def mode(self) -> Iterator[None]:
        """A context for evaluation, after which every module is in its mode of before, and can be trained."""
        modes = [(module, module.training) for module in self._model.modules()]
        is_training = self._model.training
        try:
            self.begin()
            yield
        finally:
            self._model.train(is_training)  # a module's `train` may do more than set the mode
            for module, mode in modes:
                module.training = mode
                for held in (vars(module), module._buffers):
                    for name, value in held.items():  # autograd would refuse a mask, say, that was kept from evaluation
                        if isinstance(value, torch.Tensor) and value.is_inference():
                            held[name] = value.clone()

    def _sized(self, batch: Any) -> Iterator[tuple[Any, int]]:
        """The batch, or each micro batch in it, with its number of samples."""
        if not isinstance(batch, StepBatch):
            try:
                batch = split(batch, self._task.cuts(), _UNCUT)
            except CannotCutError as cannot:
                if self._task.loss_weight is None:
                    raise TaskError(
                        f"how many samples this batch has is not known: it holds {cannot}; write loss_weight(batch), or "
                        "give batches with their sizes: `autotune.task.batches.StepBatch([(batch, n)])`"
                    ) from None
                batch = StepBatch([(batch, 1)])
        yield from zip(batch, batch.sizes, strict=True)

    def _evaluated(self, batch: Any, num_samples: int) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        """What the task evaluates on a batch, with the weight; part by part where memory is short."""
        waiting = [(batch, num_samples)]
        while waiting:
            part, size = waiting.pop()
            if self._halving is not None and len(cut := self._halving.cut(StepBatch([(part, size)]))) > 1:
                waiting += [*zip(cut, cut.sizes, strict=True)][::-1]
                continue
            weight = self._task.weight(part, size)
            if not weight:  # the mean over nothing is NaN
                if self._gathering is not None:
                    self._take_part(part)
                continue
            try:
                values = self.values(part)
            except Exception as error:
                if self._halving is None or not self._device.is_out_of_memory(error):
                    raise
                if reason := self._halving.why_not(part, size):
                    error.add_note(f"autotune cannot evaluate it in smaller batches: {reason}")
                    raise
                self._halving.learn(part, size, error)
                waiting.append((part, size))
            else:
                yield values, weight
                continue
            self._device.give_back()


def _over_all(
    totals: dict[str, Any], weights: dict[str, float], at_the_end: dict[str, float], counts: bool
) -> tuple[dict[str, float], dict[str, float], dict[str, float], bool]:
    """The arguments, summed over all processes. What a process gives at the end has no weight: there each counts as much as another."""
    found = gather(({name: float(total) for name, total in totals.items()}, weights, at_the_end, counts))
    added: tuple[dict[str, float], dict[str, float], dict[str, float]] = ({}, {}, {})
    for *parts, _ in found:
        for sums, part in zip(added, parts, strict=True):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
    ends = sum(bool(end) for *_, end, _ in found)
    return added[0], added[1], {name: value / ends for name, value in added[2].items()}, any(one[-1] for one in found)
