"""Which errors say that a library has no kernel for what was asked of this processor, however much memory there is."""

from __future__ import annotations

import re

from autotune.devices.oom import chain, is_librarys

# oneDNN has no implementation for these types and this instruction set, e.g. of an LSTM in bf16 with AVX2 alone: "unsupported
# isa", "unsupported datatype combination" in https://oneapi-src.github.io/oneDNN/dev_guide_verbose_table.html
_NO_KERNEL = re.compile(r"could not create a primitive descriptor\b[\w ]*")


def missing_kernel(error: BaseException) -> str:
    """What the library says that it lacks, if `error` or anything in its causes and contexts says so; else empty."""
    for link in chain(error):
        if is_librarys(link) and (found := _NO_KERNEL.match(str(link))):
            return found[0]
    return ""
