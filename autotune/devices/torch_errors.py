"""Recognises errors of torch and its libraries: a failed allocation, a missing kernel. A user's exception with such words does not count.

Some libraries hide the cause: oneDNN says `could not create a primitive`, and cuBLAS `CUBLAS_STATUS_NOT_INITIALIZED`, for lack
of memory as for other reasons. Such errors count only where the device shows that memory is at its limit.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator

from autotune.lazy import torch_if_imported

_ALLOCATION_FAILED = re.compile(
    r"\[enforce fail at [^\]]+\] [^\n]*DefaultCPUAllocator: "
    r"(?:can't allocate|not enough) memory: you tried to allocate \d+ bytes"
    r"|std::bad_alloc\Z"
    r"|CUDA (?:driver )?error: out of memory\b"
    r"|Unexpected error from cudaGetDeviceCount\(\)[^\n]* Error 2: out of memory\b"
    r"|Triton Error \[CUDA\]: out of memory\b"
    r"|(?:CUDA|cuDNN|cuDNN Frontend|cusolver|cuFFT) error: \w*ALLOC(?:ATION)?_FAILED\b"
    r"|NCCL error in: (?s:.*)Cuda failure 2\b"
)
_DRIVER_REFUSED = re.compile(r"CUDA error: out of memory\b")
_PERHAPS_FAILED = re.compile(
    # oneDNN: convolutions, linear layers, LSTMs. Where it cannot create a primitive descriptor, it lacks the kernel and not memory
    r"could not (?:create|execute|initialize) an? (?!primitive descriptor\b)[\w ]+\Z"
    r"|can't start new thread\Z"
    r"|DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)"
    r"|CUDA error: CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)\b"
    r"|cuDNN error: CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR\w*|EXECUTION_FAILED\w*)\b"
    r"|cuDNN Frontend error: [^\n]*No valid execution plans built"
    r"|(?:(?:GET|FIND) was )?[Uu]nable to find an engine to execute this computation"
    r"|(?:FIND|Unable to find|unable to find) [\w ]*cuDNN algorithm to run convolution"
)
# torch re-raises an error of a data-loading worker, a pinning thread or a replica with that error's traceback as its message
_HANDED_OVER = re.compile(r"Caught \w+ in [^\n]+\.\nOriginal ")
_HANDED_LINE = re.compile(
    r"^(?:Original )?(?:[\w.]+\.)?(?:(?P<memory>MemoryError|_ArrayMemoryError|OutOfMemoryError)(?:: .*)?"
    r"|(?:RuntimeError|AcceleratorError): (?P<message>.*))$",
    re.MULTILINE,
)
_ACCELERATOR_FAILED = re.compile(
    r"(?:CUDA|HIP|cuDNN|cuDNN Frontend|MIOpen|cusolver|cusparse|cuFFT|NCCL|nvrtc|Triton)\b[^\n]{0,20} [Ee]rror"
)
_PRINTED = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|CUDA out of memory\. Tried to allocate"
)
# the last: a data worker that the kernel killed, which it does for the host's memory alone
_OF_HOST = re.compile(
    r"DefaultCPUAllocator: |std::bad_alloc\Z|DataLoader worker \(pid(?:\(s\))? \d+\) is killed by signal: Killed"
)
_ATTEMPTED = re.compile(r"(?:tried|unable) to allocate (\d+(?:\.\d+)?) (bytes|[KMGTPE]iB)\b", re.IGNORECASE)
_NO_KERNEL = {
    # oneDNN has no implementation for these types and this instruction set, e.g. of an LSTM in bf16 with AVX2 alone: "unsupported
    # isa", "unsupported datatype combination" in https://oneapi-src.github.io/oneDNN/dev_guide_verbose_table.html
    "oneDNN, torch's CPU library, has no kernel for this on this processor": re.compile(
        r"could not create a primitive descriptor\b[\w ]*"
    ),
    # none of cuDNN's engines takes these shapes, types or strides, e.g. attention with heads of an odd width
    "cuDNN has no kernel for this on this GPU": re.compile(
        r"cuDNN Frontend error: [^\n]*(?:No execution plans support the graph|No valid engine configs[\w ]*)"
    ),
}
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}


def is_out_of_memory(error: BaseException, *, scarce: Callable[[], bool] = lambda: False) -> bool:
    """Whether `error`, or anything in its causes, contexts or groups, is a failed allocation.

    Args:
        error: the error as caught.
        scarce: tells whether other evidence shows that memory has run short; called only where an error may also have
            another cause.
    """
    links = list(chain(error))
    return any(_is_failed_allocation(link) for link in links) or (
        any(_says(link, _PERHAPS_FAILED) for link in links) and scarce()
    )


def is_hosts(error: BaseException) -> bool:
    """Whether a failed allocation was for the host's memory, whatever device is trained on."""
    return any(
        isinstance(link, MemoryError)
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or (is_librarys(link) and _OF_HOST.search(str(link)) is not None)
        for link in chain(error)
    )


