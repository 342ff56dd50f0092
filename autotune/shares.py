"""Each process's share of the data, where several train one model: samples of its own, and as many as the others have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler, Subset

from autotune.errors import TaskError
from autotune.group import gather
from autotune.randomness import RandomState, seed_everything
from autotune.records.config import World

_HOST = torch.device("cpu")


def share_out(dataset: Any, options: dict[str, Any], world: World, batch_size: int) -> tuple[Any, dict[str, Any]]:
    """What this process reads of a dataset, and the options of a data loader for it.

    Every process gets the same number of samples, so that all take the same number of steps. Samples of a dataset with
    positions are repeated where they do not divide evenly, as torch's `DistributedSampler` does; the last ones of a stream
    are left out.

    Raises:
        TaskError: the processes have datasets of different lengths.

    Args:
        options: of the data loader; a sampler among them gives the order that is shared out, each `batch_size` in a row together.
    """
    if world.data_parallel == 1:
        return dataset, options
    streams = isinstance(dataset, IterableDataset)
    found = gather((int(torch.randint(2**31, ())), None if streams else len(dataset)))
    seed = found[0][0]
    if streams:
        return StreamShare(dataset, world.data_parallel, world.group, seed), options
    if len({length for _, length in found}) > 1:
        raise TaskError(
            f"train_dataset has {', '.join(str(length) for _, length in found)} samples in the processes, one after the other, and "
            "has to be the same in all of them: each is given its share; leave out what divides it by rank"
        )
    sampler: Any = options.get("sampler")
    if sampler is None:
        shared: Any = DistributedSampler(dataset, num_replicas=world.data_parallel, rank=world.group, seed=seed)
    else:
        shared = OrderShare(sampler, world.data_parallel, world.group, batch_size, seed=seed)
    return dataset, {**options, "sampler": shared}


class OrderShare(Sampler[int]):
    """One process's batches of the order that another sampler gives. Each of `number` processes draws the same order."""

    def __init__(self, sampler: Any, number: int, own: int, batch_size: int, seed: int) -> None:
        self._sampler, self._number, self._own, self._batch_size, self._seed = sampler, number, own, batch_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The order of each epoch is another one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._sampler) // self._number)

    def __iter__(self) -> Iterator[int]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed + self._epoch)  # the device's own stays as it is
            order = list(self._sampler)
        number, size = self._number, self._batch_size
        full = len(order) - len(order) % (number * size)
        for start in range(self._own * size, full, number * size):
            yield from order[start : start + size]
        rest = order[full:]
        rest += list(itertools.islice(itertools.cycle(order), -len(rest) % number))
        yield from rest[self._own :: number]


class StreamShare(IterableDataset[Any]):
    """One process's sample of every `number` samples of a stream, one for each process. An incomplete last group is left out.

    The stream draws the same random numbers in all processes, so that one that shuffles gives the same order to all. Data workers
    split it as the dataset itself has them do; it must not split itself by process.
    """

    def __init__(self, stream: IterableDataset[Any], number: int, own: int, seed: int) -> None:
        self._stream, self._number, self._own, self._seed = stream, number, own, seed
        self._epoch = self._passes = 0

    def set_epoch(self, epoch: int) -> None:
        """The order of each epoch is another one."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        own = RandomState(_HOST)
        worker = torch.utils.data.get_worker_info()
        seed_everything(self._seed + 1_000_003 * self._epoch + 1_009 * self._passes + (worker.id if worker else 0))
        self._passes += 1  # data workers that persist are told of no epoch: this changes their order all the same
        samples = iter(self._stream)
        while True:
            taken = list(itertools.islice(samples, self._number))
            common = RandomState(_HOST)
            own.restore()
            if len(taken) < self._number:
                return
            yield taken[self._own]
            own = RandomState(_HOST)
            common.restore()

    def __len__(self) -> int:
        if not isinstance(self._stream, Sized):
            raise TypeError(f"{type(self._stream).__name__} has no length")
        return len(self._stream) // self._number


def own_samples(dataset: Any, world: World) -> Any:
    """This process's samples of a dataset. No sample is repeated or dropped, so processes may have unequally many."""
    if world.data_parallel == 1:
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return _Every(dataset, world)
    return Subset(dataset, range(world.group, len(dataset), world.data_parallel))


class _Every(IterableDataset[Any]):
    def __init__(self, stream: Any, world: World) -> None:
        self._stream, self._world = stream, world

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._world.group, None, self._world.data_parallel)
