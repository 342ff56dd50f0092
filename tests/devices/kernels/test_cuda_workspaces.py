"""Scratch memory of CUDA's operators, by rule and as torch's own allocator is asked for it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.devices import open_device
from autotune.devices.kernels import hidden_allocations
from autotune.devices.kernels.cuda_like import cuda_like
from autotune.devices.kernels.cuda_workspaces import reduction_bytes
from autotune.devices.targets import GpuKind, gpu_of, target_of
from autotune.prediction.storages import StorageTracker
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


def embed(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.zeros(200, 400, dtype=torch.int64, device=weight.device), weight)


def embed_few(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(torch.zeros(2000, dtype=torch.int64, device=weight.device), weight)


def embed_bags(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def embed_all(weight: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(torch.zeros(2000, 40, dtype=torch.int64, device=weight.device), weight, mode=mode)

    return embed_all


def embed_int32_bags(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(torch.zeros(2000, 80, dtype=torch.int32, device=weight.device), weight)


def index_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight[torch.zeros(80_000, dtype=torch.int64, device=weight.device)]


def index_elements(weight: torch.Tensor) -> torch.Tensor:
    return weight[(torch.zeros(80_000, dtype=torch.int64, device=weight.device),) * 2]


def index_three(weight: torch.Tensor) -> torch.Tensor:
    return weight.unflatten(1, (12, 8))[(torch.zeros(80_000, dtype=torch.int64, device=weight.device),) * 3]


def index_columns(weight: torch.Tensor) -> torch.Tensor:
    return weight[:, torch.zeros(20_000, dtype=torch.int64, device=weight.device)]


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": embed,
    "embedding of few": embed_few,
    "bags, summed": embed_bags("sum"),
    "bags, averaged": embed_bags("mean"),
    "bags, largest": embed_bags("max"),
    "bags of int32": embed_int32_bags,
    "index": index_rows,
    "index of elements": index_elements,
    "index by three": index_three,
    "index of columns": index_columns,
    "index_select": lambda w: w.index_select(0, torch.zeros(80_000, dtype=torch.int64, device=w.device)),
    "gather": lambda w: w.gather(0, torch.zeros(5000, 96, dtype=torch.int64, device=w.device)),
    "max": lambda w: w.max(1).values,
    "sort": lambda w: w.sort(1).values,
    "topk": lambda w: w.topk(40, 1).values,
    "take": lambda w: w.take(torch.zeros(80_000, dtype=torch.int64, device=w.device)),
    "select": lambda w: w.select(1, 3),
    "slice": lambda w: w[100:5000],
    "narrow": lambda w: w.narrow(1, 3, 20),
    "diagonal": lambda w: w.diagonal(),
}


def really_asked(function: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Bytes that a gradient asks of torch's allocator, in order."""
    weight = torch.zeros(5000, 96, device="cuda", requires_grad=True)
    result = function(weight)
    gradient = torch.zeros_like(result)
    torch.autograd.grad(result, weight, gradient, retain_graph=True)  # loads what is loaded once
    torch.cuda.memory._record_memory_history(stacks="python", clear_history=True)
    torch.autograd.grad(result, weight, gradient)
    (history,) = torch.cuda.memory._snapshot()["device_traces"][:1]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in history if event["action"] == "alloc"]


def expected_to_be_asked(function: Callable[[torch.Tensor], torch.Tensor], target: str) -> list[int]:
    with cuda_like(), FakeTensorMode(), StorageTracker(hidden_allocations(target)) as tracker:
        weight = torch.empty(5000, 96, requires_grad=True)
        result = function(weight)
        gradient = torch.empty_like(result)
        start, tracker.in_backward = len(tracker.events), True
        kept = torch.autograd.grad(result, weight, gradient)
        asked = [int(event.size_bytes) for event in tracker.events[start:] if event.allocates]
        del kept
    return asked


@pytest.mark.gpu
def test_how_often_the_rows_of_an_embedding_occur_is_a_tensor_more(target: str) -> None:
    weight = torch.zeros(5000, 96, device="cuda", requires_grad=True)
    indices = torch.zeros(80_000, dtype=torch.int64, device="cuda")
    scratch = Scratch(target)
    with scratch:
        F.embedding(indices, weight, scale_grad_by_freq=True).sum().backward()
    assert not scratch.misses


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_asks_the_allocator_for_these_pieces_in_this_order(name: str, target: str) -> None:
    function = GRADIENTS[name]
    real, expected = (
        [size_bytes for size_bytes in sizes if size_bytes > SMALL_BYTES]
        for sizes in (really_asked(function), expected_to_be_asked(function, target))
    )
    assert expected == pytest.approx(real, rel=0.03)
