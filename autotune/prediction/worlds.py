"""One process of a world whose other processes are not there: what stands in for their group, and for DDP, in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn

from autotune.group import Together, require_groups
from autotune.prediction.host_shards import copied_as_on_a_device
from autotune.prediction.passes import Event
from autotune.prediction.storages import StorageTracker
from autotune.records.config import World
from autotune.techniques.tensors import spread
from autotune.units import MIB

FIRST_BUCKET_MIB, BUCKET_MIB = 1, 25  # of DistributedDataParallel where `bucket_cap_mb` says nothing else


@contextmanager
def joined(world: World) -> Iterator[None]:
    """This process is one of a group of the world's size, whose collectives leave every tensor as it is."""
    if world.size == 1:
        yield
        return
    require_groups(world)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Spreading:
    """How a session on fake tensors was spread over its world: seen by the tracker, without what no process does.

    Attributes:
        copies: what stands in for DDP; None where the model is not spread so.
        num_events: before that was made.
        regrouped: what it allocated before its second step.
        updates_on_host: shards lie in host memory, and so does all that updates them.
    """

    def __init__(self, tracker: StorageTracker, world: World) -> None:
        self.copies: Copies | None = None
        self.num_events = 0
        self.regrouped: tuple[Event, ...] = ()
        self.updates_on_host = False
        self._tracker, self._world = tracker, world

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        """Of DDP, as they are now."""
        return self.copies.buckets if self.copies is not None else ()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While a session is prepared and runs."""
        if self._world.size == 1:
            yield
            return
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        def copy(module: nn.Module, **options: Any) -> Copies:
            self.num_events = len(self._tracker.events)
            self.copies = Copies(module, **options)
            return self.copies

        def on_host() -> None:
            self.updates_on_host = True

        with ExitStack() as stack:
            stack.enter_context(copied_as_on_a_device(self._tracker, on_host))
            for owner, name in ((spread, "leaves_some_out"), (ShardingPropagator, "_propagate_tensor_meta_non_cached")):
                stack.enter_context(mock.patch.object(owner, name, self._unseen(getattr(owner, name))))
            stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", copy))
            stack.enter_context(mock.patch.object(Together, "largest", lambda together, value: value))
            yield

    def _unseen(self, function: Any) -> Any:
        def run(*given: Any) -> Any:
            with self._tracker.unseen():
                return function(*given)

        return run

    def regroup(self) -> None:
        """What DDP does before a micro batch: after its first step it makes its buckets anew.

        Those of the first step are not freed there: NCCL's watchdog holds them until it has seen that their sums are done, for which
        it looks every 100 ms.
        """
        start = len(self._tracker.events)
        if self.copies is not None and self.copies.regroup():
            self.regrouped = tuple(event for event in self._tracker.events[start:] if event.allocates)


class Copies(nn.Module):
    """`DistributedDataParallel` by what it holds: buckets in which gradients are averaged.

    torch's own reducer (torch/csrc/distributed/c10d/reducer.cpp) reads the data of gradients, which fake ones do not have. In
    the first step it has one bucket for all gradients, then buckets of a size, in the order in which gradients came. Where some may
    not come, it has these from the beginning.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        find_unused_parameters: bool = False,
        init_sync: bool = True,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: int | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._holds_gradients, self._synchronizes, self._is_summing = gradient_as_bucket_view, True, False
        self._limits = [bucket_cap_mb * MIB] if bucket_cap_mb else [FIRST_BUCKET_MIB * MIB, BUCKET_MIB * MIB]
        kinds = nn.Embedding, nn.EmbeddingBag
        sparse = {id(m.weight) for m in module.modules() if isinstance(m, kinds) and m.sparse}  # in no bucket
        trained = [p for p in module.parameters() if p.requires_grad and id(p) not in sparse]
        self._came: list[nn.Parameter] = []
        self._views: dict[int, torch.Tensor] = {}
        self.buckets: list[torch.Tensor] = []
        self._is_grouped = find_unused_parameters and not static_graph
        self._make_buckets(trained, self._limits if self._is_grouped else [2**62])
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def forward(self, *given: Any) -> Any:
        """As without DDP."""
        return self.module(*given)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay where they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def regroup(self) -> bool:
        """Make the buckets anew, in the order in which gradients came, once they have come. Returns whether it did."""
        if self._is_grouped or not self._came:
            return False
        self._make_buckets(self._came, self._limits)
        self._is_grouped = True
        return True

    def _make_buckets(self, parameters: Sequence[nn.Parameter], limits: Sequence[int]) -> None:
        groups, _ = distributed._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            [*parameters], [*limits], [False] * len(parameters)
        )
        buckets = []
        for group in groups:
            members = [parameters[place] for place in group]
            flat = members[0].new_empty(sum(parameter.numel() for parameter in members))
            parts = flat.split([parameter.numel() for parameter in members])
            self._views |= {
                id(one): part.as_strided(one.shape, one.stride(), part.storage_offset())
                for one, part in zip(members, parts, strict=True)
            }
            buckets.append(flat)
        self.buckets = buckets

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if not self._synchronizes:
            return
        if not self._is_summing:  # as DDP does once all gradients are there, and before
            self._is_summing = True
            torch.autograd.Variable._execution_engine.queue_callback(self._sum)
        if not self._is_grouped:
            self._came.append(parameter)
        if self._holds_gradients:
            parameter.grad = self._views[id(parameter)]

    def _sum(self) -> None:
        self._is_summing = False
        for bucket in self.buckets:
            distributed.all_reduce(bucket)