def is_drivers(error: BaseException) -> bool:
    """Whether the driver itself, and not torch's allocator, refused memory."""
    return any(is_librarys(link) and _DRIVER_REFUSED.match(str(link)) for link in chain(error))


def failed_allocation(printed: str) -> str:
    """The first printed line in which torch reports a failed allocation; empty where there is none."""
    return next((line.strip() for line in printed.splitlines() if _PRINTED.search(line)), "")


def attempted_bytes(error: BaseException) -> int:
    """Bytes that the failed allocation asked for; 0 if no message in the chain says."""
    for link in chain(error):
        if found := _ATTEMPTED.search(str(link)):
            return int(float(found[1]) * _UNITS[found[2].lower()])
    return 0


def missing_kernel(error: BaseException) -> str:
    """Which library lacks a kernel, and its message, if `error` or one of its causes and contexts says so; else empty."""
    for link in chain(error):
        for told, pattern in _NO_KERNEL.items():
            if is_librarys(link) and (found := pattern.match(str(link))):
                return f"{told}: {found[0]}"
    return ""


def broken_context() -> RuntimeError | None:
    """The error that CUDA gives to each further call of this process, e.g. after an illegal memory access; None if there is none.

    A kernel fails after the call that launched it has returned. The call that meets the failure may be one of cuDNN or cuBLAS, which
    says only that it failed itself. Asked here is whether a stream is done, which waits for nothing and so cannot hang.
    """
    loaded = torch_if_imported()
    if loaded is None or not loaded.cuda.is_initialized():
        return None
    try:
        loaded.cuda.current_stream().query()
    except RuntimeError as kept:
        return kept
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, its causes and contexts, and the members of groups among them: each once, even in a cycle."""
    seen: set[int] = set()
    unseen: list[BaseException | None] = [error]
    while unseen:
        link = unseen.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        unseen += (link.__context__, link.__cause__)
        if isinstance(link, BaseExceptionGroup):
            unseen += link.exceptions


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    loaded = torch_if_imported()
    if loaded is not None and isinstance(error, loaded.OutOfMemoryError):
        return True
    return _says(error, _ALLOCATION_FAILED) or any(line["memory"] for line in _lines_handed_over(error))


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Whether an error of torch's C++ matches the pattern, or such an error in a traceback that a worker handed over."""
    if is_librarys(error) and pattern.match(str(error)):
        return True
    return any(line["message"] and pattern.match(line["message"]) for line in _lines_handed_over(error))


def _lines_handed_over(error: BaseException) -> Iterator[re.Match[str]]:
    return _HANDED_LINE.finditer(text) if _HANDED_OVER.match(text := str(error)) else iter(())


def is_accelerators(error: BaseException) -> bool:
    """Whether CUDA or one of its libraries failed. Kernels run later than they are called, so any later line may raise the error."""
    return is_librarys(error) and _ACCELERATOR_FAILED.match(str(error)) is not None


def is_librarys(error: BaseException) -> bool:
    """Whether torch's C++ raises this type: RuntimeError itself, AcceleratorError (since torch 2.8), a process group's error."""
    return type(error) is RuntimeError or type(error).__qualname__ in ("AcceleratorError", "DistBackendError")
