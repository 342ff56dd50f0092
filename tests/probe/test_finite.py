"""What is finite, found without a copy: it could set the peak."""

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.probe.finite import dense_values, is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_without_a_copy(dtype, bad):
    values = torch.randn(3, 4, 5, 6).to(dtype).to(memory_format=torch.channels_last)
    assert is_finite(values) and is_finite(values[:0])
    values[2, 1, 3, 5] = bad
    with largest_result() as largest:
        assert not is_finite(values)
    assert largest == [1]


@contextlib.contextmanager
def largest_result():
    """Collects the number of elements of the largest tensor that any operator makes."""
    found = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            found[0] = max(found[0], made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    with Watch():
        yield found


def test_a_sparse_gradient_that_is_not_finite_is_found():
    bag = torch.nn.EmbeddingBag(10, 4, sparse=True)
    (bag(torch.tensor([[1, 1]])).sum() * float("inf")).backward()
    assert bag.weight.grad.is_sparse
    assert not is_finite(dense_values(bag.weight.grad))
