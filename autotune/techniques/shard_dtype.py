"""The type in which shards of parameters and of gradients travel."""

from __future__ import annotations

from functools import partial
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.records.device import BF16, FP32
from autotune.techniques import Build, Expectation, Factor
from autotune.techniques.frameworks import At, Table, words
from autotune.techniques.spread_option import SpreadOption


class ShardDtype(SpreadOption):
    """FSDP2's `MixedPrecisionPolicy`: parameters are gathered in bf16 and computed with so, gradients are added up in bf16.

    The shards themselves, and what the optimizer does with them, stay in fp32. The loss runs under autocast to bf16, so that what the
    model makes in fp32 meets them.
    """

    name = "shard_dtype"
    summary = "shards are gathered, and gradients added up, in bf16: half over the wire, products in bf16"
    applies = "several devices, sharded parameters"
    choices = ("fp32", "bf16")
    off = "fp32"
    exact = False
    of_shards = True
    likely = ("bf16",)
    expected = Expectation(compute=Factor(typical=0.8, spread=1.5), activations=Factor(typical=0.7, spread=1.3))
    frameworks = words(
        # these two give FSDP their own precision
        transformers=Table({"bf16": {"fsdp": True, "bf16": True}}),
        accelerate=Table({"bf16": {"fsdp_plugin": {"fsdp_version": 2}, "mixed_precision": "bf16"}}),
        torch=Table(
            {"bf16": {At.SPREAD: "mp_policy=in_bf16()", At.FORWARD: "torch.autocast(DEVICE.type, torch.bfloat16)"}}
        ),
    )

    def label(self, choice: Choice) -> str:
        return f"shards in {choice}"

    def conflict(self, config: Config) -> str:
        return super().conflict(config) or (
            "it computes in bf16 already: leave amp off" if config["amp"] != "off" else ""
        )

    def arithmetic(self, choice: Choice) -> str:
        return BF16 if choice == "bf16" else FP32

    def apply(self, build: Build, choice: Choice) -> None:
        build.fsdp_options["mp_policy"] = in_bf16()
        build.forward_contexts.append(partial(torch.autocast, build.device.torch_device.type, torch.bfloat16))


def in_bf16() -> Any:
    """FSDP2's policy that gathers parameters, and adds up gradients, in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
