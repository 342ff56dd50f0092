"""Recognises errors that say that a library has no kernel for an operation on this processor or GPU."""

from __future__ import annotations

import re

from autotune.devices.oom import chain, is_librarys

_NO_KERNEL = {
    # oneDNN has no implementation for these types and this instruction set, e.g. of an LSTM in bf16 with AVX2 alone: "unsupported
    # isa", "unsupported datatype combination" in https://oneapi-src.github.io/oneDNN/dev_guide_verbose_table.html
    "oneDNN, torch's CPU library, has no kernel for this on this processor": re.compile(
        r"could not create a primitive descriptor\b[\w ]*"
    ),
    # none of cuDNN's engines takes shapes, types or strides as they are, e.g. attention with heads of an odd width
    "cuDNN has no kernel for this on this GPU": re.compile(
        r"cuDNN Frontend error: [^\n]*(?:No execution plans support the graph|No valid engine configs[\w ]*)"
    ),
}


def missing_kernel(error: BaseException) -> str:
    """Whose kernel is missing, and the library's message, from `error`, its causes and contexts; else empty."""
    for link in chain(error):
        for told, pattern in _NO_KERNEL.items():
            if is_librarys(link) and (found := pattern.match(str(link))):
                return f"{told}: {found[0]}"
    return ""
