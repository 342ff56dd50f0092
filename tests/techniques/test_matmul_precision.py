import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autotune import prepare
from autotune.devices.cuda import CudaDevice
from autotune.probe.runs import exact_convolutions
from autotune.records.device import Calibration, Rate
from autotune.techniques import find_techniques
from autotune.techniques.matmul_precision import MatmulPrecision
from tests.devices.processes import in_process
from tests.gpu.test_cuda import require

keep_settings = find_techniques().keep_settings


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


def test_a_cpu_has_no_tf32(make_task, make_setting):
    support = MatmulPrecision().support(make_setting(make_task(linear)))
    assert support.choices == ("highest",)
    assert "NVIDIA" in support.reason


class NewGpu:
    capabilities = CudaDevice.capabilities

    def info(self):
        return type("Info", (), {"capability": (8, 0)})()


@pytest.mark.parametrize(("rate", "offered"), [(300.0, True), (101.0, False)])
def test_tf32_is_offered_where_matrix_products_are_faster_in_it(rate, offered, make_task, make_setting):
    rates = tuple(
        Rate(work="matmul", arithmetic=name, sizes=(64,), flops_per_s=(flops_per_s,))
        for name, flops_per_s in (("fp32", 100.0), ("tf32", rate))
    )
    setting = replace(make_setting(make_task(linear)), device=NewGpu(), calibration=Calibration(rates=rates))
    support = MatmulPrecision().support(setting)
    assert support.choices == (("highest", "tf32") if offered else ("highest",))
    assert support.optional == (() if offered else ("tf32",))


def test_code_that_sets_the_precision_itself_has_no_choice(make_task, make_setting):
    with keep_settings():
        torch.set_float32_matmul_precision("high")
        support = MatmulPrecision().support(replace(make_setting(make_task(linear)), device=NewGpu()))
    assert support.choices == ("highest",)
    assert support.reason == "your code sets the precision of fp32 products itself"


def test_the_process_wide_setting_can_be_put_back(make_task):
    with keep_settings():
        prepare(make_task(linear), {"matmul_precision": "tf32"}, device="cpu")
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
@pytest.mark.values
def test_matrix_products_on_a_gpu_are_rounded(make_task):
    require((8, 0), "TF32")
    task = make_task(linear)

    def products():
        values = torch.randn(256, 256, device="cuda")
        exact = values @ values
        with keep_settings():
            prepare(task, {"matmul_precision": "tf32"}, device="cuda")
            rounded = values @ values
        return torch.equal(rounded, exact), torch.equal(values @ values, exact)

    assert in_process(products) == (False, True)


def test_tf32_leaves_the_older_getters_readable_since_inductor_and_lightning_read_them(make_task):
    with keep_settings():
        prepare(make_task(linear), {"matmul_precision": "tf32"}, device="cpu")
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32 is True
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False


SET_BY_THE_FILE = """
import torch
from autotune.techniques.matmul_precision import _precision
from autotune.probe.runs import exact_convolutions
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
with exact_convolutions():
    assert not torch.backends.cudnn.allow_tf32
print(_precision(), torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
"""


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has no fp32_precision")
def test_a_file_that_sets_the_precision_of_one_backend_itself_keeps_it():
    done = subprocess.run([sys.executable, "-c", SET_BY_THE_FILE], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "ieee", "tf32"], done.stderr


def test_convolutions_are_compared_without_tf32_and_train_with_it():
    assert torch.backends.cudnn.allow_tf32
    with exact_convolutions():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32
