"""Recognises errors that say that a library has no kernel for an operation on this processor."""

from __future__ import annotations

import re

from autotune.devices.oom import chain, is_librarys

# oneDNN has no implementation for these types and this instruction set, e.g. of an LSTM in bf16 with AVX2 alone: "unsupported
# isa", "unsupported datatype combination" in https://oneapi-src.github.io/oneDNN/dev_guide_verbose_table.html
_NO_KERNEL = re.compile(r"could not create a primitive descriptor\b[\w ]*")


def missing_kernel(error: BaseException) -> str:
    """The library's message about the missing kernel, from `error`, its causes and contexts; else empty."""
    for link in chain(error):
        if is_librarys(link) and (found := _NO_KERNEL.match(str(link))):
            return found[0]
    return ""
