import os
import subprocess
import sys

import pytest
import torch

from autotune import prepare
from autotune.techniques.amp import Amp
from tests.arithmetic import has_arithmetic

pytestmark = pytest.mark.arithmetic


def linear() -> torch.nn.Module:
    return torch.nn.Linear(8, 4)


def test_a_cpu_trains_in_bf16_where_it_is_asked_to(make_task, make_setting):
    support = Amp().support(make_setting(make_task(linear)))
    assert {"off", "bf16"} <= {*support.choices, *support.optional}


def test_short_types_that_the_processor_only_emulates_are_optional_with_the_reason():
    program = (
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from autotune.techniques.amp import Amp\n"
        "device = SimpleNamespace(kind='cpu', torch_device=torch.device('cpu'))\n"
        "support = Amp().support(SimpleNamespace(device=device))\n"
        "print(support.choices, support.optional, support.reason, sep='|')\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    choices, optional, reason = done.stdout.strip().split("|")
    assert choices == "('off',)"
    assert "bf16" in optional
    assert "no bf16" in reason and "emulating" in reason


def test_bf16_autocasts_the_forward_pass_and_needs_no_scaler(make_task):
    seen = []

    def training_step(model, batch):
        output = model(batch[0])
        seen.append(output.dtype)
        return torch.nn.functional.cross_entropy(output.float(), batch[1])

    session = prepare(make_task(linear, training_step=training_step), {"batch_size": 2, "amp": "bf16"}, device="cpu")
    session.step(next(iter(session.loader)))
    assert seen == [torch.bfloat16]
    assert session.scaler is None
    assert all(p.dtype is torch.float32 for p in session.model.parameters())


def test_fp16_has_a_scaler(make_task):
    session = prepare(make_task(linear), {"batch_size": 2, "amp": "fp16"}, device="cpu")
    assert isinstance(session.scaler, torch.amp.GradScaler)
    assert session.scaler.is_enabled()


class OldGpu:
    kind = "cuda"

    def info(self):
        return type("Info", (), {"capability": (7, 5)})()


def test_a_gpu_without_bfloat16_tensor_cores_gets_fp16_only(make_task, make_setting):
    setting = make_setting(make_task(linear))
    setting = type(setting)(**{**vars(setting), "device": OldGpu()})
    support = Amp().support(setting)
    assert support.choices == ("off", "fp16")
    assert "8.0" in support.reason and "7.5" in support.reason


@pytest.mark.parametrize("choice", ["bf16", "fp16"])
def test_what_a_cpu_emulates_cannot_be_traced_for_it(choice):
    reason = Amp().untraceable(choice, "cpu")
    assert (reason == "") is has_arithmetic(choice)
    assert has_arithmetic(choice) or f"emulates {choice}" in reason
    assert Amp().untraceable(choice, "cuda") == ""


@pytest.mark.parametrize("choice", ["float16", True, 16, None])
def test_other_names_are_refused(choice):
    with pytest.raises(ValueError, match="off, bf16, fp16"):
        Amp().validate(choice)
