"""The same as `reserved` of rank 0 of several processes that train together, each on a played card, over the played NCCL.

    PLAYED_CUDNN_WORKSPACE_MIB=0 PLAYED_COPIES_UP_TO=65536 python -m tests.driver --card a100 --cards 8 \\
        python -m tests.benchmarks.reserved_worlds record [MODEL...]     with torch's CUDA build
    python -m tests.benchmarks.reserved_worlds                           anywhere
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp

from autotune.devices import HIDDEN, open_device
from autotune.devices.targets import target_of
from autotune.group import join
from autotune.prediction.job import trace_plan
from autotune.prediction.memory import ON_GPU
from autotune.prediction.traces import Traces, plan_traces
from autotune.records.config import ALONE, World
from autotune.recovery import RAISE
from autotune.runners.worker import hide_gpus
from autotune.session import prepare
from autotune.task import Task
from autotune.units import MIB
from tests.benchmarks import reserved
from tests.benchmarks.reserved import SIZES, in_forks, techniques, train_on_widest

RECORDED = Path(__file__).parent / "reserved_worlds.json"
WORLDS = (2, 4, 8)
BATCH = {"gpt": 48, "digits": 64, "tagger": 64, "GPT-2": SIZES["GPT-2"][1], "BERT": SIZES["BERT"][1]}
SPREADS = ("ddp", "zero1", "fsdp", "fsdp_grad", "hsdp:2")
OTHERS: tuple[dict[str, Any], ...] = ({}, {"amp": "bf16"}, {"checkpoint_segments": 2})
COMBINED = {2: SPREADS, 4: ("ddp", "fsdp", "hsdp:2"), 8: ("ddp", "fsdp")}  # with the others, by the size of the world
OFFLOADED = {2: ("fsdp", "fsdp_grad"), 4: ("fsdp", "hsdp:2"), 8: ()}  # with the others and shards in host memory
NUM_RUNS = 2  # of two copies: whether NCCL's watchdog has let go of DDP's first buckets in time differs from run to run


@dataclass(frozen=True, kw_only=True)
class Row(reserved.Row):
    """One config of one model in one world; of several runs the one that took most."""

    world_size: int


def task_of(model: str) -> Task:
    """Of a study or of a model of `reserved`, with any global batch."""
    return replace(reserved.TASKS[model](), global_batch=None)


def configs_of(model: str, world_size: int) -> Iterator[dict[str, Any]]:
    """Config dicts that are recorded of a model in a world."""
    for spread, others in itertools.product(SPREADS, OTHERS):
        has_convolutions, is_sharded = model in reserved.CONVOLUTIONS, spread not in ("ddp", "zero1")
        if (others and spread not in COMBINED[world_size] and not has_convolutions) or (
            spread == "hsdp:2" and world_size == 2
        ):
            continue
        if has_convolutions and ("checkpoint_segments" in others or (is_sharded and "amp" not in others)):
            continue  # FSDP2 takes no channels last, with which alone fp32 convolutions take no workspace
        layout = {"channels_last": True} if has_convolutions and not is_sharded else {}
        config = {"batch_size": BATCH[model], "parallel": spread, **layout, **others}
        yield config
        if spread in OFFLOADED[world_size]:
            yield {**config, "shard_offload": True}


def train(model: str, config: dict[str, Any], world: World, store: Path) -> dict[str, Any]:
    """Train for a few steps in this process, as one rank of a world."""
    torch.set_num_threads(1)  # makes torch's pool anew after the fork, before several threads ask for it
    device = open_device(f"cuda:{world.rank}")
    device.enter()
    join(world, device.torch_device, store)
    session = prepare(task_of(model), techniques.complete(config), device=device, on_oom=RAISE, world=world)
    train_on_widest(session)
    device.synchronize()
    row = Row(
        model=model,
        config=config,
        target=target_of(device.info()),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        requested_bytes=torch.cuda.memory_stats()["requested_bytes.all.peak"],
        world_size=world.size,
    )
    return asdict(row)


def measured(model: str, config: dict[str, Any], size: int) -> Row:
    """What rank 0 of a world of processes took."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        ranks = [World(size=size, rank=rank) for rank in range(size)]
        first, *_ = in_forks([partial(train, model, config, rank, store) for rank in ranks])
    return Row(**first)


def predicted(model: str, rows: Sequence[Row]) -> list[int]:
    """What a model's rows of one world are expected to reserve before any probe."""
    task, (world_size,) = task_of(model), {row.world_size for row in rows}
    configs = [techniques.complete(row.config) for row in rows]
    traces = Traces(target=rows[0].target)
    for message in trace_plan(task, plan_traces(configs, techniques, World(size=world_size)), rows[0].target):
        if "traces" in message:
            traces = traces.merged(Traces.from_dict(json.loads(json.dumps(message["traces"]))))
    peaks = [traces.peak(config, techniques) for config in configs]
    assert None not in peaks, traces.failures
    return [round(ON_GPU.total_bytes(peak)) for peak in peaks if peak is not None]


def recorded() -> list[Row]:
    """The rows that are kept."""
    return [Row(**row) for row in json.loads(RECORDED.read_text(encoding="utf-8"))] if RECORDED.exists() else []


def record(models: Sequence[str], sizes: Sequence[int]) -> None:
    """Measure every row of these models in worlds of these sizes that is not kept, and keep each at once."""
    for size in sizes:
        for model in models:
            with mock.patch.dict(os.environ, HIDDEN | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
                prepare(task_of(model), techniques.complete({}), device="cpu", world=ALONE)  # ranks then import nothing
            for config in configs_of(model, size):
                rows = recorded()
                if any((row.model, row.world_size, row.config) == (model, size, config) for row in rows):
                    continue
                runs = range(NUM_RUNS if config["parallel"] in ("ddp", "zero1") else 1)
                row = max((measured(model, config, size) for _ in runs), key=lambda row: row.reserved_bytes)
                print(row, flush=True)
                kept = ",\n".join(f"  {json.dumps(asdict(row))}" for row in [*rows, row])
                RECORDED.write_text(f"[\n{kept}\n]\n", encoding="utf-8")


def show() -> None:
    """Print each row with its prediction, and what they come to."""
    hide_gpus()
    errors: list[float] = []
    for model in BATCH:
        for size in WORLDS:
            rows = [row for row in recorded() if (row.model, row.world_size) == (model, size)]
            for row, found in zip(rows, predicted(model, rows) if rows else (), strict=True):
                errors.append(found / row.reserved_bytes - 1)
                told = f"{row.reserved_bytes / MIB:6.0f} MiB, predicted {errors[-1]:+.1%}"
                print(f"{model:7} {size} {json.dumps(row.config):90} {told}", flush=True)
    reserved.sum_up("all", "predicted", errors)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2:] or list(BATCH), WORLDS)
    else:
        show()
