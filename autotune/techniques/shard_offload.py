"""Shards of parameters, gradients and optimizer state lie in host memory."""

from __future__ import annotations

from typing import Any

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Setting, Switch
from autotune.techniques.frameworks import At, Lines, Option, words
from autotune.techniques.spread_option import SpreadOption


class ShardOffload(SpreadOption, Switch):
    """FSDP2's `CPUOffloadPolicy`: what is gathered is copied to the device first, and the optimizer steps on the host."""

    name = "shard_offload"
    summary = "shards lie in host memory, and the optimizer steps there: far less on the device, far slower"
    applies = "if included or if memory is short: several GPUs, sharded parameters"
    of_shards = True
    loads_host = True
    leanest = (True,)
    against_shortage = True
    expected = Expectation(
        compute=Factor(typical=1.3, spread=1.5),
        update=Factor(typical=5.0, spread=3.0),
        state=Factor(typical=0.3, spread=1.5),
    )
    frameworks = words(
        transformers=Option("fsdp_config.cpu_offload", False),
        accelerate=Option("fsdp_plugin.cpu_offload", False),
        torch=Lines({At.SPREAD: 'offload_policy=on_host(pinned=DEVICE.type != "cpu")'}),
    )

    def why_not(self, setting: Setting) -> str:
        on_host = "" if setting.device.capabilities.own_memory else "on a CPU the host's memory is the device's"
        return super().why_not(setting) or on_host

    def shapes_update(self, choice: Choice) -> bool:
        """The optimizer's state lies on the host, too."""
        return True

    def why_optional(self, setting: Setting) -> str:
        return "copies over the bus and an update on the host are far slower"

    def apply(self, build: Build, choice: Choice) -> None:
        build.fsdp_options["offload_policy"] = on_host(pinned=build.device.capabilities.page_locked)


def on_host(*, pinned: bool) -> Any:
    """FSDP2's policy that keeps shards in host memory, page-locked or not."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=pinned)
