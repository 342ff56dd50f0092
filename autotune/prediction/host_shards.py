"""Shards in host memory on fake tensors, which know one memory alone: what FSDP2 copies between a device and its host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autotune.prediction.storages import StorageTracker


@contextmanager
def copied_as_on_a_device(tracker: StorageTracker, tell: Callable[[], None]) -> Iterator[None]:
    """While a model is sharded and runs: what its `CPUOffloadPolicy` keeps on the host does not count, and its copies on the device do.

    Args:
        tell: called where shards lie on the host.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    groups: Any = _fsdp_param_group
    shard, inputs, reduce = (
        vars(FSDPParam)["_init_sharded_param"],
        vars(FSDPParam)["all_gather_inputs"],
        groups.foreach_reduce,
    )

    def shard_to_host(parameter: Any, *given: Any) -> None:
        shard(parameter, *given)
        if parameter.offload_to_cpu:
            tell()
            tracker.move_elsewhere(parameter._sharded_param_data)

    def inputs_from_host(parameter: Any) -> Any:
        if not parameter.offload_to_cpu:
            return inputs.fget(parameter)
        with mock.patch.object(parameter, "_sharded_param_data", parameter._sharded_param_data.clone()):
            return inputs.fget(parameter)

    def reduce_to_host(parameters: Any, *given: Any, **named: Any) -> Any:
        result = reduce(parameters, *given, **named)
        for parameter in parameters:
            if parameter.offload_to_cpu:
                gradient = parameter.sharded_param.grad
                with tracker.elsewhere():
                    gradient._local_tensor = gradient._local_tensor.clone()
        return result

    with (
        mock.patch.object(FSDPParam, "_init_sharded_param", shard_to_host),
        mock.patch.object(FSDPParam, "all_gather_inputs", property(inputs_from_host)),
        mock.patch.object(groups, "foreach_reduce", reduce_to_host),
    ):
        yield
