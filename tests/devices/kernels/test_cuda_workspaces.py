"""Scratch memory of CUDA's operators, by rule and as torch's own allocator is asked for it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.devices import open_device
from autotune.devices.kernels import hidden_allocations
from autotune.devices.kernels.cuda_workspaces import reduction_bytes
from autotune.devices.targets import GpuKind, gpu_of, target_of
from autotune.task.batches import to_device
from autotune.units import KIB
from tests.benchmarks.reserved import CONVOLUTIONS, TASKS

A100 = GpuKind(capability=(8, 0), num_multiprocessors=108)
SMALL_BYTES = 64 * KIB  # semaphores, indices and the like, which no rule has
# what cuDNN takes is a guess, or unknown; a small vocabulary spares the partial sums
NOT_EXACT = {
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.embedding_dense_backward.default",
}


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """What is collected in the middle of an operator would count as its own."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def target() -> str:
    return target_of(open_device("cuda").info())


class Scratch(TorchDispatchMode):
    """Compares what each operator takes beside its result and gives back with the rule for it."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.misses: dict[str, tuple[int, int]] = {}
        self._rule_of = hidden_allocations(target).workspace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = requested()
        result = func(*args, **(kwargs or {}))
        taken = requested("peak") - max(before, requested())
        rule = self._rule_of(func)
        expected = 0 if rule is None else rule(args, result).peak_bytes
        if abs(taken - expected) > SMALL_BYTES + 0.01 * taken:
            self.misses[str(func)] = (taken, expected)
        return result


def requested(which: str = "current") -> int:
    return torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0)


def shapes() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes, and the dimensions to reduce."""
    draw = random.Random(0)
    lengths = (1, 2, 3, 7, 16, 31, 64, 100, 128, 255, 256, 500, 1000, 3000)
    found = [((12288, 512), (0,)), ((8, 1024, 512), (1,)), ((8192, 4096), ()), ((8, 64, 128, 128), (0, 2, 3))]
    while len(found) < 60:
        shape = tuple(draw.choice(lengths) for _ in range(draw.choice((1, 2, 3, 4))))
        if prod(shape) < 1e8:
            found.append((shape, tuple(sorted(draw.sample(range(len(shape)), draw.randint(1, len(shape)))))))
    return found


def test_the_gradient_of_a_bias_is_summed_by_blocks_that_share_it() -> None:
    gradients = torch.empty(12288, 512, device="meta")
    assert reduction_bytes(gradients, [0], 4, A100) == 48 * 2**20
    assert reduction_bytes(gradients, [1], 4, A100) == 0
    assert reduction_bytes(torch.empty(100, 512, device="meta"), [0], 4, A100) == 0


@pytest.mark.gpu
def test_every_reduction_takes_what_the_rule_says(target: str) -> None:
    gpu, misses = gpu_of(target), []
    for shape, dims in shapes():
        for turned in (False, True):
            tensor = torch.empty(shape, device="cuda")
            tensor = tensor.permute(*reversed(range(len(shape)))) if turned else tensor
            over = [len(shape) - 1 - dim for dim in dims] if turned else list(dims)
            torch.cuda.reset_peak_memory_stats()
            result = tensor.sum(over)
            taken = requested("peak") - requested()
            expected = reduction_bytes(tensor, over, 4, gpu)
            if not 0 <= taken - expected <= 4 * KIB:
                misses.append((shape, over, turned, taken, expected))
            del result, tensor
    assert not misses


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_attention_takes_what_the_rule_says(kernel: SDPBackend, dtype: torch.dtype, target: str) -> None:
    if kernel is SDPBackend.FLASH_ATTENTION and dtype is torch.float32:
        pytest.skip("flash attention takes short types")
    if dtype is torch.bfloat16 and not gpu_of(target).has_flash_attention:
        pytest.skip("no attention in bf16 on this GPU")
    scratch = Scratch(
        target
    )  # of a batch that fills the GPU: of a smaller one, flash attention shares a row's keys among blocks
    for head_dim in (32, 40, 64, 96, 128, 160, 256):
        for length in (128, 300):
            query, key, value = (
                torch.randn(32, 6, length, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
            )
            with scratch, sdpa_kernel([kernel]):
                output = F.scaled_dot_product_attention(query, key, value)
                output.transpose(1, 2).reshape(32, length, -1).sum().backward()
    assert not scratch.misses


@pytest.mark.gpu
@pytest.mark.parametrize("model", TASKS)
def test_every_operator_of_a_model_takes_what_a_rule_says(model: str, target: str) -> None:
    task, scratch = TASKS[model](), Scratch(target)
    module = task.model().to("cuda")
    if model in CONVOLUTIONS:
        module = module.to(memory_format=torch.channels_last)
    batch = to_device(task.batch(24), torch.device("cuda"))
    for in_bf16 in (False, True):
        with scratch:
            with torch.autocast("cuda", torch.bfloat16, enabled=in_bf16):
                loss = task.loss(module, batch)
            loss.backward()
    assert scratch.misses.keys() <= NOT_EXACT, scratch.misses
