"""The answer as a configuration file of Hugging Face's `accelerate launch`, and the calls that belong into the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autotune.export.base import Export, Exporter, SearchedChoices, arguments
from autotune.records.result import Result
from autotune.techniques.frameworks import ACCELERATE, DATALOADER

_IN_FILE = "mixed_precision"  # what both the file and `Accelerator(...)` take
_BACKEND = "dynamo_backend"  # stands in a section of its own there


class Accelerate(Exporter):
    """YAML that `accelerate launch --config_file FILE` reads; its first lines are comments with the calls in the script."""

    name = ACCELERATE
    summary = "a config file for `accelerate launch`, with the calls for the script in its comments"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """For one process on one machine; on the CPU if the search was there."""
        said, unsaid = arguments(
            result,
            space,
            (ACCELERATE, DATALOADER),
            "neither `Accelerator` nor `DataLoader` has an argument for it",
        )
        of_script = {name: value for name, value in said[ACCELERATE].items() if name not in (_IN_FILE, _BACKEND)}
        of_file: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "num_machines": 1,
            "num_processes": 1,
            "use_cpu": result.subject.device.startswith("cpu"),
            "debug": False,
            **{name: said[ACCELERATE][name] for name in (_IN_FILE,) if name in said[ACCELERATE]},
        }
        if said[ACCELERATE].get(_BACKEND, "no") != "no":
            of_file["dynamo_config"] = {_BACKEND: said[ACCELERATE][_BACKEND].upper()}
        comments = [
            "# accelerate launch --config_file THIS_FILE train.py",
            f"# In train.py: {_call('Accelerator', of_script)}",
            f"# In train.py: {_call('DataLoader', said[DATALOADER], 'dataset')}",
            "# In train.py: `with accelerator.accumulate(model):` around all of a micro batch, or gradients do not accumulate",
            "# Add your own collate_fn; leave shuffle out for an IterableDataset or a sampler.",
        ]
        return Export(
            "\n".join([*comments, *(f"{name}: {json.dumps(value)}" for name, value in of_file.items())]), unsaid
        )


def _call(name: str, named: Mapping[str, Any], *positional: str) -> str:
    return f"{name}({', '.join([*positional, *(f'{key}={value!r}' for key, value in named.items())])})"
