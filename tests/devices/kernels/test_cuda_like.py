"""Fake CPU tensors take the types and keep the tensors that CUDA's would."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.devices.kernels import cuda_like as module
from autotune.devices.kernels.cuda_like import cuda_like
from autotune.devices.kernels.cuda_workspaces import cuda_workspaces
from autotune.devices.targets import GpuKind

SHAPE = (4, 8, 16, 32)
RULES = cuda_workspaces(GpuKind())


@pytest.fixture(scope="class")
def on_fake_card() -> Iterator[None]:
    with cuda_like(), FakeTensorMode():
        yield


@pytest.fixture
def autocast(on_fake_card: None) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def saved_bytes(run: Callable[[], object], parameters: tuple[Tensor, ...] = ()) -> int:
    """What a forward pass keeps for the backward pass: each storage once, without parameters and random states."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    owned = {parameter.untyped_storage()._cdata for parameter in parameters}
    del kept
    return sum(size for address, size in sizes.items() if address not in owned and size > 16)


class TestAutocast:
    @pytest.mark.parametrize(
        "operation",
        [
            torch.exp, torch.log, torch.rsqrt, lambda t: t**2, lambda t: 2**t, lambda t: F.layer_norm(t, (32,)), F.softplus,
            lambda t: F.group_norm(t, 2), lambda t: F.mse_loss(t, t), lambda t: F.smooth_l1_loss(t, t), lambda t: t.logsumexp(0),
            lambda t: F.softmax(t, -1), lambda t: F.log_softmax(t, -1), lambda t: t.cumsum(0), lambda t: t.sum(), lambda t: t.prod(),
            lambda t: t.sum(-1), lambda t: t.norm(), lambda t: t.norm(dim=-1, keepdim=True), torch.linalg.vector_norm,
            lambda t: F.cross_entropy(t.flatten(0, 2), torch.zeros(512, dtype=torch.long)),
            lambda t: F.cosine_similarity(t, t), lambda t: F.binary_cross_entropy_with_logits(t, t),
        ],
    )  # fmt: skip
    def test_operators_that_cuda_runs_in_float32_do(
        self, autocast: None, operation: Callable[[Tensor], Tensor]
    ) -> None:
        assert operation(torch.rand(SHAPE, dtype=torch.bfloat16)).dtype is torch.float32

    @pytest.mark.parametrize(
        "operation",
        [
            lambda t: t @ t.mT, lambda t: F.linear(t, torch.rand(8, 32)), lambda t: F.conv2d(t, torch.rand(8, 8, 3, 3)),
            lambda t: torch.einsum("abcd,abcd->ab", t, t), lambda t: torch.mv(t[0, 0], t[0, 0, 0]),
            lambda t: torch.addmv(t[0, 0, :, 0], t[0, 0], t[0, 0, 0]), lambda t: F.scaled_dot_product_attention(t, t, t),
            lambda t: F.conv2d(t, torch.rand(8, 8, 3, 3), padding="same"), lambda t: F.prelu(t, torch.rand(8)),
            lambda t: torch.addmm(t[0, 0, :, :16], t[0, 0], t[0, 0].mT),
        ],
    )  # fmt: skip
    def test_operators_that_cuda_runs_in_the_short_type_do(
        self, autocast: None, operation: Callable[[Tensor], Tensor]
    ) -> None:
        assert operation(torch.rand(SHAPE)).dtype is torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(
        "operation",
        [
            F.gelu, F.relu, F.silu, torch.sigmoid, lambda t: t + 1, lambda t: t.mean(), lambda t: F.max_pool2d(t, 2),
            lambda t: F.adaptive_avg_pool2d(t, 1), lambda t: F.pad(t, (1, 1, 1, 1), mode="reflect"), lambda t: torch.stack([t, t]),
            lambda t: F.batch_norm(t, torch.zeros(8), torch.ones(8), training=True),
        ],
    )  # fmt: skip
    def test_other_operators_keep_the_type_of_their_input(
        self, autocast: None, operation: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        assert operation(torch.rand(SHAPE, dtype=dtype)).dtype is dtype

    @pytest.mark.parametrize(
        "operation", [lambda s, w: torch.addcmul(s, s, w), torch.atan2, lambda s, w: torch.cat([s, w])]
    )
    def test_operators_on_mixed_types_take_the_widest(
        self, autocast: None, operation: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        assert operation(torch.rand(SHAPE, dtype=torch.bfloat16), torch.rand(SHAPE)).dtype is torch.float32

    def test_an_explicit_result_type_is_kept(self, autocast: None) -> None:
        assert F.softmax(torch.rand(SHAPE), -1, dtype=torch.bfloat16).dtype is torch.bfloat16

    def test_double_precision_is_left_alone(self, autocast: None) -> None:
        assert torch.exp(torch.rand(SHAPE, dtype=torch.float64)).dtype is torch.float64

    def test_outside_autocast_nothing_is_cast(self, on_fake_card: None) -> None:
        assert F.softmax(torch.rand(SHAPE, dtype=torch.bfloat16), -1).dtype is torch.bfloat16

    def test_what_cuda_refuses_is_refused(self, autocast: None) -> None:
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.rand(3), torch.rand(3))

    def test_softmax_of_a_short_type_keeps_its_result_in_float32_and_no_copy_of_its_input(self, autocast: None) -> None:
        scores = torch.rand(SHAPE, dtype=torch.bfloat16, requires_grad=True)
        assert saved_bytes(lambda: scores.softmax(-1)) == 4 * scores.numel()
        scores.softmax(-1).sum().backward()
        assert scores.grad is not None and scores.grad.dtype is torch.bfloat16

    def test_a_weight_is_cast_once_for_all_its_uses(self, autocast: None) -> None:
        weight = nn.Parameter(torch.rand(32, 32))
        tensor = torch.rand(4, 32, dtype=torch.bfloat16, requires_grad=True)
        twice = saved_bytes(lambda: F.linear(F.linear(tensor, weight), weight))
        assert twice == 2 * weight.numel() + 2 * 2 * tensor.numel()

    def test_every_operator_that_is_named_here_is_one_that_cuda_names(self) -> None:
        named = module._IN_LOWER_TYPE | module._IN_WIDEST_TYPE | module._WITH_FLOAT32_RESULT | module._NORMS.keys()
        assert {name for name in named if not module._has_kernel(name, "AutocastCUDA")} <= {
            "linalg_vecdot", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
        }  # fmt: skip


class TestAttention:
    @pytest.mark.parametrize(
        ("dtype", "head_dim", "mask", "kernel"),
        [
            (torch.bfloat16, 32, None, "FlashAttention"),
            (torch.float16, 256, None, "FlashAttention"),
            (torch.bfloat16, 264, None, "EfficientAttention"),
            (torch.bfloat16, 32, torch.bool, "EfficientAttention"),
            (torch.bfloat16, 32, torch.bfloat16, "EfficientAttention"),
            (torch.float32, 32, None, "EfficientAttention"),
            (torch.float32, 33, None, "Unsafe|Bmm|Alias|Reshape|View"),
        ],
    )
    def test_the_kernel_depends_on_type_head_dimension_and_mask(
        self, on_fake_card: None, dtype: torch.dtype, head_dim: int, mask: torch.dtype | None, kernel: str
    ) -> None:
        tensors = [torch.rand(2, 4, 16, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)]
        given = None if mask is None else torch.ones(16, 16, dtype=mask)
        names = _nodes(F.scaled_dot_product_attention(*tensors, attn_mask=given))
        assert any(part in name for part in kernel.split("|") for name in names), names

    def test_a_kernel_that_the_user_switched_off_is_not_taken(self, on_fake_card: None) -> None:
        tensor = torch.rand(2, 4, 16, 32, dtype=torch.float16, requires_grad=True)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            names = _nodes(F.scaled_dot_product_attention(tensor, tensor, tensor))
        assert not any("FlashAttention" in name or "EfficientAttention" in name for name in names)

    def test_keys_shared_by_heads_are_not_repeated_for_flash_attention(self, on_fake_card: None) -> None:
        query = torch.rand(2, 8, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        shared = torch.rand(2, 2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(query, shared, shared, enable_gqa=True).sum().backward()
        assert shared.grad is not None and shared.grad.shape == shared.shape

    def test_heads_are_padded_to_a_multiple_of_8_for_flash_attention(self, on_fake_card: None) -> None:
        kept = []
        for head_dim in (36, 40):
            tensors = [torch.rand(2, 4, 16, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            kept.append(saved_bytes(lambda tensors=tensors: F.scaled_dot_product_attention(*tensors)))
        assert kept[0] == kept[1]

    def test_no_matrix_of_all_pairs_is_kept(self, on_fake_card: None) -> None:
        query = torch.rand(2, 4, 64, 32, requires_grad=True)
        row_sums = 4 * 2 * 4 * 64
        assert (
            saved_bytes(lambda: F.scaled_dot_product_attention(query, query, query)) == 2 * 4 * query.numel() + row_sums
        )


class TestOlderCards:
    def test_cards_before_ampere_have_no_flash_attention(self) -> None:
        with cuda_like(flash_attention=False), FakeTensorMode():
            tensor = torch.rand(2, 4, 16, 32, dtype=torch.float16, requires_grad=True)
            names = _nodes(F.scaled_dot_product_attention(tensor, tensor, tensor))
        assert any("EfficientAttention" in name for name in names)


class TestDropout:
    def test_the_mask_has_one_byte_per_element(self, on_fake_card: None) -> None:
        tensor = torch.rand(SHAPE, requires_grad=True)
        assert saved_bytes(lambda: F.dropout(tensor, 0.1)) == tensor.numel()

    @pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
    def test_dropout_that_drops_nothing_keeps_nothing(self, on_fake_card: None, p: float, train: bool) -> None:
        tensor = torch.rand(SHAPE, requires_grad=True)
        assert saved_bytes(lambda: F.dropout(tensor, p, train)) == 0


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, dim = x.shape
        parts = self.qkv(self.norm_1(x)).split(dim, dim=-1)
        query, key, value = (part.view(batch_size, length, self.num_heads, -1).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), 0.1)


def test_a_block_of_a_gpt_keeps_what_is_counted_by_hand(autocast: None) -> None:
    batch_size, length, dim, num_heads = 3, 64, 128, 4
    tokens = batch_size * length
    block, x = Block(dim, num_heads), torch.rand(batch_size, length, dim, requires_grad=True)
    per_feature = (
        4 + 4  # the inputs of both norms, in float32
        + 2 + 2  # what they give, cast for the linear layers
        + 3 * 2  # query, key and value, one storage
        + 2  # what attention gives, the input of the linear layer behind it
        + 4 * 2 + 4 * 2  # the inputs of GELU and of the linear layer behind it
        + 1 + 1  # dropout masks
    )  # fmt: skip
    per_token = 2 * (4 + 4) + 4 * num_heads  # mean and deviation for the norms; attention's sums
    weights = 2 * (3 + 1 + 4 + 4) * dim**2  # cast
    expected = tokens * (per_feature * dim + per_token) + weights
    assert saved_bytes(lambda: block(x), tuple(block.parameters())) == expected


class TestWorkspaces:
    def test_the_backward_pass_of_a_convolution_copies_what_it_reads(self, on_fake_card: None) -> None:
        x, weight = torch.rand(2, 3, 8, 8, requires_grad=True), torch.rand(5, 3, 3, 3, requires_grad=True)
        assert _workspaces(lambda: F.conv2d(x, weight).sum()) == [4 * (2 * x.numel() + weight.numel() + 2 * 5 * 6 * 6)]

    def test_a_kernel_of_one_element_takes_its_input_once(self, on_fake_card: None) -> None:
        x, weight = torch.rand(2, 3, 8, 8, requires_grad=True), torch.rand(5, 3, 1, 1, requires_grad=True)
        assert _workspaces(lambda: F.conv2d(x, weight).sum()) == [4 * (x.numel() + weight.numel() + 2 * 5 * 8 * 8)]

    def test_with_the_channels_last_nothing_is_copied(self, on_fake_card: None) -> None:
        x = torch.rand(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        weight = torch.rand(5, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        assert _workspaces(lambda: F.conv2d(x, weight).pow(2).sum()) == []

    def test_a_weight_that_lies_otherwise_than_its_input_is_copied(self, on_fake_card: None) -> None:
        x = torch.rand(2, 4, 8, 8).to(memory_format=torch.channels_last)
        weight = torch.rand(5, 4, 3, 3)
        assert _workspaces(lambda: F.conv2d(x, weight).sum().requires_grad_()) == [4 * weight.numel()]

    def test_grouped_convolutions_are_not_copied(self, on_fake_card: None) -> None:
        x, weight = torch.rand(2, 4, 8, 8, requires_grad=True), torch.rand(4, 1, 3, 3, requires_grad=True)
        assert _workspaces(lambda: F.conv2d(x, weight, groups=4).pow(2).sum()) == []

    def test_flash_attention_sums_the_gradient_of_the_query_in_float32(self, on_fake_card: None) -> None:
        query = torch.rand(2, 4, 100, 40, dtype=torch.bfloat16, requires_grad=True)
        rounded = 4 * 2 * 4 * 128 * (64 + 1)
        copied = 2 * 2 * query.numel()  # the output and its gradient, which lie by heads and not by positions
        assert _workspaces(lambda: F.scaled_dot_product_attention(query, query, query).sum()) == [rounded + copied]


class TestAfterwards:
    def test_real_tensors_are_as_before(self) -> None:
        def seen() -> tuple[object, ...]:
            x = torch.rand(2, 4, 8, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                product = x @ x
                attention = F.scaled_dot_product_attention(x, x, x)
                return (
                    product.softmax(-1).dtype,
                    product.exp().dtype,
                    attention.dtype,
                    _nodes(attention),
                    _nodes(F.dropout(x, 0.1)),
                )

        before = seen()
        with cuda_like():
            pass
        assert seen() == before

    def test_it_can_be_entered_again(self) -> None:
        for _ in range(2):
            with cuda_like(), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
                assert torch.exp(torch.rand(3, dtype=torch.bfloat16)).dtype is torch.float32


def _nodes(tensor: Tensor) -> list[str]:
    """Names of the nodes of the graph of a result."""
    names, todo = [], [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.append(node.name())
            todo += [following for following, _ in node.next_functions]
    return names


def _workspaces(loss: Callable[[], Tensor]) -> list[int]:
    """Sizes of the workspaces of a forward and backward pass."""
    with _Workspaces() as seen:
        loss().backward()
    return seen.sizes


class _Workspaces(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (rule := RULES.get(func)) and (size_bytes := rule(args, result).peak_bytes):
            self.sizes.append(size_bytes)
        return result
