"""`StepLoader`: what a session trains on, one optimizer step at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from autotune.group import Together
from autotune.order import Order
from autotune.shares import OrderShare, StreamShare, share_out
from autotune.task import Task
from autotune.task.batches import StepBatch
from autotune.task.facts import uses_batch_statistics
from autotune.techniques.build import Build
from autotune.units import plural

_LOG = logging.getLogger("autotune")


class StepLoader:
    """Groups micro batches into optimizer steps. The last group, and the last micro batch in it, may be smaller.

    Where the model takes batch statistics, which one sample may not have, a last micro batch of one sample is left out of the pass. Of a
    stream it is not known to be the last.

    Args:
        shared: around what is loaded, as of an `Alarm`.
    """

    def __init__(self, build: Build, shared: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._shared = shared
        self._config = build.config
        self._task = build.task
        dataset = build.task.dataset()
        self._batch_streams = tuple(build.batch_streams)
        self._world, self._together = build.world, Together(build.world, build.device.torch_device)
        self._epoch = 0
        self._micro_loader: torch.utils.data.DataLoader[Any] | None = None
        self._leaves_one_out = False
        if dataset is not None:
            dataset, options = share_out(dataset, build.loader_options, build.world, build.config.batch_size)
            self._sampler = options.get("sampler")
            self._options = without_sampler(options)
            if self._sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset):
                self._sampler = Order(dataset, generator=options.get("generator"))
            size = build.config.batch_size
            if self._sampler is not None and uses_batch_statistics(build.model):
                self._leaves_one_out = leaves_one_out(len(self._sampler), size)
            self._micro_loader = micro_loader(
                build.task, dataset, size, sampler=self._sampler, drop_last=self._leaves_one_out, **self._options
            )

    def __iter__(self) -> Iterator[StepBatch]:
        micro_batches = self.micro_batches()
        for number in itertools.count():
            with self._shared():
                group = StepBatch(itertools.islice(micro_batches, self._config.accumulation_steps))
                ends_apart = self._may_end_apart and not self._together.agree(len(group))
            if ends_apart:
                _LOG.warning(
                    "rank %d: the streams of the processes do not end together: the pass ends for all after %s, and what is left "
                    "in some of them is not trained on; let train_dataset() give all processes the same samples, of which each is "
                    "given its share",
                    self._world.rank,
                    plural(number, "step"),
                )
                return
            if not group:
                return
            yield group

    @property
    def _may_end_apart(self) -> bool:
        """Whether another process may have fewer batches: of a stream, whose length is not known. It is asked before each step."""
        loader = self._micro_loader
        return (
            self._world.size > 1 and loader is not None and isinstance(loader.dataset, torch.utils.data.IterableDataset)
        )

    def __len__(self) -> int:
        if self._micro_loader is None:
            raise TypeError("a task without a dataset makes batches without end")
        return -(-len(self._micro_loader) // self._config.accumulation_steps)

    @property
    def num_workers(self) -> int:
        """Processes that load; 0 where training itself does."""
        return 0 if self._micro_loader is None else self._micro_loader.num_workers

    @property
    def num_samples(self) -> int | None:
        """Samples of a pass; None for a stream, and where batches are made without end."""
        loader = self._micro_loader
        if loader is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return None
        return len(loader.dataset)  # type: ignore[arg-type]

    def loader_of_first(self, num_batches: int, *, timeout_s: float) -> torch.utils.data.DataLoader[Any]:
        """A loader with workers of its own over the first samples of the same dataset, in any order.

        Args:
            timeout_s: for a batch, after which the loader raises.
        """
        assert self._micro_loader is not None and self.num_samples is not None
        first = range(min(self.num_samples, num_batches * self._config.batch_size))
        dataset = torch.utils.data.Subset(self._micro_loader.dataset, first)
        options = {**self._options, "timeout": timeout_s}
        return micro_loader(self._task, dataset, self._config.batch_size, shuffle=True, **options)

    def begin_again(self, seed: int) -> int:
        """After the batches that are drawn already, let all samples come once more, in the seed's order.

        Nothing changes where a sampler of the task's own gives the order, for a stream, where several processes share the samples, and
        where there is no dataset.

        Returns:
            How many batches are drawn already: those that data workers were told to load, and those on their way to the device.
        """
        if self._micro_loader is None or not isinstance(self._sampler, Order):
            return 0
        self._sampler.begin_again(seed)
        return self.num_workers * (self._micro_loader.prefetch_factor or 0) + len(self._batch_streams)

    def micro_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield single micro batches, before they are grouped, and how many samples each holds."""
        if self._micro_loader is not None:
            if self._leaves_one_out and self._epoch == 0 and self._world.rank == 0:
                _LOG.warning(
                    "of the last sample of a pass alone, batch normalisation may have no statistics: each pass leaves one sample out; "
                    "another batch_size than %d leaves none",
                    self._config.batch_size,
                )
            for shared in (self._sampler, self._micro_loader.dataset):
                if isinstance(shared, DistributedSampler | OrderShare | StreamShare):
                    shared.set_epoch(self._epoch)
            self._epoch += 1
            batches: Iterator[tuple[Any, int]] = iter(self._micro_loader)
            for stream in self._batch_streams:
                batches = stream(batches)
            yield from batches
        else:
            while True:
                yield self._task.batch(self._config.batch_size), self._config.batch_size


def leaves_one_out(num_samples: int, batch_size: int) -> bool:
    """Whether the last micro batch of a pass would be one sample, of which batch normalisation may have no statistics."""
    return num_samples > batch_size and num_samples % batch_size == 1


def micro_loader(task: Task, dataset: Any, batch_size: int, **options: Any) -> torch.utils.data.DataLoader[Any]:
    """Yields batches with their numbers of samples."""
    collate = _Counted(task.collate_fn or torch.utils.data.default_collate)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, collate_fn=collate, **options)


def without_sampler(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a data loader for other samples than those that the sampler orders."""
    return {name: choice for name, choice in options.items() if name != "sampler"}


def one_by_one(loader: torch.utils.data.DataLoader[Any]) -> Iterator[StepBatch]:
    """Each micro batch as a step batch of its own. The loader draws its seed when the first is taken, not before."""
    for pair in loader:
        yield StepBatch([pair])


class _Counted:
    """A collate function that also returns the number of samples, which a batch need not show."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        return self._collate(samples), len(samples)
