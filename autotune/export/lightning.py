"""The answer as arguments of Lightning's `Trainer` and of the dataloaders that a user gives it."""

from __future__ import annotations

import json
from textwrap import indent
from typing import Any

from autotune.export.base import (
    Export,
    Exporter,
    SearchedChoices,
    arguments,
    unknown_of_copies,
    unsaid_clipping,
    unsaid_last_sample,
)
from autotune.export.source import Source
from autotune.records.result import Result
from autotune.techniques import SPREAD, Phase, find_techniques, shards_parameters
from autotune.techniques.frameworks import DATALOADER, LIGHTNING, TORCH, At

_STRATEGIES = "lightning.pytorch.strategies"
_CONFIGURE = """
def configure_model(self):
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if isinstance(self, FSDPModule):  # before a further fit, or validation
        return
    model, DEVICE, WORLD_SIZE = self, torch.device(self.device_mesh.device_type), self.trainer.world_size

    def shard(blocks, mesh, reshard, **options):
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **options)

    shard(
{options},
    )
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        register_fsdp_forward_method(self, name)
"""


class Lightning(Exporter):
    """JSON with two objects: `Trainer(**said["trainer"])` and `DataLoader(dataset, **said["dataloader"])`.

    Where several processes train, a strategy with options is said as `LightningCLI` takes it, `class_path` and `init_args`.
    Where they shard parameters, `configure_model` has the lines that belong into the module.
    """

    name = LIGHTNING
    summary = "arguments of Lightning's Trainer and of a DataLoader as JSON"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """One group of arguments for each key."""
        said, unsaid = arguments(
            result, space, (LIGHTNING, DATALOADER), "neither `Trainer` nor `DataLoader` has an argument for it"
        )
        trainer = said[LIGHTNING]
        text: dict[str, Any] = {"trainer": said[LIGHTNING], "dataloader": said[DATALOADER]}
        number, places = result.subject.num_processes, result.places.get(SPREAD, {})
        trainer |= _devices(result)
        if shards_parameters(result.config) and places:
            sizes = {"data_parallel_size": number, "tensor_parallel_size": 1}
            trainer["strategy"] = {"class_path": f"{_STRATEGIES}.ModelParallelStrategy", "init_args": sizes}
            text["configure_model"], in_it, casts = _configure_model(result)
            trainer |= {"precision": "bf16-mixed"} if casts else {}
            unsaid = {name: why for name, why in unsaid.items() if name not in in_it}
        elif number > 1:
            unused = {"find_unused_parameters": True} if places.get("find_unused_parameters") else {}
            options = {**unused, **trainer.get("strategy", {})}
            trainer["strategy"] = (
                {"class_path": f"{_STRATEGIES}.DDPStrategy", "init_args": options} if options else "ddp"
            )
        unsaid |= unsaid_clipping(result, "Trainer(gradient_clip_val=...)")
        unsaid |= unsaid_last_sample(result)
        return Export(json.dumps(text, indent=2), {**unsaid, **unknown_of_copies(result)})


def _devices(result: Result) -> dict[str, Any]:
    """The devices that train. Without them a Trainer takes all that the machine has, and the global batch grows with them."""
    device, number = result.subject.device, result.subject.num_processes
    if device.startswith("cpu"):
        return {"accelerator": "cpu", "devices": number}
    return {"accelerator": "gpu", "devices": [int(device.partition(":")[2])] if number == 1 else number}


def _configure_model(result: Result) -> tuple[list[str], list[str], bool]:
    """Lines of a LightningModule that shard its parameters, which techniques they are, and whether it runs under autocast."""
    source, options, names, casts = Source(), list[str](), list[str](), False
    for name, technique in find_techniques().items():
        choice = result.config.get(name, technique.off)
        lines = technique.write(TORCH, choice) if choice != technique.off else None
        if technique.phase is Phase.SPREAD and lines and At.SPREAD in lines:
            said = lines[At.SPREAD].replace("{modules}", json.dumps(result.places.get(name, {}).get("modules", [])))
            options.append(said)
            names.append(name)
            casts |= At.FORWARD in lines
            source.bring(f"dict({said})", type(technique).__module__, "autotune.techniques.tensors.spread")
    given = indent(",\n".join(options), "        ")
    text = "\n\n".join([*source.definitions.values(), _CONFIGURE.format(options=given).strip("\n")])
    return [*source.import_lines(), "import torch", "", *text.splitlines()], names, casts
