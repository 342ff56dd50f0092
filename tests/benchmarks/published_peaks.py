"""Predicted against published peaks of memory: timm's image models trained on an A100 of 40 GB.

    python -m pip install --no-deps timm torchvision
    python tests/benchmarks/published_peaks.py

`timm_a100_memory.csv` holds the device-level peak, in MiB, of some 500 models at batch sizes from 8 to 128, as published.
Optimizer and precision are not stated: fp32 and SGD with momentum are assumed, at each model's own image size. What lies
outside the allocator (the CUDA context, libraries, whatever else the publisher's program held) is one constant, learned from
ten models that are drawn first and not evaluated.

Runs that died are in the file. A row is marked as died, from the published figures alone, when its memory is not more than
0.5 % above that of every smaller batch, when that of a neighbouring batch is the same within 0.5 %, or when it is 39,000 MiB
or more. No other row is removed.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from autotune import Task
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import Plan, Traces
from autotune.techniques import find_techniques
from autotune.units import MIB

PUBLISHED = Path(__file__).with_name("timm_a100_memory.csv")
SEED = 0
NUM_CALIBRATION = 10
NUM_EVALUATED = 160
NEAR_LIMIT_MIB = 39_000
RISE = 1.005  # less is no rise
MODEL_TIMEOUT_S = 300
INITIALIZERS = ("trunc_normal_", "normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_", "xavier_normal_",
                "orthogonal_", "zeros_", "ones_", "constant_")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model at one batch size: published peak, and what the allocator is predicted to hold and to reserve, in MiB."""

    model: str
    batch_size: int
    published_mib: float
    allocated_mib: float
    reserved_mib: float


def published() -> dict[str, list[tuple[int, float]]]:
    """Model -> (batch size, MiB) of the runs that did not die, by the rule above."""
    found: dict[str, list[tuple[int, float]]] = {}
    with PUBLISHED.open() as file:
        for line in csv.DictReader(file):
            run = int(line["batch_size"]), float(line["max_device_memory_mib"])
            found.setdefault(line["model"], []).append(run)
    living = {model: alive(sorted(runs)) for model, runs in found.items()}
    return {model: runs for model, runs in living.items() if runs}


