"""How many kernels oneDNN makes for new shapes."""

import subprocess
import sys

import pytest
from torch.backends import mkldnn

from autotune.probe.kernel_cache import CAPACITY, VARIABLES, cache_capacity

COUNTS = """
import os
import torch
from autotune.probe.kernel_cache import num_kernels_made

def convolve(length):
    print("by Python", length)
    os.write(1, b"by another library\\n")
    torch.nn.functional.conv2d(torch.ones(4, 16, length, 64), torch.ones(8, 16, 5, 5))
    if length == 33:
        raise ValueError("by the user")

print("before")
counts = [num_kernels_made(lambda length=length: convolve(length)) for length in (31, 31, 32, 31)]
try:
    num_kernels_made(lambda: convolve(33))
except ValueError as error:
    print(error)
print("counts", *(min(1, count) for count in counts))
"""


@pytest.mark.skipif(not mkldnn.is_available(), reason="this torch has no oneDNN")
def test_kernels_are_made_for_new_shapes_and_what_is_printed_meanwhile_comes_through():
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    assert printed[0] == "before" and printed[-2:] == ["by the user", "counts 1 0 1 0"]
    assert sorted(printed[1:-2]) == sorted(
        [*5 * ["by another library"], *(f"by Python {n}" for n in (31, 31, 32, 31, 33))]
    )


@pytest.mark.parametrize(("said", "capacity"), [(None, CAPACITY), ("16", 16), ("0", 0), ("1k", None), ("", None)])
@pytest.mark.parametrize("variable", VARIABLES)
def test_how_many_are_kept_is_what_the_environment_says(monkeypatch, variable, said, capacity):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(variable, said)
    assert cache_capacity() == capacity
