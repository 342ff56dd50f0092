"""What kernels hold for a new shape, against what a process that trains grows by."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from autotune import techniques
from autotune.predict.kernel_memory import KernelMemory
from autotune.predict.storages import Dense, KernelCall
from autotune.predict.traces import KernelsHeld
from autotune.predict.tracing import Tracer
from autotune.task import Task

WIDTH = 96
BATCHES = {"filled": range(320, 1280, 32), "other": range(321, 1281, 32)}
SIZES = (160, 320, 640)

# Trains on batches of ever other sizes, the largest first; prints the bytes that each of them adds.
TRAIN = """
import sys
import torch
from autotune.devices.procfs import process_memory
from tests.predict.test_kernel_memory import make_task

torch.set_num_threads(1)
model = make_task().build_model()
first, *sizes = map(int, sys.argv[1:])
for size in (4096, first, *sizes):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(size, 96)).float().square().mean()
    loss.backward()
    if size == first:
        before = process_memory().data_bytes
print((process_memory().data_bytes - before) / len(sizes))
"""


def make_task() -> Task:
    return Task(
        build_model=lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH)),
        make_batch=lambda batch_size: torch.randn(batch_size, WIDTH),
        training_step=lambda model, batch: model(batch).float().square().mean(),
        configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def measured() -> tuple[KernelsHeld, ...]:
    micro = Tracer(make_task(), "cpu").micro_steps(techniques.complete({"amp": "bf16"}), SIZES)
    return KernelMemory().measured(micro.new_calls, SIZES[-1] * WIDTH)


MEASURE = """
import json
from dataclasses import asdict
import torch
from tests.predict.test_kernel_memory import measured

torch.set_num_threads(1)
print(json.dumps([asdict(one) for one in measured()]))
"""


@pytest.fixture(scope="module")
def held():
    """In a process of its own, as it is for a search: what others have left in the heap would be filled first."""
    found = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout
    return tuple(KernelsHeld(**one) for one in json.loads(found))


@pytest.mark.parametrize("kind", BATCHES)
def test_a_process_grows_by_that_much_with_each_new_shape(held, kind):
    arguments = [sys.executable, "-c", TRAIN, *map(str, BATCHES[kind])]
    grown = float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    foretold = sum(getattr(one, f"{kind}_bytes") for one in held)
    assert foretold == pytest.approx(grown, rel=0.35, abs=1.5 * 2**20)


def test_rows_go_with_the_elements_of_a_batch(held):
    assert all(one.rows_per_element == pytest.approx(1 / WIDTH) for one in held)


def product(rows: int, columns: int = 8) -> KernelCall:
    args = Dense((rows, 8), (0, 1), torch.bfloat16), Dense((8, columns), (0, 1), torch.bfloat16)
    return KernelCall(torch.ops.aten.mm.default, args, ("a",))


def test_each_operator_is_run_once(monkeypatch):
    runs = []
    monkeypatch.setattr("autotune.predict.kernel_memory._run", lambda operator, args: runs.append(args[0].shape) or 5)
    memory = KernelMemory()
    for _ in range(2):
        (found,) = memory.measured([(product(40), product(80))], 800)
        assert (found.rows_per_element, found.filled_bytes, found.other_bytes) == (0.1, 5, 5)
    assert runs == [(128, 8), (64, 8), (129, 8), (65, 8)]


def test_large_products_are_run_with_fewer_rows_or_not_at_all(monkeypatch):
    runs = []
    monkeypatch.setattr("autotune.predict.kernel_memory._run", lambda operator, args: runs.append(args[0].shape) or 5)
    KernelMemory().measured([(product(100_000, 1000), product(200_000, 1000))], 200_000)
    assert 64 < max(runs)[0] < 100_000
    runs.clear()
    wide = product(64, 10**7), product(128, 10**7)
    assert KernelMemory().measured([wide], 128) == KernelMemory().typical([wide], 128)
    assert runs == []


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        (torch.ops.aten.convolution.default, torch.float32),
        (torch.ops.aten.mkldnn_rnn_layer_backward.default, torch.bfloat16),
    ],
)
def test_what_is_no_product_is_not_run(operator, dtype):
    small, large = (KernelCall(operator, (Dense((n, 8), (0, 1), dtype), None), ("a", "b")) for n in (4, 8))
    (found,) = KernelMemory().measured([(small, large)], 8)
    assert 2**19 <= found.filled_bytes == found.other_bytes < 2**24


def test_a_product_that_does_not_run_is_a_typical_one():
    right = Dense((8, 3), (0, 1), torch.bfloat16)
    unfit = [
        KernelCall(torch.ops.aten.mm.default, (Dense((rows, 7), (0, 1), torch.bfloat16), right), ("a",))
        for rows in (64, 128)
    ]
    assert KernelMemory().measured([tuple(unfit)], 128) == KernelMemory().typical([tuple(unfit)], 128)


def test_an_operator_that_does_not_go_with_the_batch_says_nothing():
    assert KernelMemory().measured([(product(8), product(8))], 80) == ()


@pytest.mark.parametrize(
    "tensor", [torch.empty(3, 5).t(), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)]
)
def test_a_tensor_without_values_keeps_its_layout(tensor):
    again = Dense.like(tensor).empty()
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