def alive(runs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The runs of one model, in increasing batch size, that did not die."""
    memory = [mib for _, mib in runs]
    return [
        run
        for i, run in enumerate(runs)
        if run[1] < NEAR_LIMIT_MIB
        and run[1] > RISE * max(memory[:i], default=0.0)
        and all(
            abs(run[1] - other) > (RISE - 1) * run[1] for other in (*memory[max(i - 1, 0) : i], *memory[i + 1 : i + 2])
        )
    ]


def timm_task(model: str) -> Task:
    """Training of one of timm's models."""
    import timm

    config = timm.get_pretrained_cfg(model)
    if config is None:
        raise ValueError("the installed timm has no such model")

    def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(batch_size, *config.input_size), torch.zeros(batch_size, dtype=torch.long)

    def training_step(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features = module(batch[0])
        return torch.nn.functional.cross_entropy(features, batch[1])  # without a head, these are the logits

    return Task(
        build_model=lambda: timm.create_model(model),
        make_batch=make_batch,
        training_step=training_step,
        configure_optimizers=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    )


def predict(model: str, batch_sizes: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Batch size -> MiB that the allocator holds at its peak, and that it has reserved."""
    traces = Traces(target="cuda")
    plan = Plan(models=((),), updates=((),), batch_sizes=tuple(batch_sizes))
    with initializers_that_do_nothing():
        for message in trace_plan(timm_task(model), plan, "cuda"):
            if "traces" in message:
                traces = traces.merged(Traces.from_dict(message["traces"]))
    if traces.failures:
        raise ValueError("; ".join(traces.failures.values()))
    found = {}
    for size in plan.batch_sizes:
        peak = traces.peak(find_techniques().complete({"batch_size": size}), find_techniques())
        assert peak is not None
        found[size] = peak.breakdown.total_bytes / MIB, peak.peak_bytes / MIB
    return found


@contextmanager
def initializers_that_do_nothing() -> Iterator[None]:
    """Values do not matter here, and drawing those of large models takes long."""
    with mock.patch.multiple(torch.nn.init, **{name: lambda tensor, *args, **kwargs: tensor for name in INITIALIZERS}):
        yield


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or a string that says why it did not, from a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        try:
            sender.send(function(*arguments))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if not receiver.poll(MODEL_TIMEOUT_S):
            return f"took more than {MODEL_TIMEOUT_S} s"
        return receiver.recv()
    except EOFError:
        return "the process died"
    finally:
        process.kill()
        process.join()


def rows_of(models: Sequence[str], runs: dict[str, list[tuple[int, float]]]) -> tuple[list[Row], dict[str, str]]:
    """Predictions of models, and why there is none of others."""
    rows, failures = [], {}
    for number, model in enumerate(models, start=1):
        found = in_a_fork(predict, model, [size for size, _ in runs[model]])
        print(f"\r{number}/{len(models)} {model:50s}", end="", file=sys.stderr)
        if isinstance(found, str):
            failures[model] = found
            continue
        rows += [
            Row(
                model=model,
                batch_size=size,
                published_mib=mib,
                allocated_mib=found[size][0],
                reserved_mib=found[size][1],
            )
            for size, mib in runs[model]
        ]
    print(file=sys.stderr)
    return rows, failures


def errors(rows: Sequence[Row], calibration: Sequence[Row], value: Callable[[Row], float]) -> tuple[float, list[float]]:
    """The constant that the calibration rows give, and each row's relative error with it."""
    constant = median(row.published_mib - value(row) for row in calibration)
    return constant, [(value(row) + constant) / row.published_mib - 1 for row in rows]


def report(rows: Sequence[Row], calibration: Sequence[Row], failures: dict[str, str], console: Console) -> None:
    """Print the figures and the worst rows."""
    table = Table(
        "predicted from", "models", "rows", "constant", "median", "mean", "90 %", "under", title="relative error"
    )
    for label, value in (
        ("reserved by the allocator", lambda row: row.reserved_mib),
        ("living tensors alone", lambda row: row.allocated_mib),
    ):
        constant, found = errors(rows, calibration, value)
        sizes = sorted(map(abs, found))
        table.add_row(
            label,
            str(len({row.model for row in rows})),
            str(len(rows)),
            f"{constant:.0f} MiB",
            f"{median(sizes):.1%}",
            f"{mean(sizes):.1%}",
            f"{sizes[int(0.9 * len(sizes))]:.1%}",
            f"{mean(error < 0 for error in found):.0%}",
        )
    console.print(table, "to reach: median 3 %, 90 % within 12 %")
    constant, found = errors(rows, calibration, lambda row: row.reserved_mib)
    worst = Table("model", "batch", "published", "predicted", "error", title="worst ten")
    for error, row in sorted(zip(found, rows, strict=True), key=lambda pair: -abs(pair[0]))[:10]:
        predicted = row.reserved_mib + constant
        worst.add_row(
            row.model, str(row.batch_size), f"{row.published_mib:.0f} MiB", f"{predicted:.0f} MiB", f"{error:+.1%}"
        )
    console.print(worst)
    for model, why in failures.items():
        console.print(f"not traced: {model}: {why}")


def stub_torchvision() -> torch.library.Library:
    """Two operators that a torchvision without its compiled part asks for when it is imported."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main() -> None:
    """Draw, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=NUM_EVALUATED, help="number of models to evaluate")
    num_models = parser.parse_args().models
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = stub_torchvision()
    import timm  # noqa: F401  # once, for all forks

    runs = published()
    models = sorted(runs)
    random.Random(SEED).shuffle(models)
    calibration, _ = rows_of(models[:NUM_CALIBRATION], runs)
    rows, failures = rows_of(models[NUM_CALIBRATION : NUM_CALIBRATION + num_models], runs)
    report(rows, calibration, failures, Console(width=120, no_color="NO_COLOR" in os.environ))
    del kept


if __name__ == "__main__":
    main()
