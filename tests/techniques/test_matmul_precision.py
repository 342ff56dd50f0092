import pytest
import torch

from autotune import prepare
from autotune.techniques import restored_settings
from autotune.techniques.matmul_precision import MatmulPrecision


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


def test_a_cpu_has_no_tf32(make_task, make_setting):
    support = MatmulPrecision().support(make_setting(make_task(linear)))
    assert support.choices == ("highest",)
    assert "NVIDIA" in support.reason


def precision():
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def test_the_process_wide_setting_can_be_put_back(make_task):
    before = precision()
    with restored_settings():
        prepare(make_task(linear), {"matmul_precision": "tf32"}, device="cpu")
        assert precision() in ("tf32", True)
    assert precision() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs an NVIDIA GPU")
def test_matrix_products_on_a_gpu_are_rounded(make_task):
    values = torch.randn(256, 256, device="cuda")
    exact = values @ values
    with restored_settings():
        prepare(make_task(linear), {"matmul_precision": "tf32"}, device="cuda")
        assert not torch.equal(values @ values, exact)
    assert torch.equal(values @ values, exact)
