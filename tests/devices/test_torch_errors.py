"""What is out of memory, or a kernel that is missing, and what only sounds like it."""

import errno
import os

import numpy as np
import pytest
import torch

from autotune.devices.linux import kernel_oom_kills
from autotune.devices.torch_errors import attempted_bytes, is_hosts, is_out_of_memory, missing_kernel
from tests.devices.processes import in_process

CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_ALLOCATOR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.06 GiB is free."


class UserError(RuntimeError):
    """An exception of the user's own."""


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        torch.OutOfMemoryError(CUDA_ALLOCATOR),
        RuntimeError(CPU_ALLOCATOR),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
        ),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError(
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
            "that might have already set an error? Error 2: out of memory"
        ),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:40]}",
)
def test_a_failed_allocation_is_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8 raises RuntimeError")
def test_an_accelerator_error_is_judged_by_its_text():
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: device-side assert triggered"))


def test_real_errors_of_torch_and_numpy_are_out_of_memory():
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**60, dtype=np.uint8)
    for error in (of_torch.value, of_numpy.value):
        assert is_out_of_memory(error)
        assert attempted_bytes(error) == 2**60


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("we are out of memory"),
        RuntimeError("out of memory: CUDA error: out of memory"),
        RuntimeError(f"our loader failed: {CPU_ALLOCATOR}"),
        ValueError(CPU_ALLOCATOR),
        ValueError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(CUDA_ALLOCATOR),  # torch raises it as torch.OutOfMemoryError
        UserError(CPU_ALLOCATOR),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not create a primitive descriptor"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:40]}",
)
def test_an_error_that_only_sounds_like_it_is_not(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "message",
    [
        "could not create a primitive",
        "could not create a memory object",
        "could not execute a primitive",
        "can't start new thread",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "Unable to find an engine to execute this computation",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART",
        "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "DataLoader worker (pid 12) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 12, 13) exited unexpectedly",
    ],
)
def test_an_error_with_several_causes_counts_only_with_evidence_that_memory_is_short(message):
    assert is_out_of_memory(RuntimeError(message), scarce=lambda: True)
    assert not is_out_of_memory(RuntimeError(message), scarce=lambda: False)


def test_a_kernel_that_does_not_exist_is_not_out_of_memory_even_at_the_limit():
    error = RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
    assert not is_out_of_memory(error, scarce=lambda: True)


def test_evidence_alone_makes_no_error_out_of_memory():
    assert not is_out_of_memory(RuntimeError("shapes do not match"), scarce=lambda: True)


def test_it_is_found_as_the_cause_of_another_error():
    assert is_out_of_memory(raised(UserError("step failed"), cause=raised(MemoryError())))


def fail_while_handling(error):
    try:
        raise error
    except RuntimeError:
        raise UserError("step failed") from None


def test_it_is_found_as_the_context_of_another_error_even_when_hidden():
    with pytest.raises(UserError) as caught:
        fail_while_handling(RuntimeError(CPU_ALLOCATOR))
    assert is_out_of_memory(caught.value)
    assert attempted_bytes(caught.value) == 4 * 2**30


def test_it_is_found_in_a_group():
    assert is_out_of_memory(ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [MemoryError()])]))


def test_errors_that_cause_each_other_do_not_hang():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    assert attempted_bytes(first) == 0


class Failing(torch.utils.data.Dataset):
    """Fails in a data-loading worker, with its error as the cause of another."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise UserError("no sample") from self.error


def classify_in_worker(errors):
    found = []
    for error in errors:
        with pytest.raises(UserError, match="Caught UserError in DataLoader worker process 0") as reported:
            list(torch.utils.data.DataLoader(Failing(error), num_workers=1))
        found.append(is_out_of_memory(reported.value))
    return found


def test_it_is_found_in_what_a_data_loading_worker_reports():
    allocations = [MemoryError(), MemoryError("of python"), RuntimeError(CPU_ALLOCATOR)]
    others = [ValueError("out of memory"), RuntimeError("out of memory")]
    assert in_process(classify_in_worker, allocations + others) == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (CPU_ALLOCATOR, 4 * 2**30),
        (CUDA_ALLOCATOR, 2 * 2**30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * 2**20),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA error: out of memory", 0),
    ],
)
def test_the_size_that_failed_is_read_from_the_message(message, expected):
    assert attempted_bytes(RuntimeError(message)) == expected


@pytest.mark.parametrize(
    ("error", "hosts"),
    [
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to ..."
            ),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (RuntimeError("CUDA error: out of memory"), False),
    ],
)
def test_the_hosts_memory_is_told_apart_from_a_gpus(error, hosts):
    assert is_hosts(error) == hosts
    assert is_hosts(raised(ValueError("beside it"), cause=error)) == hosts


def test_the_kernels_count_of_kills_does_not_fall():
    before = kernel_oom_kills()
    assert before >= 0
    assert kernel_oom_kills() >= before


BEFORE_2_6 = "could not create a primitive descriptor"
LATER = (
    "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with environment "
    "variable ONEDNN_VERBOSE=all to get additional diagnostic information."
)


@pytest.mark.parametrize("message", [BEFORE_2_6, LATER])
def test_a_kernel_that_onednn_does_not_have_is_named_in_one_clause(message):
    told = "oneDNN, torch's CPU library, has no kernel for this on this processor: "
    assert missing_kernel(RuntimeError(message)) == told + message.partition(".")[0]


def test_a_graph_that_no_engine_of_cudnn_takes_is_a_missing_kernel_whatever_the_memory():
    error = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")
    assert missing_kernel(error).startswith("cuDNN has no kernel for this on this GPU: ")
    assert not is_out_of_memory(error, scarce=lambda: True)


def test_a_missing_kernel_is_found_as_the_cause_of_another_error():
    error = ValueError("the layer failed")
    error.__cause__ = RuntimeError(LATER)
    assert missing_kernel(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError(f"our layer: {LATER}"),
        ValueError(LATER),
    ],
)
def test_another_error_is_no_missing_kernel(error):
    assert missing_kernel(error) == ""
