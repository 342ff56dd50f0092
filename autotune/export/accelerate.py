"""The answer as a configuration file of Hugging Face's `accelerate launch`, and the calls that belong into the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from autotune.records.result import Result
from autotune.techniques import SPREAD
from autotune.techniques.frameworks import ACCELERATE, DATALOADER

_IN_FILE = "mixed_precision"  # what both the file and `Accelerator(...)` take
_BACKEND = "dynamo_backend"  # stands in a section of its own there
_FSDP, _GROUPS, _OF_DDP = "fsdp_plugin", "parallelism_config", "kwargs_handlers"
_NOT_IN_SCRIPT = (_IN_FILE, _BACKEND, _FSDP, _GROUPS, _OF_DDP)
_OF_FSDP = {
    "fsdp_version": "fsdp_version",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "cpu_offload": "fsdp_offload_params",
}


class Accelerate(Exporter):
    """YAML that `accelerate launch --config_file FILE` reads; its first lines are comments with the calls in the script."""

    name = ACCELERATE
    summary = "a config file for `accelerate launch`, with the calls for the script in its comments"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """For one machine; on the CPU if the search was there. `accelerate launch` starts as many processes as were searched."""
        said, unsaid = arguments(
            result,
            space,
            (ACCELERATE, DATALOADER),
            "neither `Accelerator` nor `DataLoader` has an argument for it",
        )
        of_world, of_accelerator = _spread(result, said[ACCELERATE])
        of_script = {name: value for name, value in said[ACCELERATE].items() if name not in _NOT_IN_SCRIPT}
        of_file: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "num_machines": 1,
            "num_processes": 1,
            **of_world,
            "use_cpu": result.subject.device.startswith("cpu"),
            "debug": False,
            **{name: said[ACCELERATE][name] for name in (_IN_FILE,) if name in said[ACCELERATE]},
        }
        if said[ACCELERATE].get(_BACKEND, "no") != "no":
            of_file["dynamo_config"] = {_BACKEND: said[ACCELERATE][_BACKEND].upper()}
        comments = [
            "# accelerate launch --config_file THIS_FILE train.py",
            f"# In train.py: {_call('Accelerator', of_script, *of_accelerator)}",
            f"# In train.py: {_call('DataLoader', said[DATALOADER], 'dataset')}",
            "# In train.py: `with accelerator.accumulate(model):` around all of a micro batch, or gradients do not accumulate",
            "# Add your own collate_fn; leave shuffle out for an IterableDataset or a sampler.",
        ]
        text = "\n".join([*comments, *(f"{name}: {json.dumps(value)}" for name, value in of_file.items())])
        unsaid |= unsaid_clipping(result, "accelerator.clip_grad_norm_(model.parameters(), ...) before each step")
        unsaid |= unsaid_last_sample(result)
        return Export(text, {**unsaid, **unknown_of_copies(result)})


def _spread(result: Result, said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the file and `Accelerator(...)` say of several processes; nothing where one trains alone."""
    number, places = result.subject.num_processes, result.places.get(SPREAD, {})
    if number == 1:
        return {}, []
    # MULTI_GPU starts processes on a CPU, too, where `cpu=True` says so; MULTI_CPU would need MPI
    of_file: dict[str, Any] = {"distributed_type": "MULTI_GPU", "num_processes": number}
    unused = {"find_unused_parameters": True} if places.get("find_unused_parameters") else {}
    options = {**unused, **said.get(_OF_DDP, {})}
    calls = ["cpu=True"] if result.subject.device.startswith("cpu") else []
    if _FSDP in said:
        classes = ",".join(places.get("classes", ()))
        plugin = {_OF_FSDP[name]: value for name, value in said[_FSDP].items()}
        plugin |= {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP"}
        plugin |= {"fsdp_transformer_layer_cls_to_wrap": classes} if classes else {}
        of_file |= {"distributed_type": "FSDP", "fsdp_config": {**plugin, "fsdp_cpu_ram_efficient_loading": False}}
    elif options:
        calls.append(f"{_OF_DDP}=[{_call('DistributedDataParallelKwargs', options)}]")
    if _GROUPS in said:
        size = said[_GROUPS]["dp_shard_size"]
        sizes = {"dp_replicate_size": number // size, "dp_shard_size": size}
        of_file[_GROUPS] = {f"{_GROUPS}_{name}": value for name, value in sizes.items()}
    return of_file, calls


def _call(name: str, named: Mapping[str, Any], *positional: str) -> str:
    return f"{name}({', '.join([*positional, *(f'{key}={value!r}' for key, value in named.items())])})"
