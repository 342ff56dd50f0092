"""Which arithmetic this processor has, for the tests whose outcome depends on it.

`ONEDNN_MAX_CPU_ISA=AVX2` makes a newer x86 processor behave like one that emulates bf16 and fp16. Tests marked `arithmetic`
are run a second time so by `make test-avx2`.
"""

from __future__ import annotations

import pytest
import torch


def has_arithmetic(amp: str) -> bool:
    """Whether oneDNN has instructions of this processor for `bf16` or `fp16`."""
    supports = torch.ops.mkldnn
    return bool(supports._is_mkldnn_bf16_supported() if amp == "bf16" else supports._is_mkldnn_fp16_supported())


def skip_without_arithmetic(amp: str) -> None:
    """Skip the running test where the processor emulates `amp`; `off` it always has."""
    if amp != "off" and not has_arithmetic(amp):
        pytest.skip(f"this processor emulates {amp}")


needs_bf16_arithmetic = pytest.mark.skipif(not has_arithmetic("bf16"), reason="this processor emulates bf16")
